"""Loads of many models, what counts, which may be awake, and engines that sleep: with engines that are fakes."""

import argparse
import contextlib
import json
import select
import socket
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import common
import engines
import many
import rooms
import serve
from common import BenchError

LENGTHS = [serve.Request(0.0, 500, 900), serve.Request(1.0, 20, 4)]


class Loads(unittest.TestCase):
    def test_first_model_is_asked_most_and_fewer_models_have_a_part_of_the_same_load(self) -> None:
        loads = [many.load(model, LENGTHS, 2.0, 200.0) for model in range(4)]
        counts = [len(it) for it in loads]
        self.assertTrue(350 < counts[0] < 450 and 60 < counts[3] < 140, counts)
        self.assertEqual(loads[1], many.load(1, LENGTHS, 2.0, 200.0))
        self.assertNotEqual(loads[1], many.load(1, LENGTHS, 2.0, 200.0, 1), "another round has other moments")
        self.assertEqual({it.output for it in loads[0]}, {many.LONGEST, 4})

    def test_request_after_a_pause_is_one_after_a_pause(self) -> None:
        requests = many.load(3, LENGTHS, 1.0, 300.0)
        gaps = [b.at - a.at for a, b in zip(requests, requests[1:])]
        self.assertEqual([it.paused for it in requests], [True, *(it >= many.PAUSE_S for it in gaps)])


def served(came: list[many.Request], *answers: tuple[float | None, float | None, int]) -> list[serve.Served]:
    """Requests with their first and last token, and how many they had."""
    first, last, tokens = zip(*answers)
    return serve.served(came, {"first_s": first, "last_s": last, "tokens": tokens})


class Values(unittest.TestCase):
    def test_slow_and_unfinished_requests_do_not_count_as_good(self) -> None:
        came = [many.Request(1.0, 8, 2, True), many.Request(2.0, 8, 2, False), many.Request(3.0, 8, 2, True), many.Request(4.0, 8, 3, True)]
        found = many.values([served(came, (1.5, 1.55, 2), (13.0, 13.05, 2), (3.1, 3.9, 2), (None, None, 0))], 20.0)
        self.assertEqual((found["attainment"], found["requests"]), (0.25, 4.0))
        self.assertEqual(found["ttft_p99_ms"], 16_000.0, "it has waited until the end")
        self.assertAlmostEqual(found["first_p50_ms"], 500.0)

    def test_run_without_tokens_fails(self) -> None:
        with self.assertRaises(BenchError):
            many.values([served([many.Request(1.0, 8, 2, True)], (None, None, 0))], 20.0)

    def test_rounds_count_together(self) -> None:
        one, two = (served([many.Request(1.0, 8, 2, True)], (first, first + 0.05, 2)) for first in (1.5, 1.1))
        found = many.values([one, two, two], 20.0)
        self.assertEqual((found["requests"], round(found["goodput_per_s"], 6), round(found["first_p50_ms"])), (3.0, 0.05, 100))

    def test_sleeping_engines_take_room_too(self) -> None:
        gib = 1 << 30
        self.assertEqual(many.fits(79 * gib, 18 * gib, 2 * gib, 8), 3)
        self.assertEqual(many.fits(79 * gib, 18 * gib, 2 * gib, 2), 2)
        self.assertEqual(many.fits(16 * gib, 18 * gib, 2 * gib, 8), 0)


class Fake:
    """A worker whose engine has 18 GiB, and 2 GiB while it sleeps."""

    used, most, starts = 0, 0, list[int]()

    def __init__(self, name: str, arguments: Any, mode: Any, _klass: str, _program: Any) -> None:
        self.name, self.log, self.asleep, self.answers = name, mode.logs / f"{name}.log", False, [{"ready": True}]
        self.lines, self.process = SimpleNamespace(empty=lambda: False), SimpleNamespace(poll=lambda: None)
        Fake.used += 18 << 30
        Fake.most = max(Fake.most, Fake.used)
        Fake.starts.append(Fake.used >> 30)

    def send(self, **order: Any) -> None:
        if order.get("sleep"):
            Fake.used -= 16 << 30
            self.answers.append({})
            return
        at = [it[0] for it in order["requests"]]
        self.answers.append({"first_s": [it + 0.1 for it in at], "last_s": [it + 0.4 for it in at], "tokens": [it[2] for it in order["requests"]]})

    def reply(self, _timeout: float) -> Any:
        return self.answers.pop(0)

    def close(self) -> None:
        Fake.used = 0


