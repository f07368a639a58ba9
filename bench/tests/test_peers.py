from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import unittest
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import colocation
import common
import decode
import peers
import preempt
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

    def test_programs_alone_have_the_settings_of_their_mode(self) -> None:
        settled = mock.Mock()
        with mock.patch.object(peers, "settle", settled):
            peers.compare(mock.Mock(), ["one"], {"gpumux-alone": "gpumux"}, lambda *_: {}, lambda *_: {}, self.out, 60, 5)
        self.assertEqual(settled.call_args.args[1:], peers.SETTINGS["gpumux"])

    def test_mode_that_cannot_run_is_left_out_and_named(self) -> None:
        self.compare({"one": {"gone": ([], "batch")}}, least=1)
        self.assertEqual(self.plan.modes, ["alone", "time-slicing"])
        self.assertEqual([note.split()[0] for note in self.notes], ["xsched", "mps"])
        self.assertEqual(self.plan.least, {"one": 1})


def answer(order: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What a program would answer that serves all at once."""
    parts = order.get("tasks") or {name: it for name, it in order.items() if isinstance(it, dict)}
    if order["op"] in ("many", "pair"):
        answers = {name: answer(it, seconds) for name, it in parts.items()}
        return {"tasks": answers} if order["op"] == "many" else answers
    begins = [0.2, 0.3]
    return {"latencies_ms": [1.0] * len(begins), "begins_s": begins, "calls": 8, "seconds": seconds}


class StandIn(FakeCrew):
    """A crew whose programs answer what they are asked."""

    def measure(self, seconds: float, orders: dict[str, dict[str, Any]], lead: float = 0.5) -> dict[str, Any]:
        assert set(orders) <= set(self.ran[-1]), (set(orders), set(self.ran[-1]))
        return {name: answer(order, seconds) for name, order in orders.items()}


class AllModes(unittest.TestCase):
    """The three workloads in every mode, with programs that are stand-ins."""

    def setUp(self) -> None:
        self.out, self.settled = Path(self.enterContext(tempfile.TemporaryDirectory())), list[tuple[str, ...]]()
        for of, name, stand_in in (
            (peers, "Crew", StandIn),
            (peers, "mode", FakeMode),
            (peers, "settle", lambda crew, *settings: self.settled.append((crew.mode, *settings))),
            (colocation, "held", lambda crew: 0),
            (rounds, "noise", lambda: 1.0),
            (common, "begin", lambda options: self.out),
        ):
            self.enterContext(mock.patch.object(of, name, stand_in))
        self.enterContext(contextlib.redirect_stderr(io.StringIO()))

    def run_all(self, bench: Any, *arguments: str) -> dict[str, Any]:
        command = ["x", *arguments, "--modes", "all", "--rounds", "5", "--budget", "60", "--out", str(self.out)]
        with mock.patch.object(sys, "argv", command):
            self.assertEqual(bench.main(), 1, "a peer could not run")
        [path] = self.out.glob("*.json")
        data = json.loads(path.read_text())
        self.assertEqual({row["mode"] for row in data["rows"]}, set(bench.MODES) - {"xsched", *peers.BY_NAME})
        self.assertEqual({row["rounds"] for row in data["rows"]}, {5})
        self.assertIn("xsched could not run: XSCHED names no folder. Tried: XSched in XSCHED", data["note"])
        self.assertLessEqual({("gpumux", "off", "none"), ("gpumux", "auto", "0.01ms"), ("gpumux", "auto", "none")}, set(self.settled))
        return data

    def test_graph_inference_beside_training_in_every_mode(self) -> None:
        self.run_all(colocation, "--cases", "graph+train")

    def test_eager_decoding_beside_training_in_every_mode(self) -> None:
        self.run_all(decode, "--cases", "eager")

    def test_five_batch_networks_beside_one_of_latency_in_every_mode(self) -> None:
        load = {"type": "periodic", "frequency": 100}
        tasks = [{"id": f"vgg_{at}", "load": load, "client": {"model_name": "vgg", "priority": at}} for at in range(6)]
        (self.out / "workloads").mkdir()
        (self.out / "workloads" / "C.json").write_text(json.dumps({"time": 60, "tasks": tasks}))
        data = self.run_all(preempt, "--cases", "C", "--workloads", str(self.out / "workloads"))
        self.assertGreater(data["rows"][0]["values"]["latency_rate"], 0)

    def test_table_of_modes_has_all_of_them(self) -> None:
        stages = {it.stage for it in preempt.SHARINGS.values()}
        for bench in (colocation, decode):
            stages |= {*peers.stages(bench.MODES, bench.MODES).values()}
        self.assertEqual([it for it in stages if not peers.tried(it)], [])
