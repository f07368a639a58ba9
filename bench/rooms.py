"""Which engines with vLLM's sleep mode are awake (many.py): the benchmark's side, `Room`, and the engine's, `Sleeper`. They talk by single letters over a socket.

All engines sleep at first. One says `w` when it sleeps and has requests, `b` and `i` when it begins to have requests and has none any more, and `s` when it sleeps again.
`e` stands for its end.
It receives `g` (wake up) and `z` (sleep when your requests are done; those that come meanwhile wait).
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class Places:
    """The decisions: which engine may wake up, and which shall sleep. Time is given, and messages are returned."""

    def __init__(self, most: int = 0) -> None:
        self.most, self.waiting = most, list[int]()
        self.awake, self.asked = dict[int, float](), set[int]()
        self.idle = dict[int, float]()  # since when, of those that are awake

    def heard(self, engine: int, letter: str, now: float) -> list[tuple[int, str]]:
        """An engine said this."""
        if letter == "w" and engine not in self.waiting:
            self.waiting.append(engine)
        elif letter == "b":
            self.idle.pop(engine, None)
        elif letter == "i" and engine in self.awake:
            self.idle[engine] = now
        elif letter in "se":
            if engine in self.waiting:
                self.waiting.remove(engine)
            for state in (self.awake, self.idle):
                state.pop(engine, None)
            self.asked.discard(engine)
        return self.next(now)

    def next(self, now: float) -> list[tuple[int, str]]:
        """What is to be said to whom."""
        said = []
        while self.waiting and len(self.awake) < self.most:
            engine = self.waiting.pop(0)
            self.awake[engine] = now
            said.append((engine, "g"))
        while len(self.asked) < len(self.waiting) and (others := [it for it in self.awake if it not in self.asked]):
            engine = min(others, key=lambda it: (it not in self.idle, self.idle.get(it, self.awake[it])))
            self.asked.add(engine)
            said.append((engine, "z"))
        return said


class Room:
    """Listens to engines until the block ends."""

    def __init__(self, path: Path) -> None:
        self.path, self.places, self.lock, self.open = path, Places(), threading.Lock(), True

    def __enter__(self) -> Room:
        self.path.unlink(missing_ok=True)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(self.path))
        self.server.listen()
        self.engines: list[socket.socket] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False
        self.thread.join()
        for one in [self.server, *self.engines]:
            one.close()

    def allow(self, most: int) -> None:
        """So many may be awake."""
        with self.lock:
            self.places.most = most
            self._say(self.places.next(time.monotonic()))

    def _heard(self, engine: int, letter: str) -> None:
        with self.lock:
            self._say(self.places.heard(engine, letter, time.monotonic()))

    def _say(self, said: Sequence[tuple[int, str]]) -> None:
        for engine, letter in said:
            with contextlib.suppress(OSError):  # it has ended
                self.engines[engine].sendall(letter.encode())

    def _run(self) -> None:
        with selectors.DefaultSelector() as waits:
            waits.register(self.server, selectors.EVENT_READ)
            while self.open:
                for key, _ in waits.select(0.1):
                    if key.fileobj is self.server:
                        self.engines.append(self.server.accept()[0])
                        waits.register(self.engines[-1], selectors.EVENT_READ, len(self.engines) - 1)
                        continue
                    found = ""
                    with contextlib.suppress(OSError):  # it ended before it read what it was sent
                        found = self.engines[key.data].recv(64).decode()
                    if not found:
                        waits.unregister(key.fileobj)
                    for letter in found or "e":
                        self._heard(key.data, letter)


class Sleeper:
    """An engine that sleeps and wakes up by notice: what serve_worker.py takes for one. `wait` takes the place of a pause."""

    def __init__(self, engine: Any, path: str) -> None:
        self.engine, self.backlog = engine, list[tuple[Any, ...]]()
        self.state, self.asked, self.idle = "awake", False, True
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def add(self, *request: Any) -> None:
        """A request, which waits while the engine sleeps or shall sleep."""
        self.backlog.append(request)

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.backlog) or self.engine.busy()

    def drop(self, names: Iterable[str]) -> None:
        """Forgets requests."""
        gone = set(names)
        waited = {it[0] for it in self.backlog}
        self.backlog = [it for it in self.backlog if it[0] not in gone]
        self.engine.drop(gone - waited)

    def step(self) -> list[tuple[str, int]]:
        """One step of the engine, if it may have one."""
        self.wait(0.0)
        if self.state == "asleep":
            self.state = "waiting"
            self.socket.sendall(b"w")
        if self.state == "waiting":
            self.wait(0.02)
        if self.state != "awake":
            return []
        if not self.asked:
            self._begin()
        moved = self.engine.step() if self.engine.busy() else []
        if not self.engine.busy():
            if self.asked:
                self._leave()
            elif not self.idle:
                self.idle = True
                self.socket.sendall(b"i")
        return moved

    def wait(self, seconds: float) -> None:
        """For so long, or until there is notice."""
        if not select.select([self.socket], [], [], max(0.0, seconds))[0]:
            return
        for letter in self.socket.recv(64).decode():
            if letter == "g":
                self.engine.wake()
                self.state, self.idle = "awake", True
                self._begin()  # the letter that it shall sleep again may be the next
            elif letter == "z":
                self.asked = True
        if self.asked and self.state == "awake" and not self.engine.busy():
            self._leave()

    def rest(self) -> None:
        """Sleeps at once, as all engines do at first."""
        self.engine.sleep()
        self.state = "asleep"

    def _begin(self) -> None:
        """The engine has the requests that waited."""
        if self.backlog and self.idle:
            self.idle = False
            self.socket.sendall(b"b")
        for request in self.backlog:
            self.engine.add(*request)
        self.backlog.clear()

    def _leave(self) -> None:
        self.rest()
        self.asked = False
        self.socket.sendall(b"s")
