"""What shares.py makes of reports."""

import unittest

import shares


class Values(unittest.TestCase):
    def test_first_second_in_which_programs_start_counts_in_no_value(self) -> None:
        found = [{"per_second": [300, 350, 350]}, {"per_second": [0, 150, 150]}]
        values = shares.evaluate(shares.CASES["70/30"], found, solo=500.0)
        self.assertEqual((values["total_rel"], values["share_1"], values["share_2"]), (1.0, 0.7, 0.3))
        self.assertAlmostEqual(values["worst_window_error"], 0.0)
