"""Tests of the hint benchmark's own logic; no GPU needed."""

import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import common
import hints

# A task: when it began, and when it ended.
TASK = """
import json, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path(given["--ready-file"]).touch()
while not pathlib.Path(given["--start-file"]).exists(): time.sleep(0.001)
begin = time.monotonic()
time.sleep(float(given["--seconds"]))
print(json.dumps({"p50_us": begin, "p99_us": time.monotonic()}))
"""


class Training(common.Crew):
    """A crew that only notes when it is to work."""

    def measure(self, seconds: float, orders: dict[str, dict[str, Any]], lead: float = 0.5) -> dict[str, Any]:
        self.begin = time.monotonic() + lead
        time.sleep(lead + seconds)
        return {"training": {"calls": 8, "seconds": seconds}}


class Neighbours(unittest.TestCase):
    def test_task_has_all_its_requests_beside_training(self) -> None:
        def start(_mode: common.Mode, _name: str, _klass: str, _hints: str, arguments: list[str]) -> subprocess.Popen[str]:
            return subprocess.Popen([sys.executable, "-c", TASK, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True)

        mode = common.Mode("alone", Path(tempfile.gettempdir()))
        crew = Training(mode)
        with mock.patch.object(hints, "start", start):
            values = hints.beside(mode, "none", [], 1.0, crew)
        self.assertGreater(values["latency_p50_us"], crew.begin - 0.05)
        self.assertLess(values["latency_p99_us"], crew.begin + 1.5)
        self.assertEqual(values["batch_rate"], 8.0)


class Cases(unittest.TestCase):
    def test_a_task_prepares_or_copies_as_its_case_says(self) -> None:
        self.assertNotIn("--prepare-us", hints.task("10ms/prep0", 7))
        prepared = hints.task("100ms/prep200", 7)
        self.assertEqual(prepared[prepared.index("--prepare-us") + 1], "200")
        copied = hints.task("train/copy100", 7)
        self.assertEqual(copied[copied.index("--copy") + 1], "5000000")
        self.assertNotIn("--prepare-us", copied)

    def test_only_what_can_be_hinted_by_hand_is(self) -> None:
        self.assertEqual(hints.modes_of("10ms/prep0"), hints.MODES)
        self.assertEqual(hints.modes_of("train/torch-pinned"), ["alone", "none", "auto"])

    def test_added_latency_is_over_alone(self) -> None:
        values = {"latency_p50_us": 150.0, "latency_p99_us": 180.0, "batch_rate": 3.0}
        alone = {"latency_p50_us": 140.0, "latency_p99_us": 160.0}
        self.assertEqual(
            hints.added(values, alone), values | {"added_p50_us": 10.0, "added_p99_us": 20.0}
        )
