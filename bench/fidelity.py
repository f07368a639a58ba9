#!/usr/bin/env python3
"""Runs the driver-level tests on the device at hand, and writes what held and what things took.

    python3 bench/fidelity.py                          # the emulated device, through cargo
    python3 bench/fidelity.py --real                   # this machine's GPU
    .bundle/fidelity [--no-real]                       # the same from a bundle, without Rust (bench/bundle.sh)

The report is bench/results/fidelity-DEVICE.json; `python3 bench/plot.py` makes the table of docs/fidelity.md from all of
them. What does not fit into --seconds is left out and said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import common
from common import say

# What looks at the driver and the device rather than at the command line; the first matter most.
GROUPS = ["timings::", "cuda::", "controls::", "hints::", "faults::"]
BEGIN, RESULT = re.compile(r"^test (\S+) \.\.\. ?(.*)$"), re.compile(r"^(ok|FAILED|ignored)\b")
TABLE_BEGIN, TABLE_END = "<!-- fidelity:begin -->", "<!-- fidelity:end -->"


def lines(process: subprocess.Popen[str], deadline: float, log: Path) -> Iterator[str]:
    """Standard output as it comes, until its end or the deadline; a file keeps it."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with log.open("w") as file:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = found.get(timeout=left)
        except queue.Empty:
            return
        if line is None:
            return
        yield line


