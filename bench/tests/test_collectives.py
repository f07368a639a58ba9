"""The parts of `collectives.py` that need no GPU."""

import tempfile
import unittest
from pathlib import Path

import collectives
import collectives_worker
from collectives_worker import STEPS, WRONG, Board


class Storms(unittest.TestCase):
    def test_deck_has_every_action_and_the_seed_decides_the_order(self) -> None:
        deck = collectives.deck(100, 1)
        self.assertEqual(len(deck), 100)
        self.assertEqual(set(deck), set(collectives.ACTIONS))
        self.assertEqual(deck, collectives.deck(100, 1))
        self.assertNotEqual(deck, collectives.deck(100, 2))
        self.assertEqual(len(collectives.deck(333, 1)), 333)

    def test_summary_counts_what_went_wrong(self) -> None:
        good = {"in_collective": True, "hangs": 0, "refused": False, "seconds": 0.2}
        values = collectives.summary([good, good | {"hangs": 2, "in_collective": False, "seconds": 30.0}, good | {"refused": True}])
        self.assertEqual(values, {"rounds": 3, "in_collective": 2, "hangs": 2, "refused": 1, "worst_s": 30.0, "median_s": 0.2})


class Pairs(unittest.TestCase):
    def test_values_are_relative_to_each_pattern_alone(self) -> None:
        patterns = collectives.pair("ddp+tensor")
        values = collectives.relative({"one": 5.0, "two": 4.0}, {"ddp": 10.0, "tensor": 16.0}, patterns)
        self.assertEqual(values, {"throughput_rel": 0.75, "least_rel": 0.25, "one_rel": 0.5, "two_rel": 0.25})

    def test_every_pattern_of_a_case_is_known_to_the_worker(self) -> None:
        known = set(collectives_worker.PATTERNS)
        for case in collectives.PAIRS:
            self.assertLessEqual(set(case.split("+")), known)


class Modes(unittest.TestCase):
    def command(self, name: str, job: str) -> list[str]:
        mode = collectives.mode(name, Path("."))
        mode.binary = "gpumux"  # type: ignore[attr-defined]
        return mode.command(["job"], job, "batch")

    def test_group_has_fewer_thread_blocks_for_the_second_job_only(self) -> None:
        self.assertIn("NCCL_MAX_CTAS=4", self.command("group-ctas", "two"))
        self.assertNotIn("NCCL_MAX_CTAS=4", self.command("group-ctas", "one"))

    def test_limits_are_of_the_triad_only(self) -> None:
        for name, limit in (("duty-30", "0.3"), ("group-15", "0.15")):
            command = self.command(name, "triad")
            self.assertEqual(command[command.index("--limit") + 1], limit)
            self.assertNotIn("--limit", self.command(name, "decode"))
        self.assertIn("--trust", self.command("group-15", "decode"))


class Boards(unittest.TestCase):
    def test_words_of_ranks_are_shared_and_apart(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one, other = Board(Path(folder) / "board"), Board(Path(folder) / "board")
            one.note(0, STEPS, 3)
            one.note(3, STEPS, 4)
            one.note(3, WRONG, 9)
            self.assertEqual((other.sum(4, STEPS), other.rank(3, WRONG), other.sum(2, WRONG)), (7, 9, 0))


if __name__ == "__main__":
    unittest.main()