class Runs(unittest.TestCase):
    def test_every_cell_has_a_row_and_sleeping_engines_fit_from_the_start(self) -> None:
        Fake.most, Fake.starts = 0, []
        nvml = SimpleNamespace(memory=lambda: SimpleNamespace(used=Fake.used, total=79 << 30))
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            trace = Path(folder) / "trace.csv"
            trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,480,10\n")
            for of, name, value in ((engines, "Worker", Fake), (many, "Gpumux", common.Mode), (many, "Nvml", lambda: nvml)):
                stack.enter_context(mock.patch.object(of, name, value))
            stack.enter_context(mock.patch.object(common, "say"))
            stack.enter_context(mock.patch("signal.signal"))
            arguments = ["--trace", str(trace), "--cells", "1/stock,8/sleep,8/gpumux", "--out", folder, "--logs", f"{folder}/logs"]
            stack.enter_context(mock.patch.object(sys, "argv", ["many.py", *arguments]))
            stack.enter_context(mock.patch.dict("os.environ"))
            self.assertEqual(many.main(), 0)
            (file,) = Path(folder).glob("many-*.json")
            data = json.loads(file.read_text())["rows"]
        rows = {(it["case"], it["mode"]): it["values"] for it in data}
        self.assertEqual([*rows], [("1", "stock"), ("8", "sleep"), ("8", "gpumux")])
        self.assertEqual((rows["8", "sleep"]["awake"], {it["attainment"] for it in rows.values()}), (3.0, {1.0}))
        self.assertEqual(({it["rounds"] for it in rows.values()}, data[1]["interval"]["attainment"]), ({5.0}, [1.0, 1.0]))
        self.assertEqual(max(Fake.starts[1:9]), 3 * 18 + 4 * 2, "of those that sleep, the first shows how many fit; then three start at a time")

    def test_cells_are_checked(self) -> None:
        for text in ("8/other", "8", "0/stock"):
            with self.assertRaises((argparse.ArgumentTypeError, ValueError)):
                many.cells(text)


class Places(unittest.TestCase):
    def setUp(self) -> None:
        self.places = rooms.Places(2)

    def hear(self, *letters: tuple[int, str]) -> list[tuple[int, str]]:
        return [it for at, (engine, letter) in enumerate(letters) for it in self.places.heard(engine, letter, float(at))]

    def test_engine_that_was_idle_for_longest_makes_room(self) -> None:
        self.assertEqual(self.hear((0, "w"), (1, "w")), [(0, "g"), (1, "g")])
        self.assertEqual(self.hear((0, "b"), (1, "b"), (1, "i"), (2, "w")), [(1, "z")])
        self.assertEqual(self.hear((1, "s")), [(2, "g")])

    def test_busy_engines_make_room_too_the_first_one_first(self) -> None:
        self.assertEqual(self.hear((0, "w"), (1, "w"), (0, "b"), (1, "b"), (2, "w"), (3, "w")), [(0, "g"), (1, "g"), (0, "z"), (1, "z")])
        self.assertEqual(self.hear((1, "s"), (1, "w")), [(2, "g"), (2, "z")])

    def test_engine_that_ends_leaves_its_place(self) -> None:
        self.assertEqual(self.hear((0, "w"), (1, "w"), (2, "w"), (3, "w")), [(0, "g"), (1, "g"), (0, "z"), (1, "z")])
        self.assertEqual(self.hear((2, "e"), (0, "e")), [(3, "g")])

    def test_never_more_are_awake_than_may_be(self) -> None:
        import random

        rng, state = random.Random(3), dict.fromkeys(range(6), "asleep")
        for at in range(5000):
            engine = rng.randrange(6)
            letter = {"asleep": "w", "awake": rng.choice("bi"), "asked": "s"}.get(state[engine])
            if not letter:
                continue
            state[engine] = {"w": "waiting", "s": "asleep"}.get(letter, state[engine])
            for other, told in self.places.heard(engine, letter, float(at)):
                self.assertEqual(state[other], "waiting" if told == "g" else "awake")
                state[other] = "awake" if told == "g" else "asked"
            self.assertLessEqual(sum(it in ("awake", "asked") for it in state.values()), 2)
            self.assertFalse("waiting" in state.values() and "asked" not in state.values(), "no engine makes room")


