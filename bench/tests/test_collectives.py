"""The parts of `collectives.py` that need no GPU."""

import argparse
import contextlib
import json
import os
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

import collectives
import collectives_worker
import common
import rounds
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


class FakeJobs:
    """Jobs that run at half of their rate alone beside another."""

    def __init__(self, name: str) -> None:
        self.mode = types.SimpleNamespace(name=name)
        self.running: tuple[str, ...] = ()

    def start(self, *names: str) -> None:
        self.running = names

    def rates(self, _seconds: float, patterns: dict[str, str], _lead: float = 0.2) -> dict[str, float]:
        assert set(patterns) <= set(self.running)
        return {name: {"ddp": 10.0, "tensor": 20.0}[pattern] / len(patterns) for name, pattern in patterns.items()}


class Rounds(unittest.TestCase):
    def test_matrix_measures_all_modes_in_each_round_beside_alone(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(common, "device_and_driver", return_value=("X", "1")),
            mock.patch.object(common, "commit", return_value="c0"),
            mock.patch.object(collectives, "begun", lambda names, *_: {name: FakeJobs(name) for name in names}),
            mock.patch.object(rounds, "noise", return_value=1.0),
        ):
            results = common.Results("try", Path(folder), ["ddp+tensor"], ["alone", "gangs", "group"])
            options = argparse.Namespace(cases=["ddp+tensor"], modes=["gangs", "group"], seconds=0.1, rounds=rounds.LEAST, budget=60.0)
            code = collectives.matrix(options, results, Path(folder), Path(folder))
            data = json.loads(results.path.read_text())
        self.assertEqual(code, 0)
        rows = {row["mode"]: row for row in data["rows"]}
        self.assertEqual(rows["alone"]["values"], {"one_per_s": 10.0, "two_per_s": 20.0})
        for mode in ("gangs", "group"):
            self.assertEqual(rows[mode]["values"], {"throughput_rel": 1.0, "least_rel": 0.5, "one_rel": 0.5, "two_rel": 0.5})
            self.assertEqual(rows[mode]["interval"]["least_rel"], [0.5, 0.5])


class Modes(unittest.TestCase):
    def command(self, name: str, job: str) -> list[str]:
        mode = collectives.mode(name, Path("."))
        mode.binary = "gpumux"  # type: ignore[attr-defined]
        return mode.command(["job"], job, "batch")

    def test_group_has_fewer_thread_blocks_for_the_second_job_only(self) -> None:
        self.assertIn("NCCL_MAX_CTAS=4", self.command("group-ctas", "two"))
        self.assertNotIn("NCCL_MAX_CTAS=4", self.command("group-ctas", "one"))

    def test_ranks_per_gpu_is_the_only_setting_of_its_mode(self) -> None:
        command = self.command("ranks-per-gpu", "one")
        self.assertEqual(command[command.index("--ranks-per-gpu") + 1], "2")
        options = types.SimpleNamespace(nccl="/nccl.so", local_rank=True)
        with mock.patch.dict("os.environ", {"LD_PRELOAD": "/gpumux.so"}, clear=True):
            found = collectives_worker.Job.environment(types.SimpleNamespace(options=options), 3)  # type: ignore[arg-type]
        self.assertEqual(found, {"NCCL_DEBUG": "WARN", "LD_PRELOAD": "/gpumux.so:/nccl.so", "LOCAL_RANK": "3"})

    def test_limits_are_of_the_triad_only(self) -> None:
        for name, limit in (("duty-30", "0.3"), ("group-15", "0.15")):
            command = self.command(name, "triad")
            self.assertEqual(command[command.index("--limit") + 1], limit)
            self.assertNotIn("--limit", self.command(name, "decode"))
        self.assertIn("--trust", self.command("group-15", "decode"))


class Devices(unittest.TestCase):
    def test_programs_have_the_gpus_that_the_user_chose(self) -> None:
        seen = list[str]()
        note = lambda *_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]) or {}  # noqa: E731
        options = argparse.Namespace(cases=["2-on-2", "2-on-1"], modes=["time-slicing", "stock"], nccl=None, budget=60.0)
        results = mock.Mock(cell=lambda _: contextlib.suppress(TypeError))  # there is no mode
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="GPU-b,GPU-a"), mock.patch.object(collectives, "begun", note), mock.patch.object(collectives, "mode", note):
            collectives.logical(options, results, Path(), Path())
            collectives.bandwidth(options, results, Path(), Path())
        self.assertEqual(seen, ["GPU-b,GPU-a", "GPU-b", "GPU-b"])


class Boards(unittest.TestCase):
    def test_words_of_ranks_are_shared_and_apart(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            one, other = Board(Path(folder) / "board"), Board(Path(folder) / "board")
            one.note(0, STEPS, 3)
            one.note(3, STEPS, 4)
            one.note(3, WRONG, 9)
            self.assertEqual((other.sum(4, STEPS), other.rank(3, WRONG), other.sum(2, WRONG)), (7, 9, 0))
