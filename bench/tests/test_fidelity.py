"""fidelity.py without a device: what it reads, and the table that it makes."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import unittest
from pathlib import Path

import common
import fidelity
import plot

# What a test executable does: results, a skipped test, timings, and a test that does not end.
FAKE = """
import os, sys, time
time.sleep(1)  # as cargo builds
print("running 3 tests", flush=True)
print("test cuda::a ... ok", flush=True)
print("test cuda::b ... ", end="", flush=True)
print("SKIPPED: no compiler", file=sys.stderr, flush=True)
print("ok", flush=True)
print("test cuda::c ... FAILED", flush=True)
time.sleep(60)
"""


def report(device: str, alone: float, late: float) -> dict[str, object]:
    rows = [
        {"case": "test", "mode": "cuda::a", "values": {"ok": 1.0, "skipped": 0.0, "seconds": 1.0}},
        {"case": "test", "mode": "cuda::b", "values": {"ok": 0.0, "skipped": 1.0, "seconds": 1.0}},
        {"case": "preemption", "mode": "alone", "values": {"p50_us": alone}},
        {"case": "preemption", "mode": "1 s and 1 µs", "values": {"max_us": 2 * late, "p50_us": late}},
    ]
    head = dict.fromkeys(("driver", "date", "commit", "command"), "x")
    return {"bench": "fidelity", "device": device, **head, "rows": rows}


class Fidelity(unittest.TestCase):
    def test_results_are_parsed_from_output_of_tests(self) -> None:
        said = ["running 2 tests", "test a::b ... ", "look: ok", "ok", "test c ... FAILED", "test result: ok. 1 passed"]
        self.assertEqual(list(fidelity.results(said)), [("a::b", "ok"), ("c", "FAILED")])

    def test_tests_that_do_not_end_are_left_out(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            rows, ended = fidelity.run_tests([sys.executable, "-c", FAKE], {}, Path(folder, "log"), begin + 5)
            self.assertLess(time.monotonic() - begin, 30)
        self.assertFalse(ended)
        self.assertLess(rows[0]["values"]["seconds"], 0.9)
        found = {row["mode"]: (row["values"]["ok"], row["values"]["skipped"]) for row in rows}
        self.assertEqual(found, {"cuda::a": (1, 0), "cuda::b": (0, 1), "cuda::c": (0, 0)})

    def test_reports_stand_side_by_side(self) -> None:
        reports = [report("NVIDIA H100 (emulated)", 200, 350), report("NVIDIA H100", 140, 320)]
        for one in reports:
            common.check_results(one)
        table = fidelity.table(reports, plot.number, plot.title)
        self.assertIn("| | | | H100 | H100 (emulated) |", table)
        self.assertIn("| switch | from a kernel of the full device | p50 (µs) | 180 | 150 |", table)
        self.assertIn("| preemption | alone | p50 (µs) | 140 | 200 |", table)
        self.assertIn("|  | 1 s and 1 µs | p50 / max (µs) | 320 / 640 | 350 / 700 |", table)
        self.assertIn("| cuda | 1 of 2 hold, 1 skipped | 1 of 2 hold, 1 skipped |", table)

    def test_a_report_goes_into_the_book(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "fidelity-x.json").write_text(json.dumps(report("NVIDIA X", 1, 2)))
            book = folder / "fidelity.md"
            book.write_text(f"{fidelity.TABLE_BEGIN}\n{fidelity.TABLE_END}\n")
            files, untold = plot.outputs(folder, [book])
            self.assertIn("| preemption | alone |", files[book])
            self.assertEqual(untold, [])

    def test_two_calls_on_one_device_are_one_column(self) -> None:
        late = report("NVIDIA X", 1, 2) | {"rows": [{"case": "control", "mode": "freeze", "values": {"p50_us": 9.0}}], "note": "Late."}
        table = fidelity.table([report("NVIDIA X", 1, 2), late], plot.number, plot.title)
        self.assertIn("| | | | X |\n", table)
        self.assertIn("| control | freeze | p50 (µs) | 9 |", table)
        self.assertIn("Late.", table)
