"""Loads that change, what counts, and whole runs with engines that are fakes."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import common
import shift
from common import BenchError

OPTIONS = argparse.Namespace(phase=10.0, high=8.0, low=0.5, prompt=30, output=4, engines=2, room=4 << 30, attention="A", model=Path("m"), memory=0.2, storm=0)


class Loads(unittest.TestCase):
    def test_each_engine_has_a_high_load_in_one_phase(self) -> None:
        for number in range(3):
            requests = shift.load(number, 3, OPTIONS, seed=1)
            high = [it for it in requests if it.high]
            self.assertTrue(all(number * 10 <= it.at < (number + 1) * 10 for it in high))
            self.assertTrue(40 < len(high) < 130 and len(requests) - len(high) < 30)
            self.assertEqual([it.at for it in requests], sorted(it.at for it in requests))
            self.assertEqual(requests, shift.load(number, 3, OPTIONS, seed=1))
        self.assertNotEqual(shift.load(0, 2, OPTIONS, 1), shift.load(0, 2, OPTIONS, 2))

    def test_storm_is_all_requests_of_all_engines_at_once(self) -> None:
        storm = argparse.Namespace(**{**vars(OPTIONS), "storm": 5})
        self.assertEqual(shift.load(1, 6, storm, 1), [shift.Request(0.0, 30, 4, True)] * 5)

    def test_no_low_load_gives_no_requests(self) -> None:
        quiet = argparse.Namespace(**{**vars(OPTIONS), "low": 0.0})
        self.assertTrue(all(it.high for it in shift.load(1, 2, quiet, 1)))


class Values(unittest.TestCase):
    def test_request_without_a_token_counts_until_the_end(self) -> None:
        came = [[shift.Request(1.0, 8, 3, True), shift.Request(2.0, 8, 3, False)]]
        answers = [{"first_s": [1.5, None], "last_s": [2.5, None], "tokens": [3, 0]}]
        found = shift.values(came, answers, 10.0)
        self.assertEqual(found, {"ttft": [500.0, 8000.0], "high": [500.0], "tpot": [500.0], "finished": [1.0, 0.0], "end": [2.5]})
        made, around = shift.row([found, found])
        self.assertEqual(around, {}, "of two rounds")
        self.assertEqual((made["ttft_mean_ms"], made["ttft_p99_ms"], made["finished"]), (4250.0, 8000.0, 0.5))
        self.assertAlmostEqual(made["requests_per_s"], 2 / 5.0)

    def test_intervals_are_of_rounds(self) -> None:
        one = {"ttft": [100.0], "high": [100.0], "tpot": [10.0], "finished": [1.0], "end": [1.0]}
        slow = {**one, "ttft": [900.0], "tpot": []}
        values, around = shift.row([one, one, slow, slow, slow])
        self.assertAlmostEqual(values["ttft_mean_ms"], 580.0)
        self.assertEqual(around["ttft_mean_ms"], [260.0, 900.0])
        self.assertEqual(around["requests_per_s"], [1.0, 1.0])
        self.assertNotIn("tpot_p50_ms", around, "not each draw of rounds has one")

    def test_run_without_a_finished_request_fails(self) -> None:
        came, answers = [[shift.Request(1.0, 8, 3, True)]], [{"first_s": [2.0], "last_s": [2.5], "tokens": [2]}]
        with self.assertRaises(BenchError):
            shift.row([shift.values(came, answers, 10.0)])

    def test_other_program_leaves_the_room(self) -> None:
        gib = 1 << 30
        self.assertEqual(shift.rest(100 * gib, 20 * gib, 10 * gib, "elastic", 2), 70 * gib - 2 * shift.LEASE)
        self.assertLess(shift.rest(100 * gib, 20 * gib, 10 * gib, "kvcached", 2), 70 * gib - 2 * shift.LEASE - gib // 2)
        with self.assertRaises(BenchError):
            shift.rest(100 * gib, 95 * gib, 10 * gib, "elastic", 2)

    def test_accounting_of_gpumux_is_asked_where_it_counts(self) -> None:
        devices = [{"uuid": f"GPU-{at}", "index": at, "memory_guaranteeable": 1000 + at, "context_bytes": 30} for at in range(2)]
        answers = {"/v1/devices": devices, "/v1/tenants": [{"memory": [{"in_use": 7}]}, {"memory": []}]}
        mode = mock.MagicMock(spec=common.Gpumux, folder=Path("x"))
        with mock.patch.object(shift.kv.Api, "ask", lambda _self, _method, path: answers[path]):
            for seen, usable in (("", 910), ("1", 911), ("GPU-1", 911), ("GPU-0", 910)):
                with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": seen}):
                    self.assertEqual(shift.device(mode, 3), (usable, 7))


class Fake:
    """A worker with an engine that makes one token of each request a step."""

    made: list[str] = []
    silent: set[str] = set()
    slow: set[str] = set()
    dead: set[str] = set()
    dies: set[str] = set()
    given: dict[str, Any] = {}

    def __init__(self, name: str, arguments: Any, mode: common.Mode, _klass: str, _program: Any) -> None:
        self.given[mode.name], self.mode = json.loads(arguments[6]), mode.name
        self.process = SimpleNamespace(poll=lambda: 1 if self.name in self.dead else None)
        self.name, self.log, self.answers = name, mode.logs / f"{mode.name}-{name}.log", [{"ready": True}]
        self.made.append(f"{mode.name} {name}")
        self.log.write_text("" if mode.name in self.silent else shift.engines.said(mode.name))

    def send(self, **order: Any) -> None:
        if "greedy" in order:
            self.answers.append({"taken": 3, "refused": 1})
            return
        requests = order["requests"]
        if self.name in self.dies and len(requests) != shift.WARM:
            self.dead.add(self.name)
        self.made.append(f"{self.name} serves {len(requests)}")
        at = [it[0] for it in requests]
        tokens = [0 if self.mode in self.slow else it[2] for it in requests]
        self.answers.append({"first_s": [it + 0.1 for it in at], "last_s": [it + 0.4 for it in at], "tokens": tokens})

    def reply(self, _timeout: float) -> Any:
        if self.name in self.dead:
            raise BenchError("it has ended")
        return self.answers.pop(0)

    def close(self) -> None:
        self.made.append(f"closed {self.name}")


class Plain(common.Mode):
    """Stands in for a daemon."""


class Runs(unittest.TestCase):
    def run_all(self, *arguments: str) -> tuple[int, dict[str, Any], list[str]]:
        Fake.made, Fake.given = [], {}
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(shift.engines, "Worker", Fake))
            for name in ("Gpumux", "_Kvcached", "_KvcachedGpumux"):
                stack.enter_context(mock.patch.object(shift.engines, name, Plain))
            stack.enter_context(mock.patch.object(shift, "device", lambda *_: Fake.made.append("device") or (100 << 30, 20 << 30)))
            stack.enter_context(mock.patch.object(shift, "SETTLED_S", 0))
            stack.enter_context(mock.patch.object(shift, "holding", lambda *_, **__: contextlib.nullcontext()))
            stack.enter_context(mock.patch.object(common, "say"))
            stack.enter_context(mock.patch("signal.signal"))
            stack.enter_context(mock.patch.object(sys, "argv", ["shift.py", "--quick", "--out", folder, "--logs", f"{folder}/logs", *arguments]))
            stack.enter_context(mock.patch.dict("os.environ"))
            code = shift.main()
            (file,) = Path(folder).glob("shift-*.json")
            return code, json.loads(file.read_text()), Fake.made

    def test_every_mode_has_a_row_and_its_engines_end(self) -> None:
        code, data, made = self.run_all("--budget", "1000")
        self.assertEqual((code, [it["mode"] for it in data["rows"]]), (0, shift.engines.MODES))
        self.assertEqual(len([it for it in made if it.startswith("closed")]), 2 * len(shift.engines.MODES))
        (elastic,) = [it["values"] for it in data["rows"] if it["mode"] == "elastic"]
        self.assertEqual((elastic["taken"], elastic["refused"]), (6, 2))
        self.assertAlmostEqual(elastic["ttft_mean_ms"], 100.0, places=3)

    def test_fixed_parts_are_equal_and_others_have_all(self) -> None:
        self.run_all("--budget", "1000", "--room", "4GiB")
        for mode, given in Fake.given.items():
            self.assertEqual(given["kv_cache_memory_bytes"], (2 if mode in ("stock", "gpumux") else 4) << 30)
            self.assertEqual(given.get("worker_cls"), "gpumux.vllm.Worker" if mode == "elastic" else None)
        self.assertEqual([*Fake.given], shift.engines.MODES)

    def test_memory_is_looked_at_when_steps_have_what_they_need(self) -> None:
        _code, _data, made = self.run_all("--modes", "stock")
        warm = [f"engine-{number} serves {shift.WARM}" for number in range(2)]
        self.assertEqual(made[:5], ["stock engine-0", "stock engine-1", *warm, "device"])

    def test_engine_that_serves_nothing_at_first_is_noted(self) -> None:
        with mock.patch.object(Fake, "slow", {"stock"}):
            code, data, _made = self.run_all("--modes", "stock,gpumux")
        self.assertEqual((code, [it["mode"] for it in data["rows"]]), (1, ["gpumux"]))
        self.assertIn("stock: engine-0 did not serve", data["note"])

    def test_engine_that_ends_counts_and_loses_only_its_own_requests(self) -> None:
        with mock.patch.object(Fake, "dies", {"engine-1"}), mock.patch.object(Fake, "dead", set()):
            code, data, made = self.run_all("--modes", "elastic", "--storm", "9", "--engines", "3", "--rounds", "2")
        (row,) = data["rows"]
        self.assertEqual((code, row["case"], row["values"]["aborts"], row["values"]["taken"]), (0, "3-engines-storm", 1, 6))
        self.assertAlmostEqual(row["values"]["finished"], 2 / 3, places=5)
        self.assertEqual(made.count("engine-1 serves 9"), 1, "it is asked no more")

    def test_mode_that_is_not_what_it_should_be_is_noted(self) -> None:
        with mock.patch.object(Fake, "silent", {"kvcached"}):
            code, data, _made = self.run_all("--modes", "kvcached,elastic")
        self.assertEqual((code, [it["mode"] for it in data["rows"]]), (1, ["elastic"]))
        self.assertIn("kvcached: engine-0 is not kvcached", data["note"])
