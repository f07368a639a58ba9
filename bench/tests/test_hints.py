"""Tests of the hint benchmark's own logic; no GPU needed."""

import unittest

import hints


class Cases(unittest.TestCase):
    def test_a_task_prepares_or_copies_as_its_case_says(self) -> None:
        self.assertNotIn("--prepare-us", hints.task("10ms/prep0", 7))
        prepared = hints.task("100ms/prep200", 7)
        self.assertEqual(prepared[prepared.index("--prepare-us") + 1], "200")
        copied = hints.task("train/copy100", 7)
        self.assertEqual(copied[copied.index("--copy") + 1], "5000000")
        self.assertNotIn("--prepare-us", copied)

    def test_only_what_can_be_hinted_by_hand_is(self) -> None:
        self.assertEqual(hints.modes_of("10ms/prep0"), hints.MODES)
        self.assertEqual(hints.modes_of("train/torch-pinned"), ["alone", "none", "auto"])

    def test_added_latency_is_over_alone(self) -> None:
        values = {"latency_p50_us": 150.0, "latency_p99_us": 180.0, "batch_rate": 3.0}
        alone = {"latency_p50_us": 140.0, "latency_p99_us": 160.0}
        self.assertEqual(
            hints.added(values, alone), values | {"added_p50_us": 10.0, "added_p99_us": 20.0}
        )
