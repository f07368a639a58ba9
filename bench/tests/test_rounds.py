"""The driver of rounds: its rules, its intervals, and that it can be resumed, with programs that are fakes."""

import contextlib
import io
import json
import random
import statistics
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import common
import rounds
from rounds import Pool, Round

MODES = ["alone", "gpumux"]


def one(number: int, alone: list[float], gpumux: list[float], noise: float = 1.0, failed: dict[str, str] = {}) -> Round:
    cells = {"alone": rounds.cell(alone), "gpumux": rounds.cell(gpumux, batch_rate=float(number))}
    return {"case": "a", "round": number, "noise": noise, "failed": failed, "cells": {k: v for k, v in cells.items() if k not in failed}}


class Statistics(unittest.TestCase):
    def test_quantiles_of_drawn_rounds_are_those_of_the_pooled_values(self) -> None:
        rng = random.Random(3)
        found = [[rng.random() for _ in range(rng.randrange(1, 40))] for _ in range(6)]
        pool = Pool(found)
        for times in ([1] * 6, [0, 3, 1, 0, 1, 1], *rounds.draws(6)[:20]):
            pooled = [value for values, count in zip(found, times) for value in values * count]
            for q in (0.0, 0.5, 0.99, 0.999, 1.0):
                self.assertEqual(pool.quantile(times, q), common.quantile(pooled, q), (times, q))
            self.assertAlmostEqual(pool.mean(times), statistics.fmean(pooled))

    def test_interval_holds_the_true_value_about_as_often_as_it_says(self) -> None:
        rng, hits = random.Random(5), 0
        for _ in range(100):
            found = [[rng.gauss(10, 1)] for _ in range(12)]
            pool = Pool(found)
            low, high = rounds.interval(pool.mean, 12)
            hits += low <= 10 <= high
        self.assertGreaterEqual(hits, 84)  # by 95%, less what 12 rounds cost; six standard deviations below
        self.assertLess(hits, 100)

    def test_intervals_widen_with_the_rounds_and_not_with_their_requests(self) -> None:
        even = [[1.0, 2.0, 3.0]] * 8
        self.assertEqual(rounds.interval(Pool(even).mean, 8), [2.0, 2.0])
        low, high = rounds.interval(Pool([[float(at)] * 1000 for at in range(8)]).mean, 8)
        self.assertGreater(high - low, 1.5)

    def test_rate_that_a_round_lacks_is_no_zero(self) -> None:
        cells = [rounds.cell([1.0], switch_ms=0.15), rounds.cell([1.0]), rounds.cell([1.0], switch_ms=0.17)]
        mean = rounds.statistics_of(cells, cells)["switch_ms"]
        self.assertAlmostEqual(mean([1, 1, 1]), 0.16)
        self.assertAlmostEqual(mean([2, 0, 1]), 0.47 / 3)
        self.assertAlmostEqual(mean([0, 3, 0]), 0.16, msg="of all, where no drawn round has it")

    def test_ratios_are_to_alone_in_the_same_rounds(self) -> None:
        good = [one(at, [1.0 + at] * 400, [2.0 + 2 * at] * 400) for at in range(6)]
        row = rounds.row("a", "gpumux", good)
        self.assertEqual(row["values"]["latency_mean_rel"], 2.0)
        self.assertEqual(row["interval"]["latency_mean_rel"], [2.0, 2.0])
        self.assertLess(*row["interval"]["latency_mean_ms"])
        self.assertEqual((row["samples"], row["values"]["batch_rate"]), (2400, 2.5))
        self.assertNotIn("latency_mean_rel", rounds.row("a", "alone", good)["values"])

    def test_no_quantile_without_requests_beyond_it_and_no_interval_of_few_rounds(self) -> None:
        row = rounds.row("a", "gpumux", [one(0, [1.0] * 200, [1.0] * 200)])
        self.assertNotIn("latency_p99_ms", row["values"])
        self.assertIn("latency_p50_ms", row["values"])
        self.assertNotIn("interval", row)
        self.assertIn("latency_p99_ms", rounds.row("a", "gpumux", [one(0, [1.0] * 300, [1.0] * 300)])["values"])


