"""Tests of the free pages of an engine with a buffer for each layer, with a range that loses granules."""

from __future__ import annotations

import ctypes
import random
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_blocks import Device, Range  # noqa: E402

from gpumux import kv  # noqa: E402
from gpumux._slots import Slots, Spread  # noqa: E402

MIB = 1 << 20
BUFFERS, GRANULES, PER = 4, 8, 16


class Made:
    """So many pages in granules of 16, in four buffers."""

    def __init__(self) -> None:
        self.range, self.device = Range(0, BUFFERS * GRANULES * 2 * MIB, 2 * MIB), Device()
        self.cleared: list = []
        self.slots = Slots(Spread(self.range, BUFFERS), 2 * MIB // PER, GRANULES * PER, self.device.fence, lambda *it: self.cleared.append(it))

    def state(self, granule: int) -> set:
        return {self.range.state(buffer * GRANULES + granule) for buffer in range(BUFFERS)}

    def step(self, count: int) -> list | None:
        self.slots.begin(count, 0, wait_s=0.0)
        found = self.slots.take(count)
        self.slots.end()
        return found


class Slot(unittest.TestCase):
    def test_page_has_memory_in_all_buffers(self) -> None:
        made = Made()
        self.assertEqual(made.step(20), [*range(1, 16), *range(16, 21)])
        self.assertEqual([made.state(it) for it in range(3)], [{kv.IN_USE}, {kv.IN_USE}, {kv.OUT}])
        self.assertEqual(made.cleared, [(1, 1)])

    def test_memory_of_a_part_of_the_buffers_is_given_back(self) -> None:
        made = Made()
        made.range.room = BUFFERS + 2  # Two buffers of another granule.
        self.assertIsNone(made.step(20))
        self.assertEqual(sum(made.range.state(it) == kv.FREE for it in range(BUFFERS * GRANULES)), 2)
        self.assertEqual(len(made.step(15)), 15)

    def test_each_of_many_buffers_is_awaited(self) -> None:
        memory, now, waits = object.__new__(kv._Elastic), [0.0], []
        memory.address, memory.granule, memory.words = 1 << 30, 2 * MIB, (ctypes.c_uint32 * (64 * GRANULES))()

        def commit(_address: int, _first: int, _count: int, wait_ms: int) -> int:
            waits.append(wait_ms)
            now[0] += 0.001
            return 0

        with mock.patch.object(kv, "_commit", commit), mock.patch("time.monotonic", lambda: now[0]):
            self.assertEqual(Spread(memory, 64).commit(0, 1, 0.02), 0)
        self.assertEqual((waits[0], len(waits), min(waits)), (20, 64, 5))

    def test_free_granules_are_left_to_others(self) -> None:
        made = Made()
        pages = made.step(40)
        made.slots.give(pages)
        made.slots.end(idle=True)
        self.assertEqual([made.state(it) for it in range(3)], [{kv.IN_USE}, {kv.FREE}, {kv.FREE}])
        self.assertEqual(made.slots.num_free_blocks, GRANULES * PER - 1)

    def test_resting_engine_leaves_its_prefix_cache(self) -> None:
        made = Made()
        pages = made.step(40)
        made.slots.rest(cached=True)
        self.assertEqual([made.state(it) for it in range(3)], [{kv.IN_USE}, {kv.CACHED}, {kv.CACHED}])
        self.assertTrue(made.range.take(3 * GRANULES + 2))
        self.assertEqual(made.slots.back(), {2})
        self.assertEqual([made.state(it) for it in range(2)], [{kv.IN_USE}, {kv.IN_USE}])
        with self.assertRaisesRegex(RuntimeError, "granule 2 .* pages in it are in use"):
            made.slots.lose({2})
        made.slots.give(it for it in pages if it >= 32)
        made.slots.lose({2})
        # Its pages are free, and get memory anew.
        self.assertIn(32, made.step(20))
        self.assertEqual(made.state(2), {kv.IN_USE})

    def test_what_is_no_cache_stays_while_the_engine_rests(self) -> None:
        made = Made()
        made.step(40)
        made.slots.rest(cached=False)
        self.assertEqual(made.state(2), {kv.IN_USE})
        self.assertEqual(made.slots.back(), set())

    def test_all_pages_are_free_again(self) -> None:
        made = Made()
        made.step(40)
        made.slots.give_all()
        self.assertEqual(made.slots.num_free_blocks, GRANULES * PER - 1)
        self.assertEqual(len(made.step(GRANULES * PER - 1)), GRANULES * PER - 1)

    def test_pages_in_use_keep_memory_while_others_take(self) -> None:
        random_, made = random.Random(3), Made()
        there: list = []
        taken = 0
        for _ in range(3000):
            made.range.room = random_.randrange(BUFFERS, BUFFERS * GRANULES + 1)
            for it in range(BUFFERS * GRANULES):
                taken += random_.random() < 0.1 and made.range.take(it)
            wanted = random_.randrange(1, 40)
            found = made.step(wanted)
            there += found or []
            for page in there:
                self.assertEqual(made.state(page // PER), {kv.IN_USE})
            self.assertEqual(len(set(there)), len(there))
            random_.shuffle(there)
            count = random_.randrange(60)
            gone, there = there[:count], there[count:]
            made.slots.give(gone)
            made.device.given += 1
            made.device.done = made.device.given - random_.randrange(2)
            if random_.random() < 0.1:
                made.slots.rest(cached=True)
                for it in range(BUFFERS * GRANULES):
                    taken += random_.random() < 0.1 and made.range.take(it)
                lost = made.slots.back()
                made.slots.give(it for it in there if it // PER in lost)
                there = [it for it in there if it // PER not in lost]
                made.slots.lose(lost)
        self.assertGreater(taken, 1000)


if __name__ == "__main__":
    unittest.main()
