"""Reading of workload definitions."""

import itertools
import json
import tempfile
import unittest
from pathlib import Path

import common
import preempt


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

    def test_trace_is_in_milliseconds_and_cut(self) -> None:
        self.assertEqual(self.of(0.3, type="trace", trace=[0, 150, 258, 385]), [0, 0.15, 0.258])

    def test_unknown_load_is_refused(self) -> None:
        with self.assertRaises(common.BenchError):
            self.of(1, type="magic", frequency=1)


class Definition(unittest.TestCase):
    def test_priority_decides_the_class(self) -> None:
        load = {"type": "periodic", "frequency": 10}
        client = {"model_name": "vgg", "preprocess_time": 200}
        definition = {
            "time": 60,
            "tasks": [
                {"id": "vgg_rt", "load": load, "client": client | {"priority": 0}},
                {"id": "vgg_be", "load": load, "client": client | {"priority": 1}},
            ],
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "A.json"
            path.write_text(json.dumps(definition))
            critical, batch = preempt.tasks(path)
        self.assertEqual((critical.klass, batch.klass), ("latency", "batch"))
        self.assertEqual(critical.worker(), (["serve", "--model", "vgg"], "latency"))
        order = critical.order(1.0)
        self.assertEqual((len(order["arrivals"]), order["prepare_us"]), (10, 200))
        hints = [task.order(1.0, hinting)["hint"] for task in (critical, batch) for hinting in (False, True)]
        self.assertEqual(hints, [False, True, False, False])
        later = critical.order(1.0, begin=2.0)["arrivals"]
        whole = [round(at - 2, 6) for at in critical.order(3.0)["arrivals"] if at >= 2]
        self.assertEqual([round(at, 6) for at in later], whole, "rounds go on where the one before ended")


class Rounds(unittest.TestCase):
    def test_latencies_are_pooled_and_rates_averaged(self) -> None:
        task = lambda name, latency: preempt.Task(name, "vgg", latency, {}, 0)  # noqa: E731
        cell = preempt.Cell("A", "gpumux", [task("rt", True), task("be", False)])

        def answer(*ms: float) -> dict[str, object]:
            """The first one comes before things have settled."""
            begins = [0.0, *(0.5 for _ in ms[1:])]
            return {"latencies_ms": list(ms), "begins_s": begins, "seconds": 2.0 + preempt.SETTLE_S}

        cell.answers = [
            {"rt": answer(9.0, 1.0, 2.0), "be": answer(5.0, 5.0)},
            {"rt": answer(9.0, 3.0), "be": answer(5.0, 5.0, 6.0, 7.0)},
        ]
        self.assertEqual((cell.values()["latency_p50_ms"], cell.values()["batch_rate"]), (2.0, 1.0))
        alone = preempt.Cell("A", "alone", [task("rt", True), task("be", False)])
        self.assertEqual([task.name for task in alone.tasks], ["rt"])


if __name__ == "__main__":
    unittest.main()