class Engine:
    """Makes one token of each request a step."""

    def __init__(self) -> None:
        self.open, self.slept, self.dropped = dict[str, int](), list[str](), set[str]()

    def add(self, name: str, _prompt: Any, output: int) -> None:
        assert self.slept[-1:] != ["sleep"], "it sleeps"
        self.open[name] = output

    def busy(self) -> bool:
        return bool(self.open)

    def step(self) -> list[tuple[str, int]]:
        self.open = {name: left - 1 for name, left in self.open.items() if left > 1}
        return [("one", 1)]

    def drop(self, names: set[str]) -> None:
        self.dropped |= names

    def sleep(self) -> None:
        assert not self.open
        self.slept.append("sleep")

    def wake(self) -> None:
        self.slept.append("wake")


class Sleepers(unittest.TestCase):
    def setUp(self) -> None:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = Path(folder) / "room"
        server = self.enterContext(socket.socket(socket.AF_UNIX))
        server.bind(str(path))
        server.listen()
        self.engine = Engine()
        self.sleeper = rooms.Sleeper(self.engine, str(path))
        self.addCleanup(self.sleeper.socket.close)
        self.room = self.enterContext(server.accept()[0])
        self.sleeper.rest()

    def test_request_waits_until_the_engine_may_wake_up(self) -> None:
        self.sleeper.add("a", [], 2)
        self.assertEqual(self.sleeper.step(), [])
        self.assertEqual(self.room.recv(8), b"w")
        self.room.sendall(b"g")
        self.assertEqual((self.sleeper.step(), self.engine.slept), ([("one", 1)], ["sleep", "wake"]))
        self.sleeper.step()
        self.assertEqual((self.room.recv(8), self.sleeper.busy()), (b"bi", False))

    def test_engine_that_shall_sleep_ends_its_requests_first(self) -> None:
        self.test_request_waits_until_the_engine_may_wake_up()
        self.sleeper.add("b", [], 2)
        self.sleeper.step()
        self.room.sendall(b"z")
        self.sleeper.add("c", [], 2)
        self.sleeper.step()
        self.assertEqual((self.engine.slept, self.room.recv(8)), (["sleep", "wake", "sleep"], b"bs"))
        self.assertTrue(self.sleeper.busy())
        self.sleeper.drop(["b", "c"])
        self.assertEqual((self.sleeper.busy(), self.engine.dropped), (False, {"b"}))

    def test_engine_that_shall_wake_and_sleep_at_once_serves_what_waited(self) -> None:
        self.sleeper.add("a", [], 2)
        self.sleeper.step()
        self.room.sendall(b"gz")
        self.sleeper.step()
        self.assertEqual((self.engine.slept, self.sleeper.busy()), (["sleep", "wake"], True))
        self.sleeper.step()
        self.assertEqual((self.room.recv(8), self.engine.slept[-1], self.sleeper.busy()), (b"wbs", "sleep", False))

    def test_idle_engine_sleeps_when_it_shall(self) -> None:
        self.test_request_waits_until_the_engine_may_wake_up()
        self.room.sendall(b"z")
        self.sleeper.wait(5.0)
        self.assertEqual((self.engine.slept[-1], self.room.recv(8)), ("sleep", b"s"))

    def test_engine_that_ends_with_something_unread_leaves_its_place(self) -> None:
        with tempfile.TemporaryDirectory() as folder, rooms.Room(Path(folder) / "room") as room:
            one, other = (self.enterContext(socket.socket(socket.AF_UNIX)) for _ in range(2))
            room.allow(1)
            for engine in (one, other):
                engine.settimeout(60)
                engine.connect(str(room.path))
            one.sendall(b"w")
            self.assertEqual(one.recv(1), b"g")
            other.sendall(b"w")
            select.select([one], [], [], 60)
            one.close()
            self.assertEqual(other.recv(1), b"g")

    def test_room_and_engines_talk(self) -> None:
        with tempfile.TemporaryDirectory() as folder, rooms.Room(Path(folder) / "room") as room:
            engines = [rooms.Sleeper(Engine(), str(room.path)) for _ in range(3)]
            for number, one in enumerate(engines):
                one.rest()
                one.add(f"request-{number}", [], 3)
            room.allow(1)
            for _ in range(5000):
                for one in engines:
                    if one.busy():
                        one.step()
                    else:
                        one.wait(0.0)
                if not any(one.busy() for one in engines):
                    break
            self.assertFalse(any(one.busy() for one in engines))
            for one in engines:
                one.socket.close()