class Rules(unittest.TestCase):
    def test_disturbed_and_incomplete_rounds_do_not_count(self) -> None:
        found = [one(at, [1.0], [1.0]) for at in range(4)]
        found += [one(4, [1.0], [9.0], noise=2.5), one(5, [1.3], [1.0]), one(6, [1.0], [1.0], failed={"gpumux": "broke"})]
        found += [one(7, [1.0], [99.0])]
        out = rounds.rejected(found)
        self.assertEqual([*out], [4, 5, 6])
        self.assertIn("host noise", out[4])
        self.assertIn("alone", out[5])
        self.assertEqual(len(rounds.kept(found)), 5, "what a mode makes of a round does not decide")

    def test_what_is_usual_is_a_value_of_a_round_that_is_whole(self) -> None:
        two_speeds = [one(at, [level], [1.0]) for at, level in enumerate([1.0, 1.6, 1.0, 1.6, 1.0, 1.6])]
        self.assertEqual([*rounds.rejected(two_speeds)], [1, 3, 5], "not all, as none is like the mean of both")
        slow = [one(at, [3.0], [1.0], noise=9.0, failed={"gpumux": "broke"}) for at in range(4)]
        self.assertEqual([*rounds.rejected([*slow, *(one(4 + at, [1.0], [1.0]) for at in range(3))])], [0, 1, 2, 3])
        self.assertEqual([*rounds.rejected([one(at, [1.0], [1.0], noise=noise) for at, noise in enumerate([2.0, 2.0, 2.0, 5.0, 5.0, 5.0])])], [3, 4, 5])

    def test_rounds_that_play_other_parts_of_a_trace_may_differ(self) -> None:
        found = [one(at, [1.0], [1.0]) for at in range(rounds.LEAST)] + [one(rounds.LEAST, [1.3], [1.0])]
        self.assertEqual([*rounds.rejected(found)], [rounds.LEAST])
        self.assertEqual([*rounds.rejected([it | {"varies": True} for it in found])], [])

    def test_few_rounds_are_shown_with_their_noise(self) -> None:
        few = [one(0, [1.0], [1.0], noise=5.0), one(1, [1.0], [1.0], failed={"gpumux": "broke"})]
        self.assertEqual([*rounds.rejected(few)], [1])
        self.assertEqual([*rounds.rejected([*few, *(one(at, [1.0], [1.0]) for at in range(2, rounds.LEAST))])], [0, 1])

    def test_cell_ends_when_its_interval_is_narrow_or_at_the_most(self) -> None:
        steady = [one(at, [1.0] * 20, [2.0] * 20) for at in range(rounds.LEAST)]
        self.assertEqual(rounds.ended(steady, "gpumux", 9), "interval")
        self.assertEqual(rounds.ended(steady[1:], "gpumux", 9), "budget")
        rng = random.Random(1)
        wild = [one(at, [1.0] * 20, [rng.uniform(1, 3)] * 20) for at in range(rounds.LEAST)]
        self.assertEqual(rounds.ended(wild, "gpumux", 9), "budget")
        self.assertEqual(rounds.ended(wild, "gpumux", rounds.LEAST), "rounds")
        self.assertEqual(rounds.row("a", "gpumux", steady)["ended"], "interval")

    def test_few_requests_end_by_their_median_and_not_by_the_slowest(self) -> None:
        found = [one(at, [1.0] * 20, [2.0] * 19 + [20.0 * (1 + at % 2)]) for at in range(rounds.LEAST)]
        self.assertEqual(rounds.ended(found, "gpumux", 9), "interval")
        many = [one(at, [1.0] * 200, [2.0] * 190 + [20.0 * (1 + at % 2)] * 10) for at in range(rounds.LEAST)]
        self.assertEqual(rounds.ended(many, "gpumux", 9), "budget")

    def test_cells_without_requests_end_by_their_rate(self) -> None:
        def rated(*rates: float) -> list[Round]:
            return [one(at, [], []) | {"cells": {name: rounds.cell(per_s=of) for name in MODES}} for at, of in enumerate(rates)]

        self.assertEqual(rounds.ended(rated(10, 10.1, 9.9, 10, 10), "gpumux", 9), "interval")
        self.assertEqual(rounds.ended(rated(5, 10, 15, 20, 10), "gpumux", 9), "budget")

    def noisy(self, spread: float, most: int, modes: dict[str, float], varies: bool = False) -> tuple[list[Round], dict[str, str]]:
        """Rounds of modes whose requests differ by 2%, and whose rounds by so much more (both lognormal), until the rule ends them, and how each ended."""
        rng, found = random.Random(7), list[Round]()
        while todo := rounds.unfinished(found, ["alone", *modes], rounds.LEAST, most, varies):
            made = one(len(found), [1.0] * 400, [])
            round_of = {name: rng.lognormvariate(0, modes.get(name, 0.0) * spread) for name in todo}
            made["cells"] = {name: rounds.cell(level * rng.lognormvariate(0, 0.02) for _ in range(400)) for name, level in round_of.items()}
            found.append(made)
        return found, {name: rounds.ended(rounds.of_mode(rounds.kept(found), name), name, most) for name in modes}

    def test_steady_cell_ends_before_a_noisy_one(self) -> None:
        found, how = self.noisy(0.15, rounds.MOST, {"steady": 0.0, "noisy": 1.0})
        self.assertEqual(how, {"steady": "interval", "noisy": "interval"})
        self.assertEqual(sum("steady" in it["cells"] for it in found), rounds.LEAST)
        self.assertGreater(len(found), rounds.LEAST)
        self.assertLess(len(found), rounds.MOST)

    def test_parts_of_a_trace_end_together(self) -> None:
        found, _ = self.noisy(0.15, rounds.MOST, {"steady": 0.0, "noisy": 1.0}, varies=True)
        self.assertTrue(all("steady" in it["cells"] for it in found))

    def test_noise_decides_how_many_rounds_a_cell_needs(self) -> None:
        counts = [len(self.noisy(spread, rounds.MOST, {"x": 1.0})[0]) for spread in (0.0, 0.1, 1.0)]
        self.assertEqual((counts[0], counts[-1]), (rounds.LEAST, rounds.MOST))
        self.assertTrue(counts[0] < counts[1] < counts[2], counts)

    def test_one_slow_round_of_five_does_not_look_steady(self) -> None:
        levels = [1.0, 1.3, 1.3, 1.0, 1.0]
        found = [one(at, [1.0] * 400, [2.0 * level] * 400) for at, level in enumerate(levels)]
        self.assertEqual(rounds.ended(found, "gpumux", 9), "budget")

    def test_student_is_the_quantile_of_its_distribution(self) -> None:
        for freedom, expected in {4: 2.776, 9: 2.262, 39: 2.023}.items():
            self.assertAlmostEqual(rounds.student(freedom) / expected, 1, delta=0.02)

    def test_rejected_rounds_are_made_again(self) -> None:
        wild = [one(at, [1.0] * 20, [1.0 + at % 3] * 20) for at in range(rounds.LEAST - 1)] + [one(4, [1.0] * 20, [1.0], noise=9.0)]
        self.assertEqual(rounds.unfinished(wild, MODES, rounds.LEAST, rounds.LEAST), MODES)
        more = one(5, [1.0] * 20, [2.0] * 20)
        self.assertEqual(rounds.unfinished([*wild, more], MODES, rounds.LEAST, rounds.LEAST), [])
        hopeless = [one(at, [1.0], [1.0], failed={"gpumux": "broke"}) for at in range(2 * rounds.LEAST)]
        self.assertEqual(rounds.unfinished(hopeless, MODES, rounds.LEAST, rounds.LEAST), [])

    def test_noise_is_a_ratio_of_at_least_one(self) -> None:
        self.assertGreaterEqual(rounds.noise(0.01), 1.0)


