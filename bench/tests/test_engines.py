"""What the benchmark of engines takes from one."""

import argparse
import unittest
from pathlib import Path
from unittest import mock

import engines
import serve_worker
from common import BenchError, Mode
from tests.test_serve import Engine


class Fake:
    """A worker that has its answers."""

    def __init__(self, answers: list) -> None:
        self.answers, self.orders, self.log = answers, [], Path("log")

    def send(self, **order: object) -> None:
        self.orders.append(order)

    def reply(self, _timeout: float) -> dict:
        return self.answers.pop(0)

    def close(self) -> None:
        self.orders.append("close")


def options(**others: object) -> argparse.Namespace:
    given = {"left": engines.Budget(100), "seconds": 9.0, "requests": 2, "cache": 1 << 30, "attention": "X", "eager": True, "memory": 0.5, "model": Path("m")}
    return argparse.Namespace(**given | others)


class Cells(unittest.TestCase):
    def test_saturation_counts_until_the_last_token(self) -> None:
        answer = {"first_s": [0.1, 0.2], "last_s": [1.37, 2.0], "tokens": [128, 128]}
        worker = Fake([{"ready": True}, answer, {"tokens": [[1]], "taken": 3, "refused": 0}])
        with mock.patch.object(engines, "Worker", return_value=worker):
            found = engines.saturation(Mode("stock", Path(".")), options())
        self.assertEqual((found["tokens_per_s"], found["finished"], found["taken"]), (128.0, 2, 3))
        self.assertAlmostEqual(found["tpot_p50_ms"], 10.0)
        self.assertEqual(worker.orders[-1], "close")

    def test_elastic_mode_has_the_worker_class(self) -> None:
        with mock.patch.object(engines, "Worker") as made:
            engines.engine(Mode("elastic", Path(".")), "engine", options())
            engines.engine(Mode("gpumux", Path(".")), "engine", options())
        given = [call.args[1][-1] for call in made.call_args_list]
        self.assertEqual([("gpumux.vllm.Worker" in it) for it in given], [True, False])

    def test_spent_budget_ends_a_cell(self) -> None:
        with self.assertRaisesRegex(BenchError, "budget"):
            engines.ready(Fake([]), options(left=engines.Budget(1)))

    def test_replay_may_end_before_its_time(self) -> None:
        engine = Engine()
        order = {"start": engine.now, "stop": engine.now + 60, "requests": [[0.0, 5, 3]], "ends": True}
        answer = serve_worker.replay(engine, order, lambda: engine.now, lambda _s: self.fail("it waits"))
        self.assertEqual(answer["tokens"], [3])


if __name__ == "__main__":
    unittest.main()
