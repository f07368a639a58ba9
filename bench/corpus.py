#!/usr/bin/env python3
"""Runs other people's programs on the emulated device and counts what came of them: right, refused with an error, or wrong.

    python3 bench/corpus.py --folder DIR [--install] [--more] [--gpumux PATH] [--out FILE]

DIR keeps a virtual environment with what bench/corpus/requirements.txt lists, and CuPy's sources (PyPI, by checksum). What runs is in
bench/corpus/tests.toml. Without --more it takes half a minute, and is part of CI.

Fails (1) if something is wrong, or fewer are right than tests.toml has. Where PyPI cannot be reached, or has no wheels for this Python,
it says so, and the exit status is 3.

- CuPy: its own tests
- numba-cuda: its own tests
- Triton: kernels of the shapes of its tutorials (bench/corpus/test_triton.py)
"""

import argparse
import collections
import concurrent.futures
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv

import common

ROOT = pathlib.Path(__file__).resolve().parent.parent
LISTS = ROOT / "bench/corpus"
CANNOT = 3
PATIENCE = 120  # s, each test
RESULTS = ["right", "refused", "wrong", "not ended", "skipped"]
WORST = ["wrong", "not ended", "refused", "right", "skipped"]


def prepare(folder, sources):
    """Installs what is not there; the interpreter, and where each suite's tests are."""
    python = folder / "venv/bin/python"
    requirements = LISTS / "requirements.txt"
    # Written at the end: an installation that was interrupted is none.
    mark = folder / hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not mark.exists():
        venv.create(folder / "venv", with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", requirements]
        subprocess.run(command, check=True, timeout=600)
        mark.touch()
    places = {"Triton": LISTS, "numba-cuda": next((folder / "venv/lib").glob("python*/site-packages"))}
    for name, source in sources.items():
        places[name] = folder / source["folder"]
        if not places[name].exists():
            with urllib.request.urlopen(source["url"], timeout=60) as answer:
                data = answer.read()
            if hashlib.sha256(data).hexdigest() != source["sha256"]:
                sys.exit(f"{source['url']}: another checksum")
            tarfile.open(fileobj=io.BytesIO(data)).extractall(folder, filter="data")
    return python, places


class Corpus:
    def __init__(self, gpumux, folder, python):
        self.gpumux, self.folder, self.python = gpumux, folder, python
        toolkit = next((folder / "venv/lib").glob("python*/site-packages/nvidia/cu13"))
        self.environment = dict(
            os.environ, CUDA_PATH=str(toolkit), CUDA_HOME=str(toolkit), LD_LIBRARY_PATH=str(toolkit / "lib"),
            PYTHONPATH=str(LISTS), CORPUS_PATIENCE=str(PATIENCE), CUPY_CACHE_DIR=str(folder / "cupy"), CUPY_TEST_GPU_LIMIT="1",
            TRITON_CACHE_DIR=str(folder / "triton"), TRITON_PTXAS_PATH=str(LISTS / "ptxas"),
            TRITON_PTXAS_BLACKWELL_PATH=str(LISTS / "ptxas"),
        )

    def run(self, name, place, tests, left_out):
        """Each test's result, and why. The context is lost with what is refused: a new process goes on behind it."""
        outcomes = self.folder / f"{name}.jsonl"
        outcomes.unlink(missing_ok=True)
        command = [
            self.gpumux, "emu", "--profile", LISTS / "device.toml", "--", self.python, "-m", "pytest", "-q", "-p", "outcomes",
            "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", place, "--pyargs", *tests,
        ]
        if left_out:
            command += ["-k", " and ".join(f"not {name}" for name in left_out)]
        environment = {**self.environment, "CORPUS_OUTCOMES": str(outcomes)}
        seen, results = 0, {}
        while True:
            done = subprocess.run(
                [str(part) for part in command], cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                errors="replace",
            )
            lines = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
            if len(lines) == seen or not any("test" in line for line in lines):
                sys.exit(f"{name}: no test ran\n{done.stdout[-2000:]}")
            for line in lines[seen:]:
                if "result" in line:
                    # A test may have several, of its parts: the worst holds.
                    both = [line, results.get(line["test"], line)]
                    results[line["test"]] = min(both, key=lambda it: WORST.index(it["result"]))
            last, seen = lines[-1], len(lines)
            if last.get("end") == "all":
                return results
            if "end" not in last:
                # The plugin ends the process of a test that takes too long.
                result = "not ended" if done.returncode == 1 else "wrong"
                results[last["test"]] = dict(last, result=result, why=f"exit status {done.returncode}: {done.stdout[-200:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--install", action="store_true", help="only that")
    parser.add_argument("--more", action="store_true", help="the tests beside those of CI, for about ten minutes")
    parser.add_argument("--gpumux", default=str(ROOT / "target/debug/gpumux"))
    parser.add_argument("--out", type=pathlib.Path, help="a results file")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lists = tomllib.loads((LISTS / "tests.toml").read_text())
    try:
        python, places = prepare(folder, lists["sources"])
    except (subprocess.SubprocessError, OSError) as error:
        print(f"the corpus cannot be had: {error}")
        return CANNOT
    if arguments.install:
        return 0
    corpus = Corpus(arguments.gpumux, folder, python)
    part = "more" if arguments.more else "ci"
    suites = {name: suite for name, suite in lists["suites"].items() if part in suite}

    def run(name):
        return corpus.run(name, places[name], suites[name][part]["tests"], suites[name].get("left_out", {}))

    failed, rows = False, []
    print("| | right | refused | wrong | not ended | skipped |\n|---|---:|---:|---:|---:|---:|")
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for name, results in zip(suites, pool.map(run, suites)):
            counts = collections.Counter(line["result"] for line in results.values())
            values = {result.replace(" ", "_"): counts[result] for result in RESULTS}
            rows.append({"case": name, "mode": part, "values": values})
            print(f"| {name} | " + " | ".join(str(counts[result]) for result in RESULTS) + " |", flush=True)
            least = suites[name][part]["right"]
            if counts["wrong"] or counts["right"] < least:
                failed = True
                print(f"{name}: nothing may be wrong, and {least} must be right")
            for test, line in results.items():
                if line["result"] == "wrong" or line["result"] == "not ended" and failed:
                    print(f"{line['result']}: {test}: {line['why']}")
    if arguments.out:
        common.save(arguments.out, common.head("corpus", "NVIDIA H100 80GB HBM3 (emulated)", "emulated") | {"rows": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
