#!/usr/bin/env python3
"""Runs the driver-level tests on the device at hand and writes what they gave and how long they took.

    python3 bench/fidelity.py                                  # the emulated device
    python3 bench/fidelity.py --real                           # this machine's GPU
    python3 bench/fidelity.py --real --tests .bundle/tests/e2e # without Rust; GPUMUX_BIN_DIR names the programs
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What looks at the driver and the device rather than at the command line.
GROUPS = ["cuda::", "levers::", "contracts::", "faults::", "hints::"]
LINE = re.compile(r"^test (\S+) \.\.\. (ok|FAILED|ignored)")


def parse(output: str) -> dict[str, str]:
    """Result by test."""
    found = (LINE.match(line) for line in output.splitlines())
    return {match[1]: match[2] for match in found if match}


def run(command: list[str], group: str, env: dict[str, str]) -> dict:
    """One group, test by test in one thread: on a real device they take turns anyway."""
    begin = time.monotonic()
    done = subprocess.run(
        [*command, group, "--test-threads=1"], env=env, cwd=ROOT, text=True, capture_output=True, check=False
    )
    results = parse(done.stdout)
    for name, result in results.items():
        print(f"{result:8} {name}")
    if not results:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "skipped": done.stderr.count("SKIPPED"),
        "tests": results,
        "output": "" if done.returncode == 0 else done.stdout[-8000:],
    }


def device(real: bool, gpumux: str) -> str:
    line = [gpumux, "workload", "latency", "--seconds", "0.2", "--json"]
    line = line if real else [gpumux, "emu", "--", *line]
    done = subprocess.run(line, text=True, capture_output=True, check=True)
    return json.loads(done.stdout)["device"]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--real", action="store_true", help="this machine's GPU")
    arguments.add_argument("--tests", help="the test executable [default: through cargo]")
    arguments.add_argument("--out", type=Path, help="[default: bench/results/fidelity-DEVICE.json]")
    args = arguments.parse_args()
    env = dict(os.environ)
    if args.real:
        env["GPUMUX_TEST_REAL"] = "1"
    command = [args.tests] if args.tests else ["cargo", "test", "-q", "-p", "gpumux-tests", "--test", "e2e", "--"]
    if not args.tests:
        command.remove("-q")
    gpumux = str(Path(env.get("GPUMUX_BIN_DIR", "target/debug")) / "gpumux")
    name = device(args.real, gpumux)
    report = {"device": name, "real": args.real, "groups": {group.strip(":"): run(command, group, env) for group in GROUPS}}
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    out = args.out or ROOT / "bench" / "results" / f"fidelity-{slug}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    results = [result for group in report["groups"].values() for result in group["tests"].values()]
    print(f"{results.count('ok')} of {len(results)} hold; {out}")
    return 0 if results and "FAILED" not in results else 1


if __name__ == "__main__":
    sys.exit(main())
