"""Traces, the replay of requests, and what counts as good, with an engine that is a fake."""

import csv
import datetime
import io
import unittest

import common
import rounds
import serve
import serve_worker
from serve import Request

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,9000,1
2023-11-16 18:17:05.9799600,20,0
"""


class Traces(unittest.TestCase):
    def setUp(self) -> None:
        self.requests = serve.trace(csv.DictReader(io.StringIO(CSV)))

    def test_times_are_from_the_first_and_lengths_fit_the_context(self) -> None:
        self.assertEqual(self.requests, [Request(0.0, 4808, 10), Request(0.5, 8191, 1), Request(2.0, 20, 1)])

    def test_parts_follow_one_another_and_the_trace_begins_anew(self) -> None:
        at = lambda *it: [one.at for one in serve.part(self.requests, *it)]  # noqa: E731
        self.assertEqual(at(1.0, 0.0, 2.5), [0.0, 0.5, 2.0])
        self.assertEqual(at(1.0, 0.4, 2.0), [0.09999999999999998, 1.6])
        self.assertEqual(at(1.0, 2.5, 2.0), [0.5, 1.0], "it is 3 s long: to its last request and a second")
        self.assertEqual(at(2.0, 0.0, 2.0), [0.0, 0.25, 1.0, 1.5, 1.75])


class Prompts(unittest.TestCase):
    def test_prompts_of_all_requests_begin_differently(self) -> None:
        begins = {tuple(serve_worker.prompt_of(f"{turn}-{number}", 16)) for turn in range(3) for number in range(300)}
        self.assertEqual(len(begins), 900)
        self.assertEqual(serve_worker.prompt_of("0-12", 40), serve_worker.prompt_of("0-12", 40))


class Engine:
    """Makes one token of every request in each step of 10 ms."""

    def __init__(self) -> None:
        self.now, self.open, self.dropped = 100.0, dict[str, list[int]](), list[str]()

    def add(self, name: str, prompt: int, output: int) -> None:
        self.open[name] = [0, output]

    def busy(self) -> bool:
        return bool(self.open)

    def step(self) -> list[tuple[str, int]]:
        self.now += 0.01
        for made in self.open.values():
            made[0] += 1
        moved = [(name, made) for name, (made, _) in self.open.items()]
        self.open = {name: it for name, it in self.open.items() if it[0] < it[1]}
        return moved

    def drop(self, names: object) -> None:
        self.dropped = list(names)  # type: ignore[call-overload]

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


class Replay(unittest.TestCase):
    def test_requests_come_at_their_times_and_unfinished_ones_are_dropped(self) -> None:
        engine = Engine()
        order = {"start": 100.0, "stop": 101.0, "requests": [[0.0, 8, 3], [0.5, 8, 1], [0.95, 8, 40], [2.0, 8, 1]]}
        answer = serve_worker.replay(engine, order, lambda: engine.now, engine.sleep)
        self.assertEqual([round(it, 3) if it else it for it in answer["first_s"]], [0.01, 0.51, 0.96, None])
        self.assertEqual(answer["tokens"][:2] + answer["tokens"][3:], [3, 1, 0])
        self.assertAlmostEqual(answer["last_s"][0], 0.03)
        self.assertEqual(engine.dropped, ["0-2"])


class Good(unittest.TestCase):
    def test_goodput_counts_requests_that_met_both_limits(self) -> None:
        came = [Request(0.0, 8, 2), Request(0.0, 8, 2), Request(0.0, 8, 2), Request(1.0, 8, 2), Request(1.0, 8, 1)]
        answer = {
            "first_s": [0.5, 1.5, 0.5, None, 1.2],  # the second one is late
            "last_s": [0.52, 1.52, 0.6, None, 1.2],  # the third one's next token is
            "tokens": [2, 2, 2, 0, 1],
        }
        cell = serve.cell(came, answer, 2.0, batch_rate=3.0)
        self.assertEqual(cell["latencies_ms"], [500.0, 1500.0, 500.0, 200.0])
        self.assertEqual(cell["more_ms"]["tpot"], [20.0, 20.0, 100.0])
        expected = {"tokens_per_s": 3.5, "requests_per_s": 2.0, "goodput_per_s": 1.0, "attainment": 0.4, "batch_rate": 3.0}
        self.assertEqual(cell["rates"], expected)

    def test_rows_have_both_times(self) -> None:
        one = rounds.cell([1.0] * 400) | {"more_ms": {"tpot": [2.0] * 400}}
        found = [{"case": "1x", "round": at, "noise": 1.0, "failed": {}, "cells": {"alone": one, "gpumux": one}} for at in range(5)]
        values = rounds.row("1x", "gpumux", found)["values"]
        self.assertEqual((values["latency_p99_ms"], values["tpot_p99_ms"], values["tpot_p50_rel"]), (1.0, 2.0, 1.0))


class Used(unittest.TestCase):
    def test_busy_part_of_each_second_from_the_beginning(self) -> None:
        since = datetime.datetime(2026, 11, 28, 4, 0, 1).timestamp()
        stamps = ("00.900, 0, 1024", "01.100, 50, 2048", "01.900, 100, 2048", "02.000, 10, 3072", "02.2")
        found = serve.used_of((f"2026/11/28 04:00:{it}" for it in stamps), since)
        self.assertEqual(found.busy, {-1: 0.0, 0: 0.75, 1: 0.1})
        self.assertEqual({name: round(value, 3) for name, value in found.means.items()}, {"gpu_busy": 0.4, "memory_gib": 2.0})
        self.assertEqual(serve.used_of([], since), serve.Used({}, {}))

    def test_series_of_a_row_is_that_of_its_rounds(self) -> None:
        cells = [rounds.cell([1.0]) | {"series": {"gpu_busy": {str(at): 0.5}}} for at in (0, 12)]
        found = [{"case": "1x", "round": at, "noise": 1.0, "failed": {}, "cells": {"alone": it}} for at, it in enumerate(cells)]
        row = rounds.row("1x", "alone", found)
        self.assertEqual(row["series"], {"gpu_busy": {"0": 0.5, "12": 0.5}})
        common.check_results({"bench": "", "device": "", "driver": "", "date": "", "commit": "", "command": "", "rows": [row]})


if __name__ == "__main__":
    unittest.main()
