"""Tests of `gpumux._ranks`: the ranges of two ranks, each of which others take granules from, as one."""

import contextlib
import random
import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_blocks import Block, Device, Range  # noqa: E402

from gpumux import _ranks, kv  # noqa: E402
from gpumux._blocks import Blocks  # noqa: E402

MIB = 1 << 20
KEY = b"key"


class Slow(Range):
    """Waits with an order until it may go on."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.parts: list[object] = []

    def commit(self, first: int, count: int, wait_s: float, part: object = None) -> int:
        self.goes_on.wait()
        self.parts.append(part)
        return super().commit(first, count, wait_s)


class Made:
    """Two ranks with eight granules of 4 MiB each."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.ranges = [Slow(0, 32 * MIB, 4 * MIB) for _ in range(2)]
        self.cleared: list[list[tuple[int, int]]] = [[], []]
        self.orders = [_ranks.Rank(it, lambda *run, to=to: to.append(run)) for it, to in zip(self.ranges, self.cleared)]
        self.ranks = _ranks.Ranks([it.listen(KEY) for it in self.orders], KEY, 4 * MIB)
        for it in self.ranks._all:
            stack.callback(it.close)

    def states(self) -> list[list[int]]:
        """Once all orders have been carried out."""
        self.ranks.there([])
        return [[it.state(granule) for granule in range(8)] for it in self.ranges]


