"""Tests of the memory benchmark's own logic; no GPU needed."""

import argparse
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import common
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

    def test_allocations_are_measured_in_turns_with_intervals(self) -> None:
        program = [sys.executable, "-c", "import crews; crews.answer('pair', lambda: None)"]
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, PYTHONPATH=str(common.BENCH)),
            mock.patch.object(common, "device_and_driver", return_value=("X", "1")),
            mock.patch.object(memory, "script", lambda *_: program),
            mock.patch.object(memory, "Gpumux", common.Mode),
            mock.patch.object(memory, "CREWS", 1),
        ):
            results = common.Results("alloc", Path(folder), *memory.PARTS["alloc"])
            memory.alloc(results, ["driver-2MiB"], ["alone", "gpumux"], Path(folder), argparse.Namespace(quick=True))
        self.assertEqual(results.failed, [])
        plain, managed = results.data["rows"]
        self.assertEqual((set(plain["values"]), set(managed["values"])), ({"pair_us", "pair_noise_us"}, {"pair_us", "pair_added_us"}))
        self.assertEqual(set(managed["interval"]), set(managed["values"]))

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
