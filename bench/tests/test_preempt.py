"""Reading of workload definitions, ways of sharing, and rounds, without a GPU."""

import itertools
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import common
import peers
import preempt
from preempt import Task


class Arrivals(unittest.TestCase):
    def of(self, seconds: float, seed: str = "x", **load: object) -> list[float]:
        return list(preempt.arrivals(load, seconds, seed))

    def test_periodic(self) -> None:
        found = self.of(10, type="periodic", frequency=100)
        self.assertEqual(len(found), 1000)
        self.assertTrue(all(abs(b - a - 0.01) < 1e-9 for a, b in itertools.pairwise(found)))
        self.assertNotEqual(found[0], self.of(10, "y", type="periodic", frequency=100)[0])

    def test_poisson_has_its_rate_and_repeats(self) -> None:
        found = self.of(100, type="poisson", frequency=100)
        self.assertEqual(found, self.of(100, type="poisson", frequency=100))
        self.assertAlmostEqual(len(found) / 100, 100, delta=6)  # six standard deviations
        self.assertEqual(found, sorted(found))

    def test_trace_is_in_milliseconds_and_begins_anew(self) -> None:
        self.assertEqual(self.of(0.3, type="trace", trace=[0, 150, 258, 385]), [0, 0.15, 0.258])
        self.assertEqual(self.of(2.2, type="trace", trace=[100, 900], length=1), [0.1, 0.9, 1.1, 1.9, 2.1])

    def test_unknown_load_is_refused(self) -> None:
        with self.assertRaises(common.BenchError):
            self.of(1, type="magic", frequency=1)


def definition(folder: Path) -> Path:
    load = {"type": "periodic", "frequency": 10}
    client = {"model_name": "vgg", "preprocess_time": 200}
    tasks = [{"id": f"vgg_{at}", "load": load, "client": client | {"priority": at}} for at in (0, 1)]
    (folder / "A.json").write_text(json.dumps({"time": 60, "tasks": tasks}))
    return folder


