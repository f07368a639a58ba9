"""Free blocks of an engine's KV cache, with memory of an elastic range behind those that a step may use.

An engine allocates blocks in steps. `begin` holds memory for a step: others take nothing of what is held. Only blocks of held granules are
free during the step, so a request for them never fails. `end` leaves granules without a block in use to others, once the device has done the
work that used them.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import time
from typing import Any, Callable, Iterable, Sequence

from gpumux import kv

MIB = 1 << 20
_GRANULE_MAX = 64 * MIB
_GRANULE = 16 * MIB
"""About so much is a granule: what one costs hardly depends on its size."""
_SHORT_S, _AGAIN_S = 0.005, 0.1
"""How long memory is awaited that is of use, but not needed; and for how long there is no longer wait after a refusal."""


def layout(block_bytes: int) -> tuple[int, int] | None:
    """The distance between blocks and the size of a granule, such that no block lies in two granules; None for a block that is too large."""
    best = None
    for count in (1, 2, 4, 8, 16, 32):
        unit = 2 * MIB // count
        stride = math.ceil(block_bytes / unit) * unit
        granule = stride * 2 * MIB // math.gcd(stride, 2 * MIB)
        if granule <= _GRANULE_MAX and (best is None or stride < best[0]):
            best = stride, granule * max(1, _GRANULE // granule)
    return best


class _Heap:
    """Numbers, each once, of which the lowest is the first."""

    def __init__(self, most: int) -> None:
        self.numbers: list[int] = []
        self._there = bytearray(most)

    def push(self, number: int) -> None:
        if not self._there[number]:
            self._there[number] = True
            heapq.heappush(self.numbers, number)

    def pop(self) -> int:
        number = heapq.heappop(self.numbers)
        self._there[number] = False
        return number


class Blocks:
    """A list of free blocks with the interface of vLLM's `FreeKVCacheBlockQueue`.

    `memory` is an elastic range as in gpumux.kv; `stride` the distance of blocks in it. `blocks` are all of the engine's, by number, `free` those that
    are free. `evict` gets the numbers of blocks whose contents are gone. `fence` returns something with `query()` and `synchronize()`: whether the
    work that the device was given before is done. `clear` sets granules to zero: their first, and how many.
    """

    def __init__(
        self,
        memory: Any,
        stride: int,
        blocks: Sequence[Any],
        free: Iterable[Any],
        evict: Callable[[set[int]], object],
        fence: Callable[[], Any],
        clear: Callable[[int, int], object],
        pinned: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory, self._blocks = memory, blocks
        self._per: int = memory.granule // stride
        self._evict, self._fence, self._clear, self._clock = evict, fence, clear, clock
        granules = math.ceil(len(blocks) / self._per)
        # Of each granule: blocks that are not free; free ones without contents, the lowest last; free ones with contents.
        self._used = [0] * granules
        self._plain: list[list[int]] = [[] for _ in range(granules)]
        self._filled: list[set[int]] = [set() for _ in range(granules)]
        # Free blocks with contents, the oldest first.
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()
        # Of each granule: whether it is held, so that others take nothing of it.
        self._held = bytearray(granules)
        # Held granules that may have free blocks without contents, and those left to others; without memory. The lowest first.
        self._open, self._left, self._out = _Heap(granules), _Heap(granules), _Heap(granules)
        self._idle: set[int] = set()  # held, without a block in use
        self._recent: set[int] = set()  # blocks were freed since the last fence
        self._fenced: tuple[Any, set[int]] | None = None
        self._free = self._available = self._available_cached = 0
        self._in_step, self._again = False, 0.0
        self.refused = 0
        """How often there was no memory."""
        is_free = bytearray(len(blocks))
        for block in free:
            is_free[block.block_id] = True
            self._free += 1
        for number in reversed(range(len(blocks))):
            if is_free[number]:
                self._plain[number // self._per].append(number)
            else:
                self._used[number // self._per] += 1
        for granule in pinned:
            self._used[granule] += 1
        for granule in [it for it, used in enumerate(self._used) if used]:
            if memory.commit(granule, 1, 10.0):
                raise kv.PoolError(f"no memory for granule {granule} of the KV cache, which must always be there")
            self._hold(granule)
        for granule in range(granules):
            if not self._held[granule]:
                self._out.push(granule)

    # ---- a step ------------------------------------------------------------------------------

    def begin(self, need: int, more: int = 0, lookup: bool = False, wait_s: float = 0.05) -> None:
        """A step begins, for which `need` new blocks are awaited for `wait_s`, and which can use `more`. With `lookup` it may find cached blocks."""
        self._in_step = True
        if lookup:
            self._take_back([it for it, own in enumerate(self._filled) if own and not self._held[it]])
        # The wait is long only for what the engine can't do without: where its own cache would do, and after a refusal, it is short.
        enough = len(self._cached) >= self._lacks(need)
        self._grow(need, _SHORT_S if enough or self._clock() < self._again else wait_s)
        if more and self._clock() >= self._again:
            self._grow(need + more, _SHORT_S)

    def end(self, idle: bool = False) -> None:
        """It has been planned, or is over. With `idle` the device has no more work of the engine, and work under way is awaited."""
        self._in_step = False
        if idle and (self._recent or self._fenced):
            self._fence().synchronize()
            self._recent, self._fenced = set(), None
        # One fence at a time: what is freed while it is open waits for the next.
        while self._fenced or self._recent:
            if not self._fenced:
                self._fenced, self._recent = (self._fence(), self._recent), set()
            if not self._fenced[0].query():
                break
            self._fenced = None
        under_way = self._fenced[1] if self._fenced else ()
        leaving = sorted(it for it in self._idle if it not in self._recent and it not in under_way)
        for state, own in ((kv.FREE, [it for it in leaving if not self._filled[it]]), (kv.CACHED, [it for it in leaving if self._filled[it]])):
            for first, count in kv._runs(own):
                self.memory.mark(first, count, state)
        for granule in leaving:
            self._leave(granule)

    # ---- vLLM's list of free blocks ----------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """During a step, what it may have; else all that are not in use."""
        return self._available if self._in_step else self._free

    @property
    def usage(self) -> float:
        """Part of the blocks that are in use, or not to be had while others lack memory; the first is vLLM's own, which is never free."""
        room: int = min(len(self._blocks), self.memory.target() // self.memory.granule * self._per)
        used = len(self._blocks) - self._free
        return 1 - max(0, min(self._free, room - used)) / (len(self._blocks) - 1)

    def popleft(self) -> Any:
        """One block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, count: int) -> list[Any]:
        """So many blocks: without contents if possible, at the lowest addresses; else the oldest with contents."""
        if count > self._available:
            raise ValueError(f"{count} blocks are wanted, {self._available} have memory")
        numbers: list[int] = []
        while self._open.numbers and len(numbers) < count:
            granule = self._open.pop()
            plain = self._plain[granule]
            while self._held[granule] and plain and len(numbers) < count:
                numbers.append(plain.pop())
                self._enter(granule)
            if self._held[granule] and plain:
                self._open.push(granule)
        if len(numbers) < count:
            old = (it for it in self._cached if self._held[it // self._per])
            for number in list(itertools.islice(old, count - len(numbers))):
                self._forget(number)
                self._enter(number // self._per)
                numbers.append(number)
        return [self._blocks[it] for it in numbers]

    def remove(self, block: Any) -> None:
        """A cached block is in use again."""
        granule = block.block_id // self._per
        if not self._held[granule]:
            raise RuntimeError(f"block {block.block_id} is looked up outside of a step that may do so")
        if block.block_id in self._cached:
            self._forget(block.block_id)
        else:
            self._plain[granule].remove(block.block_id)
        self._enter(granule)

    def append(self, block: Any) -> None:
        """A block is free; its contents may be found again if it has a hash."""
        number, granule = block.block_id, block.block_id // self._per
        if block.block_hash is None:
            self._plain[granule].append(number)
            self._open.push(granule)
        else:
            self._cached[number] = None
            self._filled[granule].add(number)
            self._available_cached += 1
        self._free += 1
        self._available += 1
        self._recent.add(granule)
        self._used[granule] -= 1
        if not self._used[granule]:
            self._idle.add(granule)

    def append_n(self, blocks: Iterable[Any]) -> None:
        """Several, the least valuable first."""
        for block in blocks:
            self.append(block)

    prepend_n = append_n

    def get_all_free_blocks(self) -> list[Any]:
        """All that are not in use."""
        return [self._blocks[number] for own in self._plain for number in own] + [self._blocks[number] for number in self._cached]

    # ---- inside ------------------------------------------------------------------------------

    def _enter(self, granule: int) -> None:
        """A free block of it is in use."""
        self._free -= 1
        self._available -= 1
        self._used[granule] += 1
        self._idle.discard(granule)

    def _forget(self, number: int) -> None:
        """A block of a held granule is not cached any more."""
        del self._cached[number]
        self._filled[number // self._per].discard(number)
        self._available_cached -= 1

    def _hold(self, granule: int) -> None:
        """Others take nothing of it from now on."""
        self._held[granule] = True
        self._available += len(self._plain[granule]) + len(self._filled[granule])
        self._available_cached += len(self._filled[granule])
        if self._plain[granule]:
            self._open.push(granule)
        if not self._used[granule]:
            self._idle.add(granule)

    def _leave(self, granule: int) -> None:
        """Others may take it."""
        self._held[granule] = False
        self._idle.discard(granule)
        self._available -= len(self._plain[granule]) + len(self._filled[granule])
        self._available_cached -= len(self._filled[granule])
        self._left.push(granule)

    def _drop(self, granules: Iterable[int]) -> None:
        """Contents of granules that are not held are gone."""
        gone = {number for it in granules for number in self._filled[it]}
        for number in gone:
            del self._cached[number]
            self._filled[number // self._per].discard(number)
            self._plain[number // self._per].append(number)
        if gone:
            self._evict(gone)

    def _take_back(self, granules: Sequence[int]) -> None:
        """Holds granules that were left to others, as far as they are still there."""
        lost = []
        for first, count in kv._runs(granules):
            if not self.memory.mark(first, count, kv.IN_USE):
                for granule in range(first, first + count):
                    self._hold(granule)
                continue
            for granule in range(first, first + count):
                if self.memory.mark(granule, 1, kv.IN_USE):
                    lost.append(granule)
                else:
                    self._hold(granule)
        self._drop(lost)

    def _grow(self, need: int, wait_s: float) -> None:
        """Holds more granules: those left to others that are still there, then ones that get memory, then ones with a cache."""
        aside = []
        while self._lacks(need) > 0 and self._left.numbers:
            granule = self._left.pop()
            if self._held[granule]:
                continue
            if not self._plain[granule]:
                aside.append(granule)
                continue
            self._take_back([granule])
            if not self._held[granule]:
                self._out.push(granule)
        # Others may have taken some with a cache only: these can get memory, too. To ask takes long with ranks.
        if (few := math.ceil(self._lacks(need) / self._per) - len(self._out.numbers)) > 0 and aside:
            there = set(self.memory.there(aside))
            lost = [it for it in aside if it not in there][:few]
            aside = sorted(set(aside).difference(lost))
            self._take_back(lost)
            for granule in lost:
                if not self._held[granule]:
                    self._out.push(granule)
        if (lacks := self._lacks(need)) > 0 and self._out.numbers and not self._commit(math.ceil(lacks / self._per), wait_s):
            self.refused += 1
            self._again = self._clock() + _AGAIN_S
        for granule in aside:
            if self._available < need and not self._held[granule]:
                self._take_back([granule])
            if not self._held[granule]:
                self._left.push(granule)

    def _lacks(self, need: int) -> int:
        return need - (self._available - self._available_cached)

    def _commit(self, count: int, wait_s: float) -> bool:
        """Gets memory for so many granules, as far as there are so many, or for less; whether it was all."""
        count, deadline = min(count, len(self._out.numbers)), self._clock() + wait_s
        wanted, had = count, 0
        while count:
            own = [self._out.pop() for _ in range(count)]
            done = 0
            for first, run in kv._runs(own):
                if self.memory.commit(first, run, deadline - self._clock()):
                    break
                self._clear(first, run)
                for granule in range(first, first + run):
                    self._hold(granule)
                done += run
            for granule in own[done:]:
                self._out.push(granule)
            had += done
            # After a refusal: half as many, as often as there are some.
            count = count // 2 if not done else min(count, wanted - had)
        return had == wanted
