"""Free pages of an engine whose layers each have buffers of their own, and whose prefix cache keeps its pages until the engine evicts them."""

from __future__ import annotations

import time
from typing import Any, Callable, Iterable

from gpumux import kv
from gpumux._blocks import Blocks


class Spread:
    """A range of equal buffers, of which the same granule of each is one: memory is behind all of them, or the pages there can't be used."""

    def __init__(self, memory: Any, buffers: int) -> None:
        self.memory, self.granule = memory, memory.granule
        self.each = len(memory.words) // buffers
        self._buffers = [buffer * self.each for buffer in range(buffers)]

    def there(self, granules: Iterable[int]) -> list[int]:
        """Those that have memory in all buffers."""
        return [it for it in granules if len(self.memory.there([buffer + it for buffer in self._buffers])) == len(self._buffers)]

    def commit(self, first: int, count: int, wait_s: float) -> int:
        deadline = time.monotonic() + wait_s
        for buffer in self._buffers:
            if answer := self.memory.commit(buffer + first, count, deadline - time.monotonic()):
                for done in range(0, buffer, self.each):
                    self.memory.mark(done + first, count, kv.FREE)
                return int(answer)
        return 0

    def mark(self, first: int, count: int, state: int) -> int:
        """How many have lost memory of a buffer. One that has is left to others."""
        lost: int = sum(self.memory.mark(buffer + first, count, state) for buffer in self._buffers)
        if lost and state == kv.IN_USE and count == 1:
            self.mark(first, 1, kv.FREE)
        return lost

    def target(self) -> int:
        return int(self.memory.target()) // len(self._buffers)


class Page:
    """Its contents are never found again by its number: the engine's own prefix cache does that."""

    __slots__ = ("block_id",)
    block_hash = None

    def __init__(self, number: int) -> None:
        self.block_id = number


class Slots(Blocks):
    """Pages by number, of which the first is never free. While the engine rests, others may have the memory of all of them."""

    def __init__(self, memory: Any, stride: int, pages: int, fence: Callable[[], Any], clear: Callable[[int, int], object]) -> None:
        every = [Page(number) for number in range(pages)]
        super().__init__(memory, stride, every, every[1:], lambda _gone: None, fence, clear, pinned=[0])
        self._resting: list[int] | None = None

    def take(self, count: int) -> list[int] | None:
        """So many, if the step may have them."""
        return [it.block_id for it in self.popleft_n(count)] if count <= self._available else None

    def give(self, pages: Iterable[int]) -> None:
        """They are free."""
        self.append_n(self._blocks[it] for it in pages)

    def give_all(self) -> None:
        """All are."""
        free = {number for own in self._plain for number in own}
        self.give(number for number in range(1, len(self._blocks)) if number not in free)

    def granule_of(self, page: int) -> int:
        return page // self._per

    def rest(self, cached: bool) -> None:
        """The device has no work of the engine. With `cached`, what is in use can be made anew."""
        if self._resting is None:
            self.end(idle=True)
            self._resting = [it for it in range(1, len(self._used)) if self._used[it]] if cached else []
            for first, count in kv._runs(self._resting):
                self.memory.mark(first, count, kv.CACHED)

    def back(self) -> set[int]:
        """It goes on. The granules whose contents are gone: their pages must be freed, and then be said to be lost."""
        resting, self._resting = self._resting or [], None
        lost: set[int] = set()
        for first, count in kv._runs(resting):
            if self.memory.mark(first, count, kv.IN_USE):
                lost.update(it for it in range(first, first + count) if self.memory.mark(it, 1, kv.IN_USE))
        return lost

    def lose(self, granules: Iterable[int]) -> None:
        for granule in granules:
            if self._used[granule]:
                raise RuntimeError(f"granule {granule} of the KV cache has lost its memory, and pages in it are in use")
            self._leave(granule)