class Ranks(unittest.TestCase):
    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.made = Made(stack)
        self.ranks, self.ranges = self.made.ranks, self.made.ranges

    def test_granules_are_committed_and_cleared_in_all_ranks(self) -> None:
        self.assertEqual(self.ranks.commit(2, 3, 1.0), kv._DONE)
        self.assertEqual(self.made.states(), [[0, 0, 3, 3, 3, 0, 0, 0]] * 2)
        self.assertEqual(self.made.cleared, [[(2, 3)]] * 2)
        # They ask the daemon together, each time under another name.
        self.ranks.commit(5, 1, 1.0)
        first, second = self.ranges[0].parts
        self.assertEqual((self.ranges[1].parts, first[1]), ([first, second], 2))
        self.assertNotEqual(first[0], second[0])

    def test_rank_gives_back_what_another_was_refused(self) -> None:
        self.ranks.commit(0, 2, 1.0)
        self.ranges[1].room = 3
        self.assertEqual(self.ranks.commit(2, 2, 1.0), kv._NOT_YET)
        self.assertEqual(self.made.states(), [[3, 3, 0, 0, 0, 0, 0, 0]] * 2)
        # No work is under way on what is given back.
        self.assertEqual(self.made.cleared, [[(0, 2)]] * 2)

    def test_rank_that_fails_refuses_for_all(self) -> None:
        def fail(*_arguments: object) -> None:
            raise RuntimeError("no")

        # What the other one may still set to zero stays where it is, for others to take while nothing runs.
        for of, name, state in ((self.ranges[0], "commit", kv.OUT), (self.made.orders[0], "_clear", kv.FREE)):
            with mock.patch.object(of, name, fail), self.assertLogs("gpumux.ranks", "ERROR"):
                self.assertEqual(self.ranks.commit(0, 1, 1.0), kv._NOT_YET)
            self.assertEqual(self.made.states(), [[state] + [0] * 7] * 2)

    def test_late_rank_refuses_and_gives_back_when_it_goes_on(self) -> None:
        self.ranges[1].goes_on.clear()
        with mock.patch.object(_ranks, "LATE_S", 0.0):
            self.assertEqual(self.ranks.commit(0, 1, 0.05), kv._NOT_YET)
            self.assertEqual(self.ranks.there([0]), [])
        self.ranges[1].goes_on.set()
        # What it answers late counts for nothing.
        self.assertEqual(self.ranks.commit(3, 1, 1.0), kv._DONE)
        self.assertEqual(self.made.states(), [[0, 0, 0, 3, 0, 0, 0, 0]] * 2)

    def test_rank_that_ends_refuses_for_all(self) -> None:
        self.ranks.commit(0, 1, 1.0)
        self.ranks._all[1].close()
        self.assertEqual(self.ranks.commit(1, 1, 1.0), kv._NOT_YET)
        self.assertEqual(self.ranks.mark(0, 1, kv.IN_USE), 1)
        self.assertEqual(self.ranks.there([0, 1]), [])
        self.assertEqual(self.made.states()[0], [kv.FREE] + [0] * 7)

    def test_granule_that_one_rank_lost_is_free_in_all(self) -> None:
        self.ranks.commit(0, 2, 1.0)
        self.ranks.mark(0, 2, kv.CACHED)
        self.assertEqual(self.made.states(), [[2, 2, 0, 0, 0, 0, 0, 0]] * 2)
        self.ranges[0].take(1)
        self.assertEqual(self.ranks.there([0, 1, 2]), [0])
        self.assertEqual(self.ranks.mark(0, 1, kv.IN_USE), 0)
        self.assertEqual(self.ranks.mark(1, 1, kv.IN_USE), 1)
        self.assertEqual(self.made.states(), [[3, 0, 0, 0, 0, 0, 0, 0], [3, 1, 0, 0, 0, 0, 0, 0]])

    def test_target_is_that_of_the_rank_with_the_least(self) -> None:
        self.ranges[1].target = lambda: 4 * MIB
        self.ranks.there([])
        self.ranges[0].target = lambda: 8 * MIB
        self.ranks.there([])
        self.assertEqual(self.ranks.target(), 4 * MIB)

    def test_blocks_of_an_engine_have_memory_in_all_ranks(self) -> None:
        device, rng, used = Device(), random.Random(3), []
        every = [Block(number) for number in range(32)]
        contents: list[dict[int, int]] = [{}, {}]

        def evict(numbers: set[int]) -> None:
            for number in numbers:
                every[number].block_hash = None

        blocks = Blocks(self.ranks, MIB, every, every[1:], evict, device.fence, lambda *_run: None)
        taken = refused = hits = 0
        for step in range(300):
            for memory, own in zip(self.ranges, contents):
                memory.room = rng.choice((2, 3, 5, 8))
                for granule in range(8):
                    if rng.random() < 0.2 and memory.take(granule):
                        taken += 1
                        for number in range(granule * 4, granule * 4 + 4):
                            own.pop(number, None)
            blocks.begin(rng.randrange(12), 0, True, 0.0)
            found = [it for it in every if it.block_hash and it not in used and blocks._held[it.block_id // 4]][:2]
            for block in found:
                blocks.remove(block)
                hits += 1
                # What is found in a cache is there in each rank.
                self.assertEqual([it.get(block.block_id) for it in contents], [block.block_hash] * 2)
            wish = rng.randrange(12)
            new = blocks.popleft_n(min(wish, blocks.num_free_blocks))
            refused += len(new) < wish
            blocks.end()
            for block in new:
                block.block_hash = None
                for own in contents:
                    own[block.block_id] = step + 1
            used += found + new
            for block in used:
                self.assertEqual([it.state(block.block_id // 4) for it in self.ranges], [kv.IN_USE] * 2, f"step {step}")
            rng.shuffle(used)
            for block in [used.pop() for _ in range(rng.randrange(len(used) + 1))]:
                block.block_hash = contents[0][block.block_id] if rng.random() < 0.5 else None
                blocks.append(block)
            device.given += 1
            device.done = device.given - rng.randrange(2)
            blocks.end()
            # No rank keeps from others what another lacks.
            for pair in zip(*self.made.states()):
                self.assertTrue(pair[0] == pair[1] or kv.IN_USE not in pair, f"step {step}: {pair}")
        self.assertGreater(min(taken, refused, hits), 20)


if __name__ == "__main__":
    unittest.main()
