"""The elastic ranges of an engine's ranks as one: what one rank has not, none has.

The process that plans the engine's steps orders, and a thread of each rank carries out. The daemon grants memory to all ranks together or to
none (`gpumux_commit_part`). What a rank's driver refuses then, what others have taken of one rank, and what a rank does not answer in time,
the others give back. Orders to a rank are carried out one after the other: one that is late is followed by the order that undoes it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Callable, Sequence

from gpumux import kv

logger = logging.getLogger("gpumux.ranks")
LATE_S = 2.0
"""So much longer than it may take an answer is awaited."""
_MARK_S = 10.0
"""So long is awaited that memory is back which is used again, and that a device has set new memory to zero."""


class Rank:
    """A rank's range. `clear` sets new granules to zero, before the next step uses them: their first, and how many."""

    def __init__(self, memory: Any, clear: Callable[[int, int], object]) -> None:
        self.memory, self._clear = memory, clear

    def listen(self, key: bytes) -> str:
        """Carries out the orders of the first that connects to this address with the key, in a thread of its own."""
        listener = Listener(family="AF_UNIX", authkey=key)
        threading.Thread(target=self._serve, args=(listener,), name="gpumux-rank", daemon=True).start()
        return str(listener.address)

    def _serve(self, listener: Listener) -> None:
        try:
            with listener, listener.accept() as connection:
                while True:
                    number, name, arguments = connection.recv()
                    try:
                        answer = getattr(self, name)(*arguments)
                    except Exception:
                        logger.exception("gpumux: a rank could not carry out %s%s", name, arguments)
                        answer = None
                    if number:
                        connection.send((number, answer, self.memory.target()))
        except (EOFError, OSError):
            pass  # The engine ends.

    def commit(self, first: int, count: int, wait_s: float, part: tuple[int, int]) -> int:
        return int(self.memory.commit(first, count, wait_s, part))

    def clear(self, first: int, count: int) -> int:
        self._clear(first, count)
        return kv._DONE

    def give(self, first: int, count: int) -> None:
        # During a capture memory cannot be unmapped: others may take it then.
        if self.memory.decommit(first, count) != kv._DONE:
            self.memory.mark(first, count, kv.FREE)

    def mark(self, first: int, count: int, state: int) -> int:
        return int(self.memory.mark(first, count, state))

    def there(self, granules: Sequence[int]) -> list[int]:
        return list(self.memory.there(granules))


class Ranks:
    """What `gpumux._blocks` needs of an elastic range, for the ranges of all ranks. A rank that has ended, or does not answer, has nothing."""

    kind = "elastic"

    def __init__(self, addresses: Sequence[str], key: bytes, granule: int) -> None:
        self.granule = granule
        self._all: list[Connection] = [Client(it, "AF_UNIX", authkey=key) for it in addresses]
        self._targets = [1 << 62] * len(addresses)
        self._number = 0
        # No other engine of the tenant has these names for its requests.
        self._name = int.from_bytes(os.urandom(7), "little")

    def commit(self, first: int, count: int, wait_s: float) -> int:
        """Gets memory for granules in all ranks, or in none."""
        self._name += 1
        answers = self._ask(wait_s, "commit", first, count, wait_s, (self._name, len(self._all)))
        if all(it == kv._DONE for it in answers):
            # Only now: memory that a device still sets to zero must not be given back.
            if all(it == kv._DONE for it in self._ask(_MARK_S, "clear", first, count)):
                return kv._DONE
            self._tell("mark", first, count, kv.FREE)
            return kv._NOT_YET
        self._tell("give", first, count)
        return next(kv._NOT_YET if it is None else int(it) for it in answers if it != kv._DONE)

    def mark(self, first: int, count: int, state: int) -> int:
        """Sets a state. In use are granules that no rank has lost: how many one has lost, at most."""
        if state != kv.IN_USE:
            self._tell("mark", first, count, state)
            return 0
        answers = self._ask(_MARK_S, "mark", first, count, state)
        lost = max(count if it is None else abs(it) for it in answers)
        if lost:
            self._tell("mark", first, count, kv.FREE)
        return lost

    def there(self, granules: Sequence[int]) -> list[int]:
        """Those that have memory in all ranks."""
        answers = self._ask(0.0, "there", list(granules))
        return sorted(set(granules).intersection(*(it or () for it in answers)))

    def target(self) -> int:
        """What the rank with the least should keep, when it was last asked for something."""
        return min(self._targets)

    def _send(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        for connection in self._all:
            try:
                connection.send((number, name, arguments))
            except OSError:
                pass  # It has ended, and so does the engine.

    def _tell(self, name: str, *arguments: Any) -> None:
        """An order without an answer."""
        self._send(0, name, arguments)

    def _ask(self, wait_s: float, name: str, *arguments: Any) -> list[Any]:
        """The answer of each rank: None of one that has ended, that fails, or that has none in time."""
        self._number += 1
        self._send(self._number, name, arguments)
        deadline = time.monotonic() + wait_s + LATE_S
        return [self._answer(rank, deadline) for rank in range(len(self._all))]

    def _answer(self, rank: int, deadline: float) -> Any:
        connection = self._all[rank]
        try:
            while connection.poll(max(0.0, deadline - time.monotonic())):
                number, answer, self._targets[rank] = connection.recv()
                # An earlier one was late.
                if number == self._number:
                    return answer
        except (EOFError, OSError):
            pass
        return None