class Driver(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.calls = Path(folder.name), list[tuple[str, str, int]]()
        for patch in (contextlib.redirect_stderr(io.StringIO()), mock.patch.object(rounds, "noise", return_value=1.0)):
            patch.__enter__()
            self.addCleanup(patch.__exit__, None, None, None)

    def results(self, commit: str = "c0") -> common.Results:
        with mock.patch.object(common, "device_and_driver", return_value=("X", "1")), mock.patch.object(common, "commit", return_value=commit):
            return common.Results("try", self.folder, ["a", "b"], MODES)

    def measure(self, case: str, mode: str, number: int) -> dict[str, object]:
        self.calls.append((case, mode, number))
        return rounds.cell([1.0 if mode == "alone" else 1.2] * 100, batch_rate=5.0)

    def plan(self, measure: object = None) -> rounds.Plan:
        return rounds.Plan(["a", "b"], list(MODES), measure or self.measure)

    def rows(self) -> list[dict[str, object]]:
        data = json.loads(self.results().path.read_text())
        common.check_results(data)
        return data["rows"]

    def test_every_round_has_all_modes_and_begins_with_another(self) -> None:
        self.assertEqual(rounds.run(self.plan(), self.results(), 60), 0)
        per_case = rounds.LEAST * len(MODES)
        self.assertEqual(len(self.calls), 2 * per_case)
        self.assertEqual([mode for _, mode, _ in self.calls[:4]], ["alone", "gpumux", "gpumux", "alone"])
        self.assertEqual([(row["case"], row["mode"]) for row in self.rows()], [(case, mode) for case in "ab" for mode in MODES])

    def test_a_call_goes_on_where_another_ended(self) -> None:
        self.assertEqual(rounds.run(self.plan(), self.results(), 0.0), rounds.UNFINISHED)
        self.assertEqual(self.calls, [])

        def dies(case: str, mode: str, number: int) -> dict[str, object]:
            if (case, number) == ("a", 3):
                raise KeyboardInterrupt
            return self.measure(case, mode, number)

        with self.assertRaises(KeyboardInterrupt):
            rounds.run(self.plan(dies), self.results(), 60)
        self.assertEqual(self.rows()[0]["samples"], 300)
        self.calls.clear()
        self.assertEqual(rounds.run(self.plan(), self.results(), 60), 0)
        self.assertEqual(self.calls[0][2], 3)
        self.assertEqual(self.rows()[0]["samples"], 100 * rounds.LEAST)

    def test_rounds_of_another_commit_are_not_mixed_in(self) -> None:
        rounds.run(self.plan(), self.results(), 60)
        with self.assertRaisesRegex(common.BenchError, "another device, commit"):
            rounds.run(self.plan(), self.results("c1"), 60)

    def test_a_mode_that_fails_twice_is_left_out_and_named(self) -> None:
        def fails(case: str, mode: str, number: int) -> dict[str, object]:
            if mode == "gpumux" and number > 1:
                raise common.BenchError("no luck")
            return self.measure(case, mode, number)

        self.assertEqual(rounds.run(self.plan(fails), self.results(), 60), 1)
        self.assertEqual([(row["mode"], row["samples"]) for row in self.rows()], [("alone", 100 * rounds.LEAST)] * 2)
        self.assertIn("gpumux failed twice in a row in a and is left out: no luck.", json.loads(self.results().path.read_text())["note"])

    def test_alone_that_fails_twice_ends_the_call(self) -> None:
        def fails(case: str, mode: str, number: int) -> dict[str, object]:
            if mode == "alone":
                raise common.BenchError("no luck")
            return self.measure(case, mode, number)

        with self.assertRaisesRegex(common.BenchError, "alone failed twice in a row: no luck"):
            rounds.run(self.plan(fails), self.results(), 60)

    def test_a_case_without_time_to_prepare_it_is_left_to_the_next_call(self) -> None:
        plan = self.plan()._replace(cases=["a", "b"], prepare=lambda case: time.sleep(0.4))
        self.assertEqual(rounds.run(plan, self.results(), 0.7), rounds.UNFINISHED)
        self.assertEqual({case for case, _, _ in self.calls}, {"a"})

    def test_modes_that_cannot_run_are_left_out_and_named(self) -> None:
        def have(case: str, mode: str) -> None:
            if mode == "gpumux":
                raise common.BenchError("no\nGPU")

        modes, notes = list(MODES), list[str]()
        plan = rounds.Plan(["a"], modes, self.measure, lambda case: rounds.prepare(case, modes, have, notes))
        self.assertEqual(rounds.run(plan, self.results(), 60, notes=notes), 1)
        self.assertEqual((modes, notes), (["alone"], ["gpumux could not run a: no GPU."]))
        self.assertEqual({mode for _, mode, _ in self.calls}, {"alone"})
        self.assertEqual(json.loads(self.results().path.read_text())["note"], "gpumux could not run a: no GPU.")

    def test_case_that_alone_cannot_run_ends_the_call_and_names_why(self) -> None:
        def have(case: str, mode: str) -> None:
            raise common.BenchError("no room")

        modes, notes = list(MODES), list[str]()
        plan = rounds.Plan(["a"], modes, self.measure, lambda case: rounds.prepare(case, modes, have, notes))
        with self.assertRaisesRegex(common.BenchError, "alone could not run a: no room"):
            rounds.run(plan, self.results(), 60, notes=notes)

    def test_alone_is_in_every_round(self) -> None:
        with self.assertRaisesRegex(common.BenchError, "alone"):
            rounds.run(rounds.Plan(["a"], ["gpumux"], self.measure), self.results(), 60)
