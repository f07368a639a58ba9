#!/usr/bin/env python3
"""Runs other people's programs on the emulated device and counts what came of them: right, refused with an error, or wrong.

    python3 bench/corpus.py --folder DIR [--gpumux PATH] [--json FILE]

DIR keeps a virtual environment with what bench/corpus/requirements.txt lists (PyPI, by checksum). Nothing may be wrong: the exit status is 1 if
something is. Takes some minutes; it is not part of CI, as it downloads 300 MB.

- nvcc: the programs of tests/cuda, as they are and as separate units that are linked (-rdc=true)
- CuPy: bench/corpus/cupy_lines.py, with CuPy's own defaults and as `gpumux emu` sets them
- Numba: modules of Numba's own tests, with its built-in target
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAMS = ["memory", "kernels", "cooperative", "copies", "graphs", "device"]
NUMBA = [
    "cudadrv.test_context_stack", "cudadrv.test_cuda_memory", "cudadrv.test_host_alloc", "cudadrv.test_pinned",
    "cudadrv.test_select_device", "cudadrv.test_streams", "cudapy.test_array", "cudapy.test_boolean",
    "cudapy.test_localmem", "cudapy.test_sm",
]
PATIENCE = 120  # s, each program


def prepare(folder):
    """The environment's interpreter and its CUDA toolkit."""
    python = folder / "venv/bin/python"
    requirements = ROOT / "bench/corpus/requirements.txt"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
        command = [python, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "-r", requirements]
        subprocess.run(command, check=True)
    toolkit = next((folder / "venv/lib").glob("python*/site-packages/nvidia/cu13"))
    home = folder / "cuda"
    for link, target in {
        "nvvm/lib64/libnvvm.so": "lib/libnvvm.so.4",
        "nvvm/lib64/libnvvm.so.4.0.0": "lib/libnvvm.so.4",
        "nvvm/libdevice/libdevice.10.bc": "nvvm/libdevice/libdevice.10.bc",
        "lib64/libcudart.so": "lib/libcudart.so.13",
        "lib64/libcudart.so.13": "lib/libcudart.so.13",
        "lib64/libcudadevrt.a": "lib/libcudadevrt.a",
        "lib64/libnvrtc.so": "lib/libnvrtc.so.13",
    }.items():
        place = home / link
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(toolkit / target)
    return python, toolkit, home


class Corpus:
    def __init__(self, gpumux, toolkit, home):
        self.gpumux, self.toolkit = gpumux, toolkit
        self.environment = dict(os.environ, CUDA_HOME=str(home), CUDA_PATH=str(toolkit), LD_LIBRARY_PATH=str(toolkit / "lib"))
        self.counts = {}

    def run(self, command, **environment):
        """Exit status and output; None when it did not end."""
        command = [self.gpumux, "emu", "--", *map(str, command)]
        try:
            done = subprocess.run(
                command, env={**self.environment, **environment}, timeout=PATIENCE, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, errors="replace",
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout

    def count(self, suite, name, result, why=""):
        counts = self.counts.setdefault(suite, {"right": 0, "refused": 0, "wrong": 0, "not ended": 0})
        counts[result.split()[0] if result != "not ended" else result] += 1
        if result != "right":
            print(f"{suite}: {name}: {result} {why}".rstrip(), flush=True)

    def nvcc(self, folder):
        for suite, flags in [("nvcc", []), ("nvcc -rdc=true", ["-rdc=true"])]:
            for name in PROGRAMS:
                program = folder / f"{name}{'-rdc' if flags else ''}"
                source = ROOT / f"tests/cuda/{name}.cu"
                compiler = [self.toolkit / "bin/nvcc", "-arch=sm_90", *flags, "-L", self.toolkit / "lib", source, "-o", program]
                subprocess.run(compiler, check=True)
                status, output = self.run([program])
                if status is None:
                    self.count(suite, name, "not ended")
                elif status == 0 and output.rstrip().endswith("done"):
                    self.count(suite, name, "right")
                else:
                    # Without an error of CUDA's it went on with something wrong.
                    told = "gpumux: " in output or "cudaError" in output
                    self.count(suite, name, "refused" if told else "wrong", output.strip()[-200:])

    def cupy(self, python):
        script = ROOT / "bench/corpus/cupy_lines.py"
        total = script.read_text().count("(lambda m,")
        for suite, environment in [("CuPy", {}), ("CuPy, its accelerators", {"CUPY_ACCELERATORS": "cub"})]:
            first = 0
            while first < total:
                status, output = self.run([python, script, str(first)], **environment)
                found = [line.split("\t") for line in output.splitlines() if "\t" in line]
                for name, result in found:
                    self.count(suite, name, result)
                if status is None or not found:
                    self.count(suite, f"line {first + len(found)}", "not ended", output[-200:])
                    first += 1
                first += len(found)

    def numba(self, python):
        for module in NUMBA:
            status, output = self.run([python, "-m", "numba.runtests", f"numba.cuda.tests.{module}"])
            ran = re.search(r"^Ran (\d+) test", output, re.M)
            if status is None or not ran:
                self.count("Numba", module, "not ended", output[-200:])
                continue
            number = lambda what: sum(map(int, re.findall(rf"{what}=(\d+)", output.splitlines()[-1])))
            results = {"wrong": number("failures"), "refused": number("errors")}
            results["right"] = int(ran[1]) - number("skipped") - results["wrong"] - results["refused"]
            for result, times in results.items():
                for _ in range(times):
                    self.count("Numba", module, result)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--gpumux", default=str(ROOT / "target/debug/gpumux"))
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python, toolkit, home = prepare(folder)
    corpus = Corpus(arguments.gpumux, toolkit, home)
    corpus.nvcc(folder)
    corpus.cupy(python)
    corpus.numba(python)
    print("| | right | refused | wrong | not ended |\n|---|---:|---:|---:|---:|")
    for suite, counts in corpus.counts.items():
        print(f"| {suite} | " + " | ".join(str(count) for count in counts.values()) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(corpus.counts, indent=1) + "\n")
    return 1 if any(counts["wrong"] for counts in corpus.counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