class Definition(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = definition(Path(folder.name))

    def test_priority_decides_the_class(self) -> None:
        critical, batch = preempt.tasks(self.folder, "A")
        self.assertEqual((critical.klass, batch.klass), ("latency", "batch"))
        order = critical.order(1.0)
        self.assertEqual((len(order["arrivals"]), order["prepare_us"]), (10, 200))
        hints = [task.order(1.0, hinting)["hint"] for task in (critical, batch) for hinting in (False, True)]
        self.assertEqual(hints, [False, True, False, False])
        later = critical.order(1.0, begin=2.0)["arrivals"]
        whole = [round(at - 2, 6) for at in critical.order(3.0)["arrivals"] if at >= 2]
        self.assertEqual([round(at, 6) for at in later], whole, "rounds go on where the one before ended")

    def test_variants_of_the_papers_figures(self) -> None:
        critical, batch = preempt.tasks(self.folder, "A@prep50")
        self.assertEqual((critical.prepare_us, batch.prepare_us), (50, 200))
        critical, batch = preempt.tasks(self.folder, "A@rate300")
        self.assertEqual((critical.load["frequency"], batch.load["type"]), (300, "continuous"))
        self.assertLessEqual({"A@prep0", "A@rate300", *preempt.WORKLOADS}, set(preempt.CASES))


RT, BE, BE2 = (Task(name, name, name == "rt", {"type": "periodic", "frequency": 10}, 200) for name in ("rt", "be", "be2"))


class Sharings(unittest.TestCase):
    def told(self, mode: str) -> dict[str, object]:
        return preempt.orders(preempt.SHARINGS[mode], [RT, BE, BE2], mode == "alone", 1.0, 0.0)

    def test_all_batch_tasks_of_gpreempt_share_one_context(self) -> None:
        together = preempt.processes(preempt.SHARINGS["gpreempt"].together, [RT, BE, BE2])
        self.assertEqual(together, {"latency": [RT], "batch": [BE, BE2]})
        self.assertEqual(preempt.worker("gpreempt", "class", [BE, BE2]), (["many", "be=be=low", "be2=be2=low"], "batch"))
        mode = peers.mode("gpreempt", Path("."))
        self.assertEqual((type(mode), mode.policy), (common.Gpumux, "fixed"))
        self.assertTrue(self.told("gpreempt")["latency"]["tasks"]["rt"]["hint"])  # type: ignore[index]
        self.assertFalse(self.told("gpreempt-unhinted")["latency"]["tasks"]["rt"]["hint"])  # type: ignore[index]

    def test_driver_programs_have_gpreempts_two_contexts_in_one_process(self) -> None:
        arguments, klass = preempt.driver_worker("gpreempt", "all", [RT, BE], 0.005)
        self.assertEqual(arguments[:3] + [klass], ["tasks", "rt=50x20=high", "be=50x20=low", "latency"])
        self.assertIn("--two-contexts", arguments)
        self.assertNotIn("--two-contexts", preempt.driver_worker("gpumux", "task", [RT], 0.005)[0])
        told = preempt.orders(preempt.SHARINGS["gpumux"], [RT, BE], False, 1.0, 0.0, driver=True)
        self.assertEqual([*told["rt"]["tasks"]], ["rt"])

    def test_streams_and_green_contexts_are_one_process(self) -> None:
        self.assertEqual(preempt.worker("streams", "all", [RT, BE])[0], ["many", "rt=rt=high", "be=be=low"])
        self.assertIn("--green", preempt.worker("green", "all", [RT, BE])[0])
        self.assertEqual([*self.told("streams")], ["all"])

    def test_alone_only_latency_tasks_work(self) -> None:
        self.assertEqual([*self.told("alone")], ["rt"])
        self.assertEqual([*self.told("time-slicing")], ["rt", "be", "be2"])
        self.assertEqual(self.told("alone")["rt"], self.told("time-slicing")["rt"])

    def test_arrivals_are_the_same_in_every_mode(self) -> None:
        for name in preempt.MODES:
            sharing = preempt.SHARINGS[name]
            told = preempt.orders(sharing, [RT, BE], False, 1.0, 4.0)
            flat = {task: it for process, order in told.items() for task, it in order.get("tasks", {process: order}).items()}
            self.assertEqual(flat["rt"]["arrivals"], RT.order(1.0, begin=4.0)["arrivals"], name)

    def test_mps_settings_are_of_batch_clients(self) -> None:
        for stage, variable in {"mps-priority": "CUDA_MPS_CLIENT_PRIORITY=1", "mps-50": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"}.items():
            mode = peers.mode(stage, Path("."))
            self.assertEqual(mode.command(["x"], "be", "batch"), ["env", variable, "x"])
            self.assertEqual(mode.command(["x"], "rt", "latency"), ["x"])

    def test_peers_that_cannot_run_say_why(self) -> None:
        with mock.patch.dict("os.environ", {"XSCHED": "/nowhere"}), self.assertRaisesRegex(common.BenchError, "build XSched"):
            peers.mode("xsched", Path(".")).__enter__()
        refused = mock.Mock(returncode=4, stdout="Insufficient Permissions", stderr="")
        with mock.patch("subprocess.run", return_value=refused), self.assertRaisesRegex(common.BenchError, "Insufficient Permissions"):
            peers.mode("slices-long", Path(".")).__enter__()


class Cells(unittest.TestCase):
    def test_latencies_are_pooled_and_rates_are_of_each_kind(self) -> None:
        def answer(*ms: float) -> dict[str, object]:
            """The first one comes before things have settled."""
            begins = [0.0, *(0.5 for _ in ms[1:])]
            return {"latencies_ms": list(ms), "begins_s": begins, "seconds": 2.0 + preempt.SETTLE_S}

        each = {"rt": answer(9.0, 1.0, 2.0), "be": answer(5.0, 6.0), "be2": answer(5.0)}
        expected = {"latencies_ms": [1.0, 2.0], "rates": {"latency_rate": 1.0, "batch_rate": 0.5}}
        self.assertEqual(preempt.cell([RT, BE, BE2], each), expected)
        by_class = {"latency": {"tasks": {"rt": each["rt"]}}, "batch": {"tasks": {name: each[name] for name in ("be", "be2")}}}
        self.assertEqual(preempt.cell([RT, BE, BE2], by_class), expected)
        self.assertEqual(preempt.cell([RT, BE], {"rt": each["rt"]})["rates"], {"latency_rate": 1.0})

    def test_requests_of_a_task_that_always_has_work_count_when_they_end(self) -> None:
        # One request every 0.1 ms, each of which takes 1 ms.
        count = 2000
        ends = [(number + 1) * 1e-3 for number in range(count)]
        begins = [number * 1e-4 for number in range(count)]
        answer = {"begins_s": begins, "latencies_ms": [(end - begin) * 1e3 for begin, end in zip(begins, ends)], "seconds": 2.0}
        rate = preempt.cell([BE], {"be": answer})["rates"]["batch_rate"]
        self.assertAlmostEqual(rate, 1000.0, delta=2.0)
