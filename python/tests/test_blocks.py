"""Tests of the free blocks of an elastic KV cache, with a range that loses granules and a device that finishes work late."""

import random
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_kv import Taken  # noqa: E402

from gpumux import kv  # noqa: E402
from gpumux._blocks import Blocks, layout  # noqa: E402

MIB = 1 << 20


class Range(Taken):
    """Counts what others took."""

    count = 0

    def take(self, it: int) -> bool:
        took = super().take(it)
        self.count += took
        return took

    def taken(self) -> int:
        return self.count

    def state(self, it: int) -> int:
        return int(self.words[it] & 7)


class Block:
    """One of vLLM's."""

    def __init__(self, number: int) -> None:
        self.block_id, self.block_hash = number, None


class Device:
    """Fences that are passed when `done` says so."""

    def __init__(self) -> None:
        self.given = self.done = 0

    def fence(self) -> "Device.Fence":
        return Device.Fence(self, self.given)

    class Fence:
        def __init__(self, device: "Device", number: int) -> None:
            self.device, self.number = device, number

        def query(self) -> bool:
            return self.device.done >= self.number

        def synchronize(self) -> None:
            self.device.done = max(self.device.done, self.number)


class Made:
    """So many blocks of 1 MiB in granules of 4."""

    def __init__(self, blocks: int = 32) -> None:
        self.range, self.device, self.now = Range(0, -(-blocks // 4) * 4 * MIB, 4 * MIB), Device(), 0.0
        self.all = [Block(number) for number in range(blocks)]
        self.gone: set[int] = set()
        self.cleared: list[tuple[int, int]] = []
        # Block 0 is vLLM's null block.
        self.blocks = Blocks(
            self.range, MIB, self.all, self.all[1:], self.evict, self.device.fence,
            lambda *it: self.cleared.append(it), clock=lambda: self.now,
        )  # fmt: skip

    def evict(self, numbers: set[int]) -> None:
        self.gone |= numbers
        for number in numbers:
            self.all[number].block_hash = None

    def step(self, count: int, lookup: bool = False) -> list[Block]:
        """A step that takes so many blocks, or as many as it may."""
        self.blocks.begin(count, 0, lookup, 0.0)
        found = self.blocks.popleft_n(min(count, self.blocks.num_free_blocks))
        self.blocks.end()
        return found

    def states(self) -> list[int]:
        return [self.range.state(it) for it in range(len(self.range.words))]


class Steps(unittest.TestCase):
    def test_start_commits_only_the_first_granule(self) -> None:
        made = Made()
        self.assertEqual(made.range.committed(), 4 * MIB)
        self.assertEqual(made.blocks.num_free_blocks, 31)

    def test_block_of_a_step_has_memory_that_was_cleared(self) -> None:
        made = Made()
        numbers = [it.block_id for it in made.step(6)]
        self.assertEqual(numbers, [1, 2, 3, 4, 5, 6])
        self.assertEqual(made.states()[:3], [kv.IN_USE, kv.IN_USE, kv.OUT])
        self.assertEqual(made.cleared, [(1, 1)])

    def test_refused_memory_means_fewer_free_blocks(self) -> None:
        made = Made()
        made.range.room = 2
        made.blocks.begin(20, 0, False, 0.0)
        self.assertEqual((made.blocks.num_free_blocks, made.blocks.refused), (7, 1))
        self.assertEqual(len(made.blocks.popleft_n(7)), 7)
        with self.assertRaises(ValueError):
            made.blocks.popleft_n(1)

    def test_freed_block_is_left_only_after_its_work(self) -> None:
        made = Made()
        found = made.step(8)
        made.device.given = 1
        made.blocks.append_n(reversed(found))
        made.blocks.end()
        self.assertEqual(made.range.state(1), kv.IN_USE)
        made.blocks.end()
        self.assertEqual(made.range.state(1), kv.IN_USE)
        made.device.given, made.device.done = 2, 1
        made.blocks.end()
        self.assertEqual(made.states()[:2], [kv.IN_USE, kv.FREE])

    def test_idle_engine_waits_for_its_work_and_leaves_all(self) -> None:
        made = Made()
        found = made.step(20)
        made.device.given = 5
        made.blocks.append_n(found)
        made.blocks.end(idle=True)
        self.assertEqual(made.states(), [kv.IN_USE] + [kv.FREE] * 5 + [kv.OUT] * 2)

    def test_cached_block_is_found_until_its_granule_is_taken(self) -> None:
        made = Made()
        found = made.step(11)
        for block in found:
            block.block_hash = block.block_id
        made.blocks.append_n(found)
        made.blocks.end(idle=True)
        self.assertEqual(made.states()[:3], [kv.IN_USE, kv.CACHED, kv.CACHED])
        self.assertTrue(made.range.take(2))
        made.blocks.begin(0, 0, True)
        self.assertEqual(made.gone, {8, 9, 10, 11})
        self.assertFalse(made.range.take(1))
        made.blocks.remove(made.all[4])
        made.blocks.end()
        self.assertEqual(made.range.state(1), kv.IN_USE)

    def test_new_memory_goes_before_own_cache(self) -> None:
        made = Made()
        found = made.step(7)
        for block in found:
            block.block_hash = block.block_id
        made.blocks.append_n(found)
        self.assertEqual([it.block_id for it in made.step(2, lookup=True)], [8, 9])
        made.range.room = 3
        self.assertEqual([it.block_id for it in made.step(3)], [10, 11, 1])

    def test_ranks_are_asked_about_caches_only_when_all_else_lacks(self) -> None:
        made, asked = Made(16), list[list[int]]()
        there = made.range.there
        made.range.there = lambda granules: asked.append(list(granules)) or there(granules)
        found = made.step(11)
        for block in found[:7]:
            block.block_hash = block.block_id
        made.blocks.append_n(found)
        made.blocks.end(idle=True)
        made.step(4)  # one granule is free
        made.step(4)  # one has no memory
        self.assertEqual(asked, [])
        made.range.take(1)
        self.assertEqual(sorted(it.block_id for it in made.step(4)), [4, 5, 6, 7])
        self.assertEqual(asked, [[1]])

    def test_wait_is_long_only_for_what_has_no_substitute(self) -> None:
        made, waits = Made(), list[float]()
        commit = made.range.commit
        made.range.commit = lambda first, count, wait_s: waits.append(wait_s) or commit(first, count, wait_s)
        made.range.room = 2
        found = made.step(7)
        made.blocks.begin(1, 0, False, 0.5)
        self.assertEqual(max(waits[1:]), 0.5)
        made.blocks.end()
        waits.clear()
        made.blocks.begin(1, 0, False, 0.5)
        self.assertLess(max(waits), 0.1, "shortly after a refusal")
        made.now, found[0].block_hash = 1.0, 1
        made.blocks.append(found[0])
        waits.clear()
        made.blocks.begin(1, 0, False, 0.5)
        self.assertLess(max(waits), 0.1, "its own cache will do")
        self.assertEqual(made.blocks.popleft_n(1), [found[0]])

    def test_random_steps_never_use_what_others_may_take(self) -> None:
        for seed in range(30):
            rng = random.Random(seed)
            made = Made(rng.choice([17, 40]))
            used: dict[int, Block] = {0: made.all[0]}
            for _turn in range(400):
                made.now += rng.choice([0.0, 0.03])
                made.range.room = rng.choice([2, 5, 10])
                lookup, want = rng.random() < 0.3, rng.randrange(9)
                made.blocks.begin(want, rng.randrange(4), lookup, 0.0)
                may = made.blocks.num_free_blocks
                for _ in range(5):
                    made.range.take(rng.randrange(len(made.range.words)))
                self.assertEqual(may, made.blocks.num_free_blocks)
                if lookup:
                    hits = [it for it in made.all if it.block_hash is not None and it.block_id not in used][:2]
                    for block in hits:
                        made.blocks.remove(block)
                        used[block.block_id] = block
                for block in made.blocks.popleft_n(min(want, made.blocks.num_free_blocks)):
                    self.assertNotIn(block.block_id, used)
                    block.block_hash = None
                    used[block.block_id] = block
                made.blocks.end()
                made.device.given += 1
                self.check(made, used)
                for number in rng.sample(sorted(used)[1:], min(len(used) - 1, rng.randrange(9))):
                    made.all[number].block_hash = rng.choice([None, number])
                    made.blocks.append(used.pop(number))
                made.device.done = rng.randint(made.device.done, made.device.given)
                made.blocks.end(idle=rng.random() < 0.1)
                for _ in range(rng.randrange(4)):
                    made.range.take(rng.randrange(len(made.range.words)))
                self.check(made, used)

    def check(self, made: Made, used: dict[int, Block]) -> None:
        self.assertTrue(all(made.range.state(it // 4) == kv.IN_USE for it in used))
        free = made.blocks.get_all_free_blocks()
        self.assertEqual(sorted(it.block_id for it in free), sorted(set(range(len(made.all))) - set(used)))
        self.assertEqual(made.blocks.num_free_blocks, len(free))


class Layout(unittest.TestCase):
    def test_no_block_lies_in_two_granules(self) -> None:
        for size in (1, 1000, 32 << 10, 500_000, MIB // 2, 7 * MIB // 4, 2 * MIB, 1124352, 5 * MIB, 40 * MIB, 64 * MIB):
            stride, granule = layout(size)
            self.assertGreaterEqual(stride, size)
            self.assertEqual((granule % stride, granule % (2 * MIB)), (0, 0))
            self.assertLessEqual(granule, 64 * MIB)
            self.assertLessEqual(stride - size, max(size // 8, 64 << 10))
        self.assertIsNone(layout(65 * MIB))

    def test_usual_models_need_no_padding(self) -> None:
        self.assertEqual(layout(MIB // 2), (MIB // 2, 16 * MIB))
        self.assertEqual(layout(2 * MIB), (2 * MIB, 16 * MIB))
        self.assertEqual(layout(7 * MIB // 4), (7 * MIB // 4, 14 * MIB))


if __name__ == "__main__":
    unittest.main()
