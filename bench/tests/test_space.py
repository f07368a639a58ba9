"""How `space.py` makes its modes, without a GPU."""

import unittest
from pathlib import Path

import space


class Modes(unittest.TestCase):
    def test_jobs_are_in_the_group_and_the_user_is_not(self) -> None:
        mode = space.mode("space", Path("."))
        mode.binary = "gpumux"
        job = mode.command(["train"], "train-1", "batch")
        user = mode.command(["serve"], "server", "latency")
        self.assertIn("--trust", job)
        self.assertNotIn("--trust", user)
        self.assertEqual(job[-2:], ["--", "train"])

    def test_time_has_no_groups(self) -> None:
        mode = space.mode("time", Path("."))
        mode.binary = "gpumux"
        self.assertNotIn("--trust", mode.command(["train"], "train-1", "batch"))

    def test_curves_are_given_to_the_jobs_they_are_of(self) -> None:
        mode = space.mode("utility", Path("."))
        mode.binary, mode.curves = "gpumux", {"train": "50:0.5,100:1"}
        self.assertIn("50:0.5,100:1", mode.command(["x"], "train-1", "batch"))
        self.assertNotIn("--utility", mode.command(["x"], "inference-2", "batch"))

    def test_every_case_names_known_jobs(self) -> None:
        for case, kinds in space.CASES.items():
            self.assertEqual(case.removesuffix("+latency"), "+".join(kinds))
            self.assertLessEqual(set(kinds), set(space.KINDS))
        self.assertLessEqual(set(space.DEFAULT_CASES), set(space.CASES))


if __name__ == "__main__":
    unittest.main()