def results(output: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each test's name and result; what a test says comes between the two."""
    name, skipped = "", False
    for line in output:
        text = line.rstrip()
        if begin := BEGIN.match(text):
            name, text, skipped = begin[1], begin[2], False
        skipped |= "SKIPPED" in text
        if name and (result := RESULT.match(text)):
            yield name, "skipped" if skipped or result[1] == "ignored" else result[1]
            name = ""


def kill_session(session: int) -> None:
    """Kills what a test executable has started, too: each program has a process group of its own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[3]) == session:
                os.kill(int(stat.parent.name), signal.SIGKILL)


def run_tests(command: list[str], env: dict[str, str], log: Path, deadline: float) -> tuple[list[dict[str, Any]], bool]:
    """Test by test, as on a real device they take turns anyway: a row for each, and whether all could end."""
    rows = []
    with subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=common.BENCH.parent,
    ) as process:
        output = lines(process, deadline, log)
        # What cargo builds before is no test's time.
        any(line.startswith("running ") for line in output)
        begin = time.monotonic()
        for name, result in results(output):
            now = time.monotonic()
            values = {"ok": float(result == "ok"), "skipped": float(result == "skipped"), "seconds": now - begin}
            rows.append({"case": "test", "mode": name, "values": values})
            say(f"{result:8} {now - begin:6.1f} s  {name}")
            begin = now
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            kill_session(process.pid)
            return rows, False
    return rows, True


def report(args: argparse.Namespace) -> int:
    """Runs everything and writes the report."""
    end = time.monotonic() + args.seconds
    env = {key: value for key, value in os.environ.items() if key != "GPUMUX_TEST_REAL"}
    if args.real:
        env["GPUMUX_TEST_REAL"] = "1"
    command = [str(args.tests)] if args.tests else ["cargo", "test", "-p", "gpumux-tests", "--test", "e2e", "--"]
    logs = args.logs or Path(tempfile.mkdtemp(prefix="fidelity-"))
    logs.mkdir(parents=True, exist_ok=True)
    device, driver = common.device_and_driver() if args.real else ("unknown", "emulated")
    data: dict[str, Any] = common.head("fidelity", device, driver) | {"rows": []}
    complete = True
    for group in args.groups:
        timings = logs / "timings.jsonl"
        timings.unlink(missing_ok=True)
        env |= {"GPUMUX_TIMINGS": str(timings), "GPUMUX_TIMINGS_SECONDS": str(args.each)}
        log = logs / f"{group.strip(':')}.log"
        rows, ended = run_tests([*command, group, "--test-threads=1", "--nocapture"], env, log, end)
        for row in map(json.loads, timings.read_text().splitlines() if timings.exists() else []):
            if "device" in row:
                data |= row
            else:
                rows.append(row)
        if not rows:
            say(f"{group} gave nothing: {common.tail(log)}")
        data["rows"] += rows
        complete &= ended and bool(rows)
        data["rows"] = [rounded(row) for row in data["rows"]]
        out = args.out / f"fidelity-{common.slug(data['device'])}.json"
        common.save(out, data)
    tests = [row["values"] for row in data["rows"] if row["case"] == "test"]
    held, skipped = sum(row["ok"] for row in tests), sum(row["skipped"] for row in tests)
    say(f"{held:.0f} of {len(tests)} tests hold, {skipped:.0f} were skipped; {out}; logs in {logs}")
    if not complete:
        say(f"not everything ran within {args.seconds:.0f} s: --seconds gives it more")
    return 0 if tests and held + skipped == len(tests) else 1


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Six digits are plenty."""
    return row | {"values": {name: float(f"{value:.6g}") for name, value in row["values"].items()}}


# --- the table ----------------------------------------------------------------------------------


QUANTILES = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"]
# Words of older results, and what they are now.
NOW = {"lever": "control", "set slice": "set timeslice", "get slice": "get timeslice", "levers": "controls"}


def switches(data: dict[str, Any]) -> list[dict[str, Any]]:
    """What a switch takes: how much later half of the requests are done when the device must be taken first."""
    p50 = {row["mode"]: row["values"]["p50_us"] for row in data["rows"] if row["case"] == "preemption"}
    kernels = {"1 s and 1 µs": "from a kernel of the full device", "1 s and 1 µs, one warp": "from a kernel of one warp"}
    return [
        {"case": "switch", "mode": kernel, "values": {"p50_us": p50[mode] - p50["alone"]}}
        for mode, kernel in kernels.items()
        if {mode, "alone"} <= p50.keys()
    ]


def times(data: dict[str, Any]) -> dict[tuple[str, str, tuple[str, ...]], list[float]]:
    """All that was measured, by case, mode and the values' names."""
    found = {}
    for row in [*switches(data), *(row for row in data["rows"] if row["case"] != "test")]:
        names = sorted(row["values"], key=lambda name: QUANTILES.index(name) if name in QUANTILES else -1)
        case, mode = (NOW.get(row[key], row[key]).replace(", slice", ", set timeslice") for key in ("case", "mode"))
        found[case, mode, tuple(names)] = [row["values"][name] for name in names]
    return found


def table(reports: list[dict[str, Any]], number: Any, title: Any) -> str:
    """Reports side by side: the emulated device last."""
    if not reports:
        return "No report is committed yet."
    reports = sorted(reports, key=lambda it: ("emulated" in it["device"], it["device"], it["date"]))
    by_device: dict[str, list[dict[str, Any]]] = {}
    for data in reports:
        by_device.setdefault(data["device"].removeprefix("NVIDIA "), []).append(data)
    devices = list(by_device)
    every = [{key: value for data in mine for key, value in times(data).items()} for mine in by_device.values()]
    text = [
        f"- {data['device']}, driver {data['driver']}, {data['date']}, commit `{data['commit'][:12]}`: `{data['command']}`. {data.get('note', '')}".strip()
        for data in reports
    ]
    text += ["", "| | | | " + " | ".join(devices) + " |", "|---|---|---|" + "---:|" * len(devices)]
    last = None
    for key in dict.fromkeys(key for one in every for key in one):
        case, mode, names = key
        titles = [title(name).strip() for name in names]
        shown = " / ".join([*(it.split(" ")[0] for it in titles[:-1]), titles[-1]])
        cells = [" / ".join(map(number, one.get(key, []))) for one in every]
        text.append(f"| {case if case != last else ''} | {mode} | {shown} | " + " | ".join(cells) + " |")
        last = case
    tests = [
        {row["mode"]: row["values"] for data in mine for row in data["rows"] if row["case"] == "test"} for mine in by_device.values()
    ]
    text += ["", "| tests | " + " | ".join(devices) + " |", "|---|" + "---:|" * len(devices)]
    for group in dict.fromkeys(name.split("::")[0] for one in tests for name in one):
        cells = []
        for one in tests:
            mine = [values for name, values in one.items() if name.startswith(group + "::")]
            held, skipped = sum(it["ok"] for it in mine), sum(it["skipped"] for it in mine)
            cells.append(f"{held:.0f} of {len(mine)} hold" + (f", {skipped:.0f} skipped" if skipped else "") if mine else "")
        text.append(f"| {NOW.get(group, group)} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> int:
    """Runs all, with what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action=argparse.BooleanOptionalAction, default=False, help="this machine's GPU")
    parser.add_argument("--tests", type=Path, help="the test executable [default: through cargo]")
    parser.add_argument("--groups", type=common.listed(GROUPS), default=GROUPS, help="comma-separated [%(default)s]")
    parser.add_argument("--each", type=float, default=2.0, metavar="S", help="length of one distribution [%(default)s]")
    parser.add_argument("--seconds", type=float, default=900.0, help="time for all [%(default)s]")
    parser.add_argument("--out", type=Path, default=common.BENCH / "results", help="folder of the report")
    parser.add_argument("--logs", type=Path, help="folder of what the tests say [a new one]")
    return report(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
