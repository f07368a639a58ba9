"""How `space.py` makes its modes, without a GPU."""

import json
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

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

    def test_equal_parts_are_limits_of_jobs(self) -> None:
        mode = space.mode("equal", Path("."))
        mode.binary, mode.part = "gpumux", 1 / 3
        job = mode.command(["train"], "train-1", "batch")
        self.assertEqual(job[job.index("--limit") + 1], "0.333")
        self.assertNotIn("--limit", mode.command(["serve"], "server", "latency"))

    def test_jobs_are_known_by_what_they_were_profiled_as(self) -> None:
        mode = space.mode("utility", Path("."))
        mode.binary = "gpumux"
        measured = mode.profile_command("train", 4.0)
        named = ["--fingerprint", "train"]
        at = measured.index(named[0])
        self.assertEqual(measured[at : at + 2], named)
        self.assertEqual(measured[measured.index("--points") + 1], "10,25,50,75,100")
        self.assertEqual(measured[measured.index("--") + 3 :], ["--free", *space.KINDS["train"][0]])
        job = mode.command(["x"], "train-1", "batch")
        at = job.index(named[0])
        self.assertEqual(job[at : at + 2], named)
        self.assertNotIn("--fingerprint", mode.command(["x"], "server", "latency"))

    def test_a_profile_is_read_and_one_that_failed_is_an_error(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            mode = space.mode("utility", Path(folder))
            mode.folder = Path(folder)
            points = [{"percent": 25, "relative": 0.9, "spread": 0.5}, {"percent": 100, "relative": 1.0, "spread": 0}]
            for code, output in (0, json.dumps({"points": points, "bandwidth": None})), (1, ""):
                done = subprocess.CompletedProcess([], code, output)
                mode.binary = "gpumux"
                with mock.patch("subprocess.run", return_value=done), mock.patch("common.say") as said:
                    if code:
                        with self.assertRaises(space.BenchError):
                            mode.profile("train", 1.0)
                        continue
                    self.assertEqual(mode.profile("train", 1.0), {25: 0.9, 100: 1.0})
                    self.assertIn("not steady at [25]%", said.call_args_list[0].args[0])

    def test_throughput_is_relative_to_the_same_programs_alone(self) -> None:
        alone, shared = space.Cell("train+train+latency", "alone"), space.Cell("train+train+latency", "mps")
        user = {"latencies_ms": [1.0] * 100, "seconds": 2.0}
        alone.answers = [{"train": {"calls": 20, "seconds": 2.0}, "server": user}] * 2
        self.assertEqual(alone.rates(), {"train": 10, "server": 50})
        user = {"latencies_ms": [2.0] * 40, "seconds": 2.0}
        jobs = {"train-1": {"calls": 12, "seconds": 2.0}, "train-2": {"calls": 5, "seconds": 1.0}}
        shared.answers = [jobs | {"server": user}] * 3
        values = shared.values(alone.rates())
        self.assertEqual([round(values[it], 6) for it in ("batch_rel", "least_rel", "throughput_rel")], [1.1, 0.5, 1.5])
        self.assertEqual((values["latency_p99_ms"], values["spread_rel"]), (2.0, 0.0))
        self.assertEqual(alone.values(alone.rates())["throughput_rel"], 1.0)

    def test_prediction_is_that_of_the_last_job(self) -> None:
        mode = space.mode("utility", Path("."))
        mode.tenants = {"gemm-1": "a", "triad-2": "b"}
        both = {"in_group": 1.7, "in_time": 1.0}
        tenants = [{"name": "a", "placement": {}}, {"name": "b", "placement": {"prediction": both}}]
        with mock.patch.object(mode, "tenants_now", return_value=tenants), mock.patch("common.say"):
            self.assertEqual(mode.predicted(mode.tenants), {"predicted_rel": 1.7, "predicted_time_rel": 1.0})
            with self.assertRaises(space.BenchError):
                mode.predicted(["gemm-1"])

    def test_every_case_names_known_jobs(self) -> None:
        for case in space.CASES:
            self.assertLessEqual(set(space.jobs_of(case)), set(space.KINDS))
        self.assertLessEqual(set(space.DEFAULT_CASES), set(space.CASES))
