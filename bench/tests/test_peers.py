from __future__ import annotations

import tempfile
import unittest
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import common
import peers
import rounds


class FakeCrew(AbstractContextManager["FakeCrew"]):
    """Programs of one mode, which only note what they were asked to run."""

    def __init__(self, mode: str, _program: object) -> None:
        self.mode, self.ran = mode, list[peers.Programs]()

    def __exit__(self, *_: object) -> None:
        pass

    def have(self, wanted: peers.Programs) -> None:
        if "gone" in wanted and self.mode == "mps":
            raise common.BenchError("no server")
        self.ran.append(wanted)

    def place(self, _number: int) -> None:
        pass


class FakeMode(AbstractContextManager[str]):
    def __init__(self, stage: str, _logs: Path) -> None:
        if stage == "xsched":
            raise common.BenchError("XSCHED names no folder")
        self.stage = stage

    def __enter__(self) -> str:
        return self.stage

    def __exit__(self, *_: object) -> None:
        pass


class Compare(unittest.TestCase):
    def setUp(self) -> None:
        self.out = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(peers, "Crew", FakeCrew))
        self.enterContext(mock.patch.object(peers, "mode", FakeMode))
        self.enterContext(mock.patch.object(rounds, "run", self.run_plan))

    def run_plan(self, plan: rounds.Plan, _results: object, _budget: float, _most: int, notes: list[str]) -> int:
        self.plan, self.notes = plan, notes
        for case in plan.cases:
            plan.prepare(case)
        self.cells = {(case, mode): plan.measure(case, mode, 7) for case in plan.cases for mode in plan.modes}
        return 0

    def compare(self, programs: dict[str, peers.Programs], **more: Any) -> None:
        stages = {"alone": "time-slicing", "time-slicing": "time-slicing", "mps": "mps", "xsched": "xsched"}

        def measure(crew: Any, case: str, mode: str, number: int) -> dict[str, Any]:
            return {"crew": crew.mode, "ran": crew.ran[-1], "is": (case, mode, number)}

        results: Any = None
        peers.compare(results, list(programs), stages, lambda case, _stage: programs[case], measure, self.out, 60, 5, **more)

    def test_each_mode_is_measured_with_the_programs_of_its_case(self) -> None:
        a, b = {"a": ([], "latency")}, {"b": ([], "batch")}
        self.compare({"one": a, "two": b})
        self.assertEqual(self.cells["one", "alone"], {"crew": "time-slicing", "ran": a, "is": ("one", "alone", 7)})
        self.assertEqual(self.cells["two", "mps"], {"crew": "mps", "ran": b, "is": ("two", "mps", 7)})
        self.assertEqual(self.plan.least, {"one": rounds.LEAST, "two": rounds.LEAST})

    def test_mode_that_cannot_run_is_left_out_and_named(self) -> None:
        self.compare({"one": {"gone": ([], "batch")}}, least=1)
        self.assertEqual(self.plan.modes, ["alone", "time-slicing"])
        self.assertEqual([note.split()[0] for note in self.notes], ["xsched", "mps"])
        self.assertEqual(self.plan.least, {"one": 1})


if __name__ == "__main__":
    unittest.main()
