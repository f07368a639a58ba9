"""Tests of the residency benchmark's own logic; no GPU needed."""

import random
import unittest
from types import SimpleNamespace
from unittest import mock

import residency
import residency_worker


class Cases(unittest.TestCase):
    def test_jobs_do_not_fit_together(self) -> None:
        for sizes, endless in residency.TOGETHER.values():
            parts = [float(it.removesuffix("%")) for it in [*sizes, *([endless] if endless else [])]]
            self.assertGreater(sum(parts), 100)
            self.assertTrue(all(part < 90 for part in parts))

    def test_parts_and_programs_are_all_there(self) -> None:
        self.assertEqual(set(residency.PARTS), set(residency.RUN))
        self.assertEqual(set(residency.PARTS["programs"][0]), set(residency_worker.CASES))

    def test_size_is_a_part_in_whole_mebibytes(self) -> None:
        self.assertEqual(residency.part_of("60%", 1 << 30), 614 << 20)
        self.assertEqual(residency.pieces(614 << 20), 2 << 20)
        self.assertEqual(residency.pieces(1 << 20), 2 << 20)
        self.assertEqual(residency.pieces(84 << 30), 336 << 20)

    def test_one_odd_look_at_the_device_does_not_count(self) -> None:
        occupied = [70, 10, 10, 10, 10, 10, 10, 10, 10, 10]
        api = SimpleNamespace(memory=lambda: {"total": 100, "occupied": occupied.pop(0), "tenants": [{"in_use": 80, "swapped": 20}]})
        with mock.patch.object(residency.time, "sleep", lambda _: None):
            self.assertEqual(residency.lacking(api), 10)  # type: ignore[arg-type]

    def test_same_seed_kills_the_same_at_the_same_time(self) -> None:
        jobs = SimpleNamespace(workers={"a": None, "b": None})
        one, two = (residency.Kill("kill-tenant", jobs, random.Random(3)) for _ in range(2))
        self.assertEqual((one.victim, one.at), (two.victim, two.at))
        self.assertIn(one.victim, jobs.workers)
        self.assertTrue(residency.Kill("gpumux", jobs, random.Random(3)).done)
        self.assertIsNone(residency.Kill("kill-daemon", jobs, random.Random(3)).victim)
