"""Tests of the memory benchmark's own logic; no GPU needed."""

import unittest

import memory
from common import BenchError


class Values(unittest.TestCase):
    def test_rates_are_bytes_over_time(self) -> None:
        values = memory.with_rates({"out_ms": 100.0, "in_ms": 50.0}, 5_500_000_000)
        self.assertEqual((values["out_gbps"], values["in_gbps"]), (55.0, 110.0))

    def test_every_case_is_a_size_or_a_number_of_programs(self) -> None:
        self.assertEqual([memory.gib(size) for size in memory.SIZES], [1, 2, 4, 8, 16, 32])
        for case in memory.JOBS + memory.PARTS["models"][0]:
            self.assertGreater(int(case.partition("x")[0]), 1)
        self.assertEqual(set(memory.PARTS), set(memory.RUN))

    def test_what_is_quick_is_a_part_of_all(self) -> None:
        for part, (cases, modes) in memory.QUICK.items():
            self.assertLessEqual(set(cases), set(memory.PARTS[part][0]))
            self.assertLessEqual(set(modes), set(memory.PARTS[part][1]))

    def test_losses_must_be_the_same_to_the_bit(self) -> None:
        memory.same([["0x1p+0", "0x1p+1"]] * 3)
        for wrong in ([], [["0x1p+0"], ["0x1.8p+0"]]):
            with self.assertRaises(BenchError):
                memory.same(wrong)

    def test_the_same_seed_asks_the_same_models(self) -> None:
        trace = memory.visits(8, 50, 1)
        self.assertEqual(trace, memory.visits(8, 50, 1))
        self.assertNotEqual(trace, memory.visits(8, 50, 2))
        self.assertEqual({model for model, _ in trace} - set(range(8)), set())
