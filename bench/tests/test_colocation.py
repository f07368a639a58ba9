"""What `colocation.py` asks of its programs, with a crew that is a fake."""

import unittest
from typing import Any

import colocation


class Crew:
    """Requests of 1 ms every 10 ms, and two training steps a second."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, list[str]]] = []

    def measure(self, seconds: float, orders: dict[str, dict[str, Any]], _lead: float) -> dict[str, Any]:
        self.asked.append((seconds, [*orders]))
        answers = {name: {"calls": int(2 * seconds), "seconds": seconds} for name in orders if name != "server"}
        return answers | ({"server": {"latencies_ms": [1.0] * int(seconds * 100)}} if "server" in orders else {})


class Cells(unittest.TestCase):
    def test_alone_has_no_other_program_at_work(self) -> None:
        crew = Crew()
        cell = colocation.measure(crew, "graph+2train", "alone", 0, 4.0)  # type: ignore[arg-type]
        self.assertEqual(crew.asked, [(4.0, ["server"]), (2.0, ["training"])])
        self.assertEqual(cell["rates"], {"latency_rate": 100.0, "batch_rate": 2.0})

    def test_jobs_are_added_up(self) -> None:
        crew = Crew()
        cell = colocation.measure(crew, "graph+2train", "mps", 0, 4.0)  # type: ignore[arg-type]
        self.assertEqual(crew.asked, [(4.0, ["server", "training", "training-2"])])
        self.assertEqual((cell["rates"]["batch_rate"], len(cell["latencies_ms"])), (4.0, 400))

    def test_requests_are_those_of_the_round_in_every_mode(self) -> None:
        self.assertEqual(colocation.requests("graph+train", 4.0, 3), colocation.requests("graph+2train", 4.0, 3))
        self.assertNotEqual(colocation.requests("graph+train", 4.0, 3), colocation.requests("graph+train", 4.0, 4))
        kinds = {case: colocation.requests(case, 1.0)["kind"] for case in colocation.CASES}
        eager = {"eager+train", "decode+train"}
        self.assertEqual(kinds, {case: "eager" if case in eager else "graph" for case in colocation.CASES})
        self.assertGreaterEqual(min(colocation.requests("graph30+train", 1.0)["pauses"]), 0.02)
