"""Tests of what is added by turns of a crew; no GPU needed."""

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import common
import crews
import overhead


def crew(plain: float, again: float, managed: float, rounds: int = 5) -> dict[str, list[crews.Batches]]:
    """Turns of twenty batches, most of which the host disturbs."""
    turn = lambda value: {"launch": [value * (2 if n > 3 else 1) for n in range(20)]}  # noqa: E731
    return {name: [turn(value)] * rounds for name, value in zip((crews.PLAIN, crews.AGAIN, crews.MANAGED), (plain, again, managed))}


class Turns(unittest.TestCase):
    def test_small_addition_shows_through_a_disturbed_host(self) -> None:
        found = crews.of_crews([crew(14.0, 14.0, 14.3), crew(15.0, 15.2, 15.4), crew(13.0, 13.0, 13.3)])["launch"]
        for added in found.added:
            self.assertAlmostEqual(added, 0.3)
        self.assertAlmostEqual(max(found.noise), 0.2)

    def test_rows_have_intervals_over_crews_and_the_noise(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(common, "device_and_driver", return_value=("a", "b")):
            results = common.Results("test", Path(folder), ["case"], [crews.PLAIN, crews.MANAGED])
            crews.add(results, "case", crews.of_crews([crew(10, 11, 12), crew(20, 20, 21)]), "us")
            plain, managed = results.data["rows"]
        self.assertEqual(plain["values"], {"launch_us": 15.25, "launch_noise_us": 1})
        self.assertEqual(managed["interval"]["launch_added_us"], [1, 1.5])

    def test_order_is_reversed_in_every_second_round(self) -> None:
        first, second = crews.orders(2)
        self.assertEqual(first, second[::-1])
        # The one with gpumux is between the others, so that drift hits both alike.
        self.assertEqual(first[1], crews.MANAGED)

    def test_crews_have_cores_of_their_own(self) -> None:
        with mock.patch("os.sched_getaffinity", return_value=set(range(8, 16))):
            cores = [crews.cores(n) for n in range(4)]
            self.assertEqual([overhead.eager(n)[-1] for n in range(4)], cores)
        self.assertEqual(cores, ["8,9", "10,11", "12,13", "14,15"])
