"""The parts of `copies.py` that need no GPU."""

import unittest

import copies
from common import BenchError


class Cells(unittest.TestCase):
    def test_only_the_second_copies_alone_and_beside_an_idle_one(self) -> None:
        self.assertEqual(copies.orders("70/30 in", "gpumux"), {"one": {"way": "in"}, "two": {"way": "in"}})
        for case, mode in (("equal both", "alone"), ("idle both", "gpumux")):
            self.assertEqual(copies.orders(case, mode), {"two": {"way": "both"}})

    def test_values_are_rates_and_the_part_of_the_first(self) -> None:
        answers = {"one": {"bytes": 30e9, "seconds": 2.0}, "two": {"bytes": 10e9, "seconds": 2.0}}
        self.assertEqual(copies.values(answers), {"one_gbps": 15.0, "two_gbps": 5.0, "total_gbps": 20.0, "share_one": 0.75})
        self.assertEqual(copies.values({"two": answers["two"]})["share_one"], 0.0)
        with self.assertRaises(BenchError):
            copies.values({"one": {"bytes": 0, "seconds": 2.0}})
