"""Tests of `gpumux.kv` that need neither a device nor the library: pages in the host's memory, and a range that loses granules."""

import contextlib
import ctypes
import gc
import random
import subprocess
import sys
import threading
import time
import unittest
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpumux  # noqa: E402
from gpumux import kv  # noqa: E402

MIB = 1 << 20
# As DLPack 1.1 has them.
FLOAT8 = {f"float8_{name}": (code, 8) for name, code in (("e4m3fn", 10), ("e4m3fnuz", 11), ("e5m2", 12), ("e5m2fnuz", 13), ("e8m0fnu", 14))}


class Taken:
    """Stands in for a range of gpumux's, of which others take granules."""

    kind = "elastic"

    def __init__(self, _device: int, size: int, granule: int) -> None:
        self.address, self.granule = 1 << 30, granule
        self.words = (ctypes.c_uint32 * (size // granule))()
        self.room = len(self.words)

    def commit(self, first: int, count: int, _wait_s: float, part: object = None) -> int:
        own = range(first, first + count)
        lacking = [it for it in own if self.words[it] & 7 == kv.OUT]
        if sum(1 for it in self.words if it & 7) + len(lacking) > self.room:
            return 1
        for it in own:
            self.words[it] = self.words[it] & ~7 | kv.IN_USE
        return 0

    def decommit(self, first: int, count: int) -> None:
        for it in range(first, first + count):
            if self.words[it] & 7:
                self.words[it] = (self.words[it] & ~7) + 8

    def mark(self, first: int, count: int, state: int) -> int:
        lost = 0
        for it in range(first, first + count):
            if self.words[it] & 7 == kv.OUT:
                lost += 1
            else:
                self.words[it] = self.words[it] & ~7 | state
        return lost

    def take(self, it: int) -> bool:
        """Others take this granule, if they may."""
        may = self.words[it] & 7 in (kv.FREE, kv.CACHED)
        if may:
            self.decommit(it, 1)
        return may

    def gone(self) -> bool:
        return False

    there = kv._Elastic.there
    generation = kv._Elastic.generation
    committed = kv._Elastic.committed

    def target(self) -> int:
        return self.committed()

    losses = kv._Plain.losses

    def close(self) -> None:
        self.words = (ctypes.c_uint32 * 0)()


def made(*arguments: int, **options: int) -> kv.Pool:
    with mock.patch.object(kv, "_Elastic", Taken):
        return kv.Pool(*arguments, **options)


def read(capsule: object) -> kv._DLManagedTensor:
    """What a reader finds in a capsule."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return kv._DLManagedTensor.from_address(pointer(capsule, b"dltensor"))


def reached(there: "Callable[[], bool]") -> None:
    """Waits until another thread has come so far."""
    deadline = time.monotonic() + 20
    while not there() and time.monotonic() < deadline:
        time.sleep(0.001)


class Short:
    """A page number of 32 bits, as those of numpy's and PyTorch's arrays are."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number

    def __ge__(self, other: int) -> bool:
        return self.number >= other

    def __lt__(self, other: int) -> bool:
        return self.number < other

    def __mul__(self, other: int) -> int:
        return ctypes.c_int32(self.number * other).value


class Pages(unittest.TestCase):
    @contextlib.contextmanager
    def waiting(self, pool: kv.Pool, count: int) -> "Iterator[tuple[threading.Thread, list[list[int]]]]":
        """Another thread's request, for which there is no room. The library waits."""
        commit, ends, found = pool._memory.commit, threading.Event(), []

        def late(first: int, number: int, wait_s: float) -> int:
            deadline = time.monotonic() + wait_s
            while answer := commit(first, number, wait_s):
                if ends.wait(0.01) or time.monotonic() > deadline:
                    break
            return answer

        def wants() -> None:
            pages = pool.alloc(count, 1e6)
            if pages:
                found.append(pages)

        pool._memory.commit = late
        thread = threading.Thread(target=wants, daemon=True)
        thread.start()
        reached(lambda: bool(pool._line))
        time.sleep(0.05)
        try:
            yield thread, found
        finally:
            ends.set()
            pool._grow = mock.Mock(side_effect=kv._Refused)
            thread.join(20)
            self.assertFalse(thread.is_alive())

    def test_memory_follows_the_pages_in_use(self) -> None:
        pool = made(64 * MIB, MIB, granule_bytes=4 * MIB)
        self.assertEqual(pool.limits().committed, 0)
        pages = pool.alloc(5)
        self.assertEqual((pages, pool.limits().committed), ([0, 1, 2, 3, 4], 8 * MIB))
        pool.free(pages[1:])
        self.assertEqual([word & 7 for word in pool._memory.words[:2]], [kv.IN_USE, kv.FREE])
        self.assertEqual((pool.trim(), pool.limits().committed), (4 * MIB, 4 * MIB))
        self.assertIsNone(pool.alloc(64))
        self.assertEqual(len(pool.alloc(63)), 63)

    def test_pages_that_are_not_in_use_are_not_freed(self) -> None:
        pool = made(16 * MIB, MIB)
        pages = pool.alloc(2)
        for wrong in ([2], [pages[0], pages[0]], [-1], [16]):
            with self.assertRaises(ValueError):
                pool.free(wrong)
        pool.free(pages)
        self.assertEqual(pool.limits().in_use, 0)

    def test_cached_page_is_found_by_its_key_until_it_is_taken(self) -> None:
        pool = made(16 * MIB, MIB, granule_bytes=2 * MIB)
        one, two, three, four = pool.alloc(4)
        keys = pool.cached([one, two, three, four])
        self.assertTrue(pool._memory.take(0))
        self.assertEqual(pool.touch(keys[1:3]), [None, three])
        # Its granule has memory again, of other contents.
        self.assertEqual(pool.alloc(1), [two])
        self.assertEqual(pool.touch([keys[0], keys[3], keys[3]]), [None, four, None])

    def test_numbers_of_other_kinds_are_the_same_pages(self) -> None:
        pool = made(8 * 1024 * MIB, 4 * MIB)
        short = [Short(it) for it in pool.alloc(1024)]
        keys = pool.cached(short[-2:])
        self.assertEqual([pool.touch([Short(it)]) for it in keys], [[1022], [1023]])
        pool.free(it for it in short[1:])
        self.assertEqual((pool._in_use[0], sum(pool._in_use), pool.limits().in_use), (1, 1, 4 * MIB))
        self.assertTrue(all(pool._granules(page)[0] == granule for granule, own in enumerate(pool._free) for page in own))
        for function, what in ((pool.free, "a page"), (pool.cached, "a page"), (pool.touch, "a key")):
            for wrong in ("x", None, 0.0, []):
                with self.assertRaisesRegex(TypeError, f"{what} is a whole number, not "):
                    function([wrong])

    def test_own_cache_goes_before_a_request_is_refused(self) -> None:
        pool = made(32 * MIB, MIB, granule_bytes=2 * MIB)
        pool._memory.room = 4
        keys = pool.cached(pool.alloc(6))
        kept = pool.alloc(2)
        new = pool.alloc(3)
        self.assertEqual(len(new), 3)
        self.assertFalse(set(kept) & set(new))
        self.assertEqual(pool.touch(keys)[:2], [None, None])
        self.assertIsNone(pool.alloc(8))

    def test_pool_without_a_cache_uses_its_free_memory(self) -> None:
        pool = made(16 * MIB, MIB, granule_bytes=2 * MIB)
        lower, upper = pool.alloc(8), pool.alloc(8)
        pool.free(lower)
        for granule in range(4):
            self.assertTrue(pool._memory.take(granule))
        pool._memory.room = 4
        pool.free(upper)
        self.assertEqual(sorted(pool.alloc(8, 0)), upper)
        self.assertIsNone(pool.alloc(1, 0))

    def test_own_cache_that_is_too_small_stays(self) -> None:
        for room, count in ((4, 20), (4, 30), (16, 33)):
            pool = made(32 * MIB, MIB, granule_bytes=2 * MIB)
            pages = pool.alloc(8)
            keys = pool.cached(pages)
            pool._memory.room = room
            self.assertIsNone(pool.alloc(count, 0))
            self.assertEqual(([it & 7 for it in pool._memory.words[:4]], list(pool._cache)), ([kv.CACHED] * 4, keys))
            self.assertEqual((pool.touch(keys), pool.alloc(count, 0)), (pages, None))

    def test_wait_is_long_only_for_what_the_pool_has_not(self) -> None:
        waits, now = list[float](), [9.0]
        pool = made(32 * MIB, MIB, granule_bytes=2 * MIB)
        pool._memory.room = 4
        pages, commit = pool.alloc(8), pool._memory.commit


        def waiting(first: int, count: int, wait_s: float) -> int:
            waits.append(wait_s)
            now[0] += wait_s
            return commit(first, count, wait_s)

        pool._memory.commit = waiting
        with mock.patch("time.monotonic", lambda: now[0]):
            self.assertIsNone(pool.alloc(2, 5.0))
            self.assertEqual((waits[0], sum(waits)), (0.0, 5.0))
            self.assertLessEqual(max(waits), kv._SLICE_S)
            waits.clear()
            self.assertIsNone(pool.alloc(2, 0.0))
            self.assertEqual(waits, [0.0])
            waits.clear()
            for leave in (pool.cached, pool.free):
                leave(pages[:2])
                self.assertEqual(sorted(pool.alloc(2, 5.0)), pages[:2])
            self.assertEqual(max(waits), 0.0)

    def test_memory_lost_before_its_use_is_replaced_by_the_cache(self) -> None:
        pool = made(8 * MIB, 2 * MIB, granule_bytes=2 * MIB)
        lowest, free, cached = pool.alloc(3)
        pool.free([lowest])
        pool._memory.take(0)
        pool._memory.room = 2
        pool.cached([cached])
        pool.free([free])
        commit = pool._memory.commit

        def late(first: int, count: int, wait_s: float) -> int:
            if first == free and pool._memory.take(first):
                pool._memory.room = 1
            return commit(first, count, wait_s)

        with mock.patch.object(pool._memory, "commit", late):
            self.assertEqual(pool.alloc(1, 0), [cached])

    def test_wrong_number_of_pages_changes_nothing(self) -> None:
        pool = made(16 * MIB, MIB)
        for wrong, wait_s, error in ((-1, 0, ValueError), (1.5, 0, TypeError), ("3", 0, TypeError), (2, None, TypeError)):
            with self.assertRaises(error):
                pool.alloc(wrong, wait_s)
        for wait_s in (float("inf"), float("nan"), -1, 1e9):
            self.assertEqual(len(pool.alloc(4, wait_s)), 4)
        self.assertEqual((pool.limits().in_use, pool.alloc(1)), (16 * MIB, None))

    def test_request_that_is_interrupted_keeps_no_page(self) -> None:
        pool = made(16 * MIB, MIB, granule_bytes=2 * MIB)
        commit = pool._memory.commit

        def interrupted(first: int, count: int, wait_s: float) -> int:
            commit(first, count, wait_s)
            raise KeyboardInterrupt

        with mock.patch.object(pool._memory, "commit", interrupted), self.assertRaises(KeyboardInterrupt):
            pool.alloc(3)
        self.assertEqual((pool.limits().in_use, pool._memory.words[0] & 7), (0, kv.FREE))
        self.assertEqual(pool.alloc(16), list(range(16)))
        keys = pool.cached(range(4))
        with mock.patch.object(pool._memory, "commit", interrupted), self.assertRaises(KeyboardInterrupt):
            pool.alloc(2)
        self.assertEqual(pool.touch(keys), [0, 1, 2, 3])
        # Own memory, of which a part is in use already.
        pool.free(range(3, 16))
        pool._memory.decommit(2, 1)
        with mock.patch.object(pool._memory, "commit", interrupted), self.assertRaises(KeyboardInterrupt):
            pool._back_own(4)
        self.assertEqual([it & 7 for it in pool._memory.words[:4]], [kv.IN_USE, kv.IN_USE, kv.OUT, kv.FREE])

    def test_warning_names_the_line_that_makes_the_pool(self) -> None:
        with mock.patch.object(kv, "_Elastic", side_effect=kv._NotElastic("none")), mock.patch.object(
            kv, "_Device", side_effect=kv._NoDevice("none")
        ), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            kv.Pool(4 * MIB, MIB)
        self.assertEqual([it.filename for it in said], [__file__])
        self.assertEqual(said[0].lineno, sys._getframe().f_lineno - 2)

    def test_others_use_the_pool_while_memory_is_awaited(self) -> None:
        pool = made(32 * MIB, MIB, granule_bytes=2 * MIB)
        one, two, three, _four, _five = pool.alloc(5)
        pool.free([two])
        keys, seen = pool.cached([three]), []
        commit = pool._memory.commit

        def slow(first: int, count: int, wait_s: float) -> int:
            def use() -> None:
                pool.free([one])
                # There is memory behind that one: nothing is awaited.
                with mock.patch.object(pool, "_asks", None):
                    again = pool.alloc(1)
                seen.append((pool.touch(keys), again, pool.limits().in_use // MIB, pool.trim(), pool.on_reclaim(print)))

            if first == 3:
                with_pool = threading.Thread(target=use, daemon=True)
                with_pool.start()
                with_pool.join(20)
            return commit(first, count, wait_s)

        with mock.patch.object(gpumux, "_serves", lambda: False), mock.patch.object(pool._memory, "commit", slow):
            self.assertEqual(pool.alloc(5), [1, 5, 6, 7, 8])
        self.assertEqual(seen, [([three], [one], 9, 0, False)])

    def test_threads_rely_on_no_memory_that_another_is_refused(self) -> None:
        pool = made(32 * MIB, MIB, granule_bytes=2 * MIB)
        found, order, commit = [], [], pool._memory.commit

        def late(first: int, count: int, wait_s: float) -> int:
            order.append((first, count))
            if len(order) > 1:
                return commit(first, count, wait_s)
            # The second wants the other half of a granule, which comes for a moment.
            commit(0, 2, wait_s)
            second.start()
            reached(lambda: pool._awaited[1] == 2)
            pool._memory.decommit(0, 2)
            pool._memory.room = 1
            return 1

        second = threading.Thread(target=lambda: found.append(pool.alloc(1, 5)), daemon=True)
        with mock.patch.object(pool._memory, "commit", late):
            self.assertIsNone(pool.alloc(3, 0))
            second.join(20)
        self.assertEqual((found, order, pool._memory.words[1] & 7), ([[3]], [(0, 2), (1, 1)], kv.IN_USE))
        self.assertEqual((pool.limits().in_use, set(pool._awaited)), (MIB, {0}))

    def test_cached_page_is_not_found_in_memory_that_is_awaited(self) -> None:
        pool = made(8 * MIB, MIB, granule_bytes=2 * MIB)
        keys, commit = pool.cached(pool.alloc(1)), pool._memory.commit

        def late(first: int, count: int, wait_s: float) -> int:
            found.append(pool.touch(keys))
            self.assertFalse(pool._memory.take(0))
            return commit(first, count, wait_s)

        found: "list[Any]" = []
        with mock.patch.object(pool._memory, "commit", late):
            self.assertEqual(pool.alloc(1), [1])
        self.assertEqual(found, [[0]])

    def test_pool_that_is_closed_meanwhile_keeps_its_memory_until_then(self) -> None:
        for answer in (0, 1):
            pool, order = made(8 * MIB, MIB, granule_bytes=2 * MIB), []
            memory = pool._memory

            def late(_first: int, _count: int, _wait_s: float, pool: kv.Pool = pool, order: list = order, answer: int = answer) -> int:
                order.append("asked")
                another.start()
                reached(lambda: pool._awaited[0] == 2)
                closing.start()
                reached(lambda: pool._closed)
                order.append("granted")
                return answer

            refused: list[str] = []

            def wants(pool: kv.Pool = pool, refused: list[str] = refused) -> None:
                try:
                    pool.alloc(1, 20)
                except Exception as error:
                    refused.append(str(error))

            another = threading.Thread(target=wants, daemon=True)
            closing = threading.Thread(target=pool.close, daemon=True)
            memory.commit, memory.close, memory.mark = late, lambda order=order: order.append("closed"), lambda *_: self.fail("no pool is there")
            if answer:
                with self.assertRaisesRegex(ValueError, "the pool is closed"):
                    pool.alloc(1)
            else:
                self.assertEqual(pool.alloc(1), [0])
            for it in (closing, another):
                it.join(20)
            self.assertEqual((order, refused), (["asked", "granted", "closed"], ["the pool is closed"]))

    def test_others_have_own_memory_while_a_large_request_waits(self) -> None:
        pool = made(100 * MIB, MIB, granule_bytes=2 * MIB)
        pool._memory.room = 15
        pool.free(pool.alloc(30))
        with self.waiting(pool, 90) as (large, _found):
            start = time.monotonic()
            self.assertEqual([len(pool.alloc(count, 3) or []) for count in (20, 5)], [20, 5])
            self.assertLess(time.monotonic() - start, 0.2)
            # What cannot be had is awaited, also where the large one waits for the pages.
            for count in (10, 40):
                start = time.monotonic()
                self.assertIsNone(pool.alloc(count, 0.3))
                self.assertGreater(time.monotonic() - start, 0.25)
            self.assertTrue(large.is_alive())
        self.assertEqual((pool.limits().in_use, set(pool._awaited), pool._line), (25 * MIB, {0}, []))

    def test_small_request_has_memory_that_comes_while_a_large_one_waits(self) -> None:
        pool = made(100 * MIB, MIB, granule_bytes=2 * MIB)
        pool._memory.room = 0
        with self.waiting(pool, 90):
            pool._memory.room = 3
            self.assertEqual(len(pool.alloc(5, 3) or []), 5)

    def test_large_request_has_its_turn(self) -> None:
        pool, ends = made(100 * MIB, MIB, granule_bytes=2 * MIB), threading.Event()
        pool._memory.room = 40

        def churn() -> None:
            while not ends.is_set():
                if pages := pool.alloc(20, 1):
                    ends.wait(0.01)
                    pool.free(pages)

        with mock.patch.object(kv, "_TURN_S", 0.8):
            threads = [threading.Thread(target=churn, daemon=True) for _ in range(6)]
            for it in threads:
                it.start()
            reached(lambda: pool.limits().in_use == 80 * MIB)
            self.assertEqual(len(pool.alloc(75, 20) or []), 75)
            ends.set()
            for it in threads:
                it.join(20)

    def test_pages_that_another_thread_frees_are_awaited(self) -> None:
        pool = made(8 * MIB, MIB, granule_bytes=2 * MIB)
        pages, start = pool.alloc(8), time.monotonic()
        # There is no other thread yet.
        self.assertIsNone(pool.alloc(1, 20))
        self.assertLess(time.monotonic() - start, 10)
        threading.Timer(0.2, pool.free, [pages[:1]]).start()
        another = threading.Thread(target=pool.cached, args=(pages[7:],))
        another.start()
        another.join()
        self.assertEqual(pool.alloc(2, 20), [0, 7])

    def test_wait_ends_when_pages_come_free(self) -> None:
        pool = made(8 * MIB, MIB, granule_bytes=2 * MIB)
        pages = pool.alloc(4)
        pool._memory.room = 2
        with self.waiting(pool, 4) as (_thread, found):
            pool.free(pages)
            reached(lambda: bool(found))
        self.assertEqual([len(it) for it in found], [4])

    def test_close_ends_a_wait(self) -> None:
        pool = made(8 * MIB, MIB, granule_bytes=2 * MIB)
        pool._memory.room = 0
        commit = pool._memory.commit
        pool._memory.commit = lambda first, count, wait_s: time.sleep(max(0, wait_s)) or commit(first, count, wait_s)
        refused: "list[str]" = []

        def wants() -> None:
            try:
                pool.alloc(1, float("inf"))
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=wants, daemon=True) for _ in range(3)]
        for it in threads:
            it.start()
        reached(lambda: len(pool._line) == 3)
        start = time.monotonic()
        pool.close()
        for it in threads:
            it.join(20)
        self.assertLess(time.monotonic() - start, 2)
        self.assertEqual(refused, ["the pool is closed"] * 3)

    def test_key_that_was_gone_stays_gone(self) -> None:
        pool = made(32 * MIB, MIB, granule_bytes=2 * MIB)
        keys, found = pool.cached(pool.alloc(8)), []
        commit = pool._memory.commit

        def late(first: int, count: int, wait_s: float) -> int:
            found.append(pool.touch(keys[:2]))
            return commit(first, count, wait_s)

        pool._memory.room = 4
        with mock.patch.object(pool._memory, "commit", late):
            self.assertIsNone(pool.alloc(30, 0))
        self.assertEqual(found[0], [None, None])
        self.assertEqual(pool.touch(keys), [None, None, *range(2, 8)])
        self.assertEqual((pool.limits().cached, pool._unused, pool._has_cached[0]), (0, 26, 0))
        self.assertEqual(pool._memory.words[0] & 7, kv.FREE)

    def test_cached_pages_are_found_while_a_large_request_waits(self) -> None:
        pool = made(100 * MIB, MIB, granule_bytes=2 * MIB)
        keys = pool.cached(pool.alloc(20))
        pool._memory.room = 10
        with self.waiting(pool, 95):
            self.assertEqual((pool.limits().cached, pool.touch(keys)), (20 * MIB, list(range(20))))

    def test_short_wait_ends_beside_a_long_one(self) -> None:
        pool, ends = made(8 * MIB, MIB, granule_bytes=2 * MIB), threading.Event()
        with mock.patch.object(pool._memory, "commit", lambda *_: ends.wait(20) and kv._FULL):
            long = threading.Thread(target=pool.alloc, args=(1, 20), daemon=True)
            long.start()
            reached(lambda: pool._awaited[0] == 1)
            short = threading.Thread(target=pool.alloc, args=(1, 0), daemon=True)
            short.start()
            short.join(5)
            self.assertFalse(short.is_alive())
            ends.set()
            long.join(20)

    def test_pages_of_many_threads_have_memory(self) -> None:
        pool, guard = made(48 * MIB, 3 * MIB // 2, granule_bytes=2 * MIB), threading.Lock()
        memory, wrong, pages = pool._memory, [], set()
        memory.room = 16
        for name in ("commit", "mark", "take"):

            def one_at_a_time(*arguments: Any, call: Any = getattr(memory, name)) -> Any:
                with guard:
                    return call(*arguments)

            setattr(memory, name, one_at_a_time)

        def use(seed: int) -> None:
            rng, have, keys = random.Random(seed), [], []
            for _ in range(300):
                way = rng.random()
                if way < 0.5:
                    new = pool.alloc(rng.randint(1, 6), 0) or []
                elif way < 0.7:
                    new = [it for it in pool.touch([keys.pop()]) if it is not None] if keys else []
                else:
                    new = []
                    memory.take(rng.randrange(len(memory.words)))
                with guard:
                    wrong.extend(pages & set(new))
                    pages.update(new)
                have += new
                wrong.extend(it for page in have for it in pool._granules(page) if memory.words[it] & 7 != kv.IN_USE)
                rng.shuffle(have)
                gone, have = have[:3], have[3:]
                with guard:
                    pages.difference_update(gone)
                pool.free(gone[:1])
                keys += pool.cached(gone[1:])
            with guard:
                pages.difference_update(have)
            pool.free(have)

        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=use, args=(seed,), daemon=True) for seed in range(4)]
        for it in threads:
            it.start()
        for it in threads:
            it.join(60)
        self.assertEqual((wrong, pool.limits().in_use, sum(pool._in_use), sum(pool._awaited)), ([], 0, 0, 0))
        self.assertEqual(sum(pool._has_cached), sum(len(pool._granules(page)) for page, _ in pool._cache.values()))

    def test_random_use_never_gives_a_page_twice(self) -> None:
        for page in (MIB, 3 * MIB // 2, 5 * MIB, 700_000):
            rng = random.Random(page)
            pool = made(96 * MIB, page, granule_bytes=2 * MIB)
            memory, have, keys = pool._memory, {}, {}
            for turn in range(3000):
                memory.room = rng.choice([12, 30, 48])
                way = rng.random()
                if way < 0.35:
                    for number in pool.alloc(rng.randint(1, 5), wait_s=0) or []:
                        self.assertNotIn(number, have)
                        have[number] = turn
                elif way < 0.5 and have:
                    number = rng.choice(list(have))
                    del have[number]
                    pool.free([number])
                elif way < 0.7 and have:
                    number = rng.choice(list(have))
                    keys[pool.cached([number])[0]] = number
                    del have[number]
                elif way < 0.85 and keys:
                    key = rng.choice(list(keys))
                    number = keys.pop(key)
                    found = pool.touch([key])
                    self.assertIn(found, ([number], [None]))
                    if found == [number]:
                        self.assertNotIn(number, have)
                        have[number] = turn
                else:
                    memory.take(rng.randrange(len(memory.words)))
                for number in have:
                    self.assertTrue(all(memory.words[it] & 7 == kv.IN_USE for it in pool._granules(number)))
                self.assertEqual(pool.limits().in_use, len(have) * page)

    def test_tensor_covers_the_pages(self) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            pool = kv._Host(4 * MIB, 2 * MIB)
        self.assertEqual((said, pool.kind), ([], "host"))
        pool = made(4 * MIB, MIB, granule_bytes=2 * MIB)
        tensor = pool.tensor(dtype="float16")
        self.assertEqual((tensor.shape, tensor.__dlpack_device__()), ((4, MIB // 2), (2, 0)))
        self.assertIn("dltensor", repr(tensor.__dlpack__(stream=None)))
        for shape, dtype in (((5, MIB), "uint8"), ((4,), "complex64"), ((4,), "float7")):
            with self.assertRaises(ValueError):
                pool.tensor(shape, dtype)

    def test_rows_of_a_tensor_are_pages(self) -> None:
        pool = made(4 * MIB, 10, granule_bytes=2 * MIB)
        self.assertEqual((pool.tensor(dtype="int16").shape, pool.tensor((4, 3), "float32").shape), ((pool.pages, 5), (4, 3)))
        for dtype in ("float32", "int64"):
            with self.assertRaisesRegex(ValueError, f"a page of 10 bytes is no row of {dtype}"):
                pool.tensor(dtype=dtype)

    def test_types_are_those_that_readers_know(self) -> None:
        pool = made(4 * MIB, MIB, granule_bytes=2 * MIB)
        for dtype, (code, bits) in {"int8": (0, 8), "uint64": (1, 64), "float16": (2, 16), "float64": (2, 64), "bfloat16": (4, 16), **FLOAT8}.items():
            tensor = read(pool.tensor(dtype=dtype).__dlpack__()).tensor
            self.assertEqual((tensor.code, tensor.bits), (code, bits))
        for dtype in ("float8", "bfloat8", "bfloat32", "bfloat64", "int4", "uint128", "float", "16", "int016", "int٨"):
            with self.assertRaisesRegex(ValueError, f"no type of DLPack's: {dtype}"):
                pool.tensor(dtype=dtype)

    def test_reader_that_lets_a_tensor_go_releases_it(self) -> None:
        released = []
        pool = made(4 * MIB, MIB, granule_bytes=2 * MIB)
        managed = read(kv.Tensor(pool, (8,), "uint8", 2 * MIB, released=lambda: released.append(1)).__dlpack__())
        self.assertEqual((managed.tensor.data, list(kv._exported)), (pool.address + 2 * MIB, [ctypes.addressof(managed)]))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
        self.assertEqual((released, kv._exported), ([1], {}))

    def test_tensor_that_outlives_python_calls_nothing(self) -> None:
        # What is registered first is called last.
        program = f"""
import atexit, sys
atexit.register(lambda: print(managed.deleter, len(kv._exported)))
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from test_kv import kv, made, read
managed = read(made(2 << 20, 1 << 20).tensor().__dlpack__())
assert managed.deleter
"""
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        self.assertEqual(out, "None 1\n")

    def test_wrong_types_shapes_and_copies_are_refused(self) -> None:
        pool = made(4 * MIB, MIB, granule_bytes=2 * MIB)
        for dtype in (None, 5, object()):
            with self.assertRaisesRegex(TypeError, "a type is named as 'float16' is"):
                pool.tensor(dtype=dtype)
        for shape in ((2.0,), ("a",), (None,)):
            with self.assertRaisesRegex(TypeError, "a length is a whole number, not "):
                pool.tensor(shape)
        tensor = pool.tensor()
        for wish in ({"copy": True}, {"dl_device": (1, 0)}):
            with self.assertRaisesRegex(BufferError, "own memory, on its device"):
                tensor.__dlpack__(**wish)
        self.assertTrue(tensor.__dlpack__(stream=None, max_version=(1, 0), dl_device=(2, 0), copy=False))

    def test_forked_child_has_no_pages_of_the_parent(self) -> None:
        program = f"""
import os, signal, sys, threading, unittest.mock, warnings
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from gpumux import kv
warnings.simplefilter("ignore")
with unittest.mock.patch.object(kv, "_Device", side_effect=kv._NoDevice("none")):
    pool = kv.Pool(4 << 20, 1 << 20)
keys = pool.cached(pool.alloc(1))
held, ends = threading.Event(), threading.Event()
def hold():
    with pool._lock, pool._asks:
        held.set()
        ends.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    print(pool.alloc(1), pool.touch(keys), pool.limits().in_use, pool.close(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
ends.set()
print(pool.alloc(1), pool.touch(keys))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout, "None [None] 0 None\n[1] [0]\n", done.stderr)

    def test_wait_of_any_length_reaches_the_library_in_bounds(self) -> None:
        waits: "list[int]" = []

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)
        def commit(_address: int, _first: int, _count: int, wait_ms: int) -> int:
            waits.append(wait_ms)
            return 0

        memory = object.__new__(kv._Elastic)
        memory.address = 1 << 30
        with mock.patch.object(kv, "_commit", commit):
            for wait_s in (float("inf"), float("nan"), 1e8, -1, 0, 0.0009, 0.2):
                memory.commit(0, 1, wait_s)
        # Without any wait the library would not ask the daemon.
        slice_ms = int(kv._SLICE_S * 1000)
        self.assertEqual(waits, [slice_ms, 5, slice_ms, 5, 5, 5, 200])

    def test_signal_interrupts_a_wait(self) -> None:
        program = f"""
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
from gpumux import kv
def commit(_address, _first, _count, wait_ms):
    # As the library does, it goes on after a signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    time.sleep(wait_ms / 1000)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return 1
kv._commit = commit
# Ignored where the tests run in a shell's background.
signal.signal(signal.SIGINT, signal.default_int_handler)
memory = object.__new__(kv._Elastic)
memory.address = 1 << 30
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    memory.commit(0, 1, float("inf"))
except KeyboardInterrupt:
    print("interrupted")
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
        self.assertEqual(done.stdout, "interrupted\n", done.stderr)

    def test_wrong_sizes_are_refused(self) -> None:
        for arguments, options in (((0, 1), {}), ((MIB, 0), {}), ((MIB, MIB), {"granule_bytes": 3 * MIB})):
            with self.assertRaises(ValueError):
                made(*arguments, **options)
        with mock.patch.object(kv, "_backing") as backing:
            for arguments in ((64e6, MIB), (64 * MIB, 1e6), ("64", MIB)):
                with self.assertRaisesRegex(TypeError, "bytes(_max)? is a whole number, not "):
                    kv.Pool(*arguments)
            for wrong in (None, "cuda:0", 1.0, -1, 1 << 32):
                with self.assertRaisesRegex((TypeError, ValueError), f"device is a whole number.* not .*{wrong}"):
                    kv.Pool(MIB, MIB, device=wrong)
            # The library would take the lower 64 bits.
            with self.assertRaisesRegex(ValueError, "bytes_max is a whole number"):
                kv.Pool((1 << 64) + MIB, MIB)
        backing.assert_not_called()

    def test_pool_that_is_let_go_frees_its_memory(self) -> None:
        order: "list[str]" = []
        with mock.patch.object(Taken, "close", lambda _memory: order.append("freed")):
            pool = made(4 * MIB, MIB, granule_bytes=2 * MIB)
            tensor = pool.tensor()
            managed = read(tensor.__dlpack__())
            with mock.patch.object(gpumux, "_serves", lambda: True):
                self.assertTrue(pool.on_reclaim(print))
            del pool, tensor
            gc.collect()
            self.assertEqual((order, len(gpumux._reclaimers)), ([], 1))
            # An array of it keeps it.
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
            self.assertEqual((order, gpumux._reclaimers), (["freed"], []))
            with made(4 * MIB, MIB, granule_bytes=2 * MIB) as pool:
                pool.close()
            del pool
            self.assertEqual(order, ["freed"] * 2)
            # A forked child has no memory to free, nor has a program whose context has ended.
            with mock.patch.object(Taken, "gone", lambda _memory: True):
                made(4 * MIB, MIB)
            self.assertEqual(order, ["freed"] * 2)

    def test_pool_is_not_freed_when_python_ends(self) -> None:
        program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from test_kv import Taken, made
Taken.close = lambda _memory: print("freed", flush=True)
pool = made(2 << 20, 1 << 20)
made(2 << 20, 1 << 20)
"""
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        self.assertEqual(out, "freed\n")

    def test_pool_whose_context_has_ended_is_an_error(self) -> None:
        pool = made(4 * MIB, MIB, granule_bytes=2 * MIB)
        pages = pool.alloc(2)
        keys = pool.cached(pages[1:])
        tensor = pool.tensor()
        pool._memory.gone = lambda: True
        for call in (
            lambda: pool.alloc(1),
            lambda: pool.touch(keys),
            lambda: pool.free(pages[:1]),
            pool.limits,
            pool.trim,
            tensor.__dlpack__,
        ):
            with self.assertRaisesRegex(kv.PoolError, "memory is gone: .*context"):
                call()
        with mock.patch("os.getpid", return_value=0):  # A forked child.
            self.assertEqual((pool.alloc(1), pool.touch(keys)), (None, [None]))
        pool.close()

    def test_wait_ends_with_the_context(self) -> None:
        pool = made(4 * MIB, MIB, granule_bytes=2 * MIB)
        pool._memory.commit = lambda *_: setattr(pool._memory, "gone", lambda: True) or -1
        with self.assertRaisesRegex(kv.PoolError, "memory is gone"):
            pool.alloc(1, 20)

    def test_closed_pool_of_the_host_keeps_no_memory(self) -> None:
        memory = kv._Host(4 * MIB, 2 * MIB)
        ctypes.memset(memory.address, 7, memory.size)
        with mock.patch("os.getpid", return_value=0):  # A forked child, which has the same memory.
            memory.close()
        self.assertTrue(all(ctypes.string_at(memory.address, memory.size)))
        memory.close()
        # Its addresses stay, for tensors that are still there.
        self.assertFalse(any(ctypes.string_at(memory.address, memory.size)))

    def test_host_without_room_is_a_pool_s_error(self) -> None:
        with mock.patch.object(kv, "_Elastic", side_effect=kv._NotElastic("none")), mock.patch.object(
            kv, "_Device", side_effect=kv._NoDevice("none")
        ), self.assertRaisesRegex(kv.PoolError, "none.*1125899906842624 bytes"):
            kv.Pool(1 << 50, 1 << 50)


class Driver:
    """Stands in for libcuda, with devices, and one thread's stack of contexts."""

    def __init__(self, devices: int, current: "int | None" = None) -> None:
        self.devices = devices
        # A device's primary context is its number and 100.
        self.stack = [] if current is None else [current + 100]
        # What was called, and on which device.
        self.calls: "list[tuple[str, int]]" = []
        self.failing: "dict[str, int]" = {}

    def device(self) -> "int | None":
        return self.stack[-1] % 100 if self.stack else None

    def done(self, name: str) -> int:
        """Of a call that needs a context."""
        if not self.stack:
            return 201
        self.calls.append((name, self.stack[-1] % 100))
        return self.failing.get(name, 0)

    def cuInit(self, _flags: int) -> int:
        return self.failing.get("cuInit", 0 if self.devices else 100)

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0

    def cuGetErrorName(self, error: int, name: Any) -> int:
        names = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 3: b"CUDA_ERROR_NOT_INITIALIZED", 100: b"CUDA_ERROR_NO_DEVICE", 201: b"CUDA_ERROR_INVALID_CONTEXT"}
        name._obj.value = names[error]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = device + 100
        return 0

    def cuCtxGetDevice(self, device: Any) -> int:
        if not self.stack:
            return 201
        device._obj.value = self.device()
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.stack[-1] if self.stack else None
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.stack[-1:] = [context.value] if context.value else []
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.stack.pop()
        return 0

    def cuMemAlloc_v2(self, address: Any, _size: ctypes.c_size_t) -> int:
        address._obj.value = 1 << 30
        return self.done("cuMemAlloc_v2")

    def cuMemFree_v2(self, _address: ctypes.c_uint64) -> int:
        return self.done("cuMemFree_v2")

    def cuMemsetD8_v2(self, _address: ctypes.c_uint64, _value: int, _size: ctypes.c_size_t) -> int:
        return self.done("cuMemsetD8_v2")

    def cuStreamSynchronize(self, _stream: "ctypes.c_void_p | None") -> int:
        return self.done("cuStreamSynchronize")


class Together(unittest.TestCase):
    def test_pages_of_all_pools_come_or_none(self) -> None:
        pools = [made(8 * MIB, MIB, granule_bytes=2 * MIB) for _ in range(2)]
        pools[1]._memory.room = 2
        self.assertIsNone(kv.alloc_together(pools, 6, wait_s=0))
        self.assertEqual([pool.limits().in_use for pool in pools], [0, 0])
        found = kv.alloc_together(pools, 4, wait_s=0)
        assert found
        self.assertEqual([len(it) for it in found], [4, 4])
        with self.assertRaises(ValueError):
            kv.alloc_together([*pools, pools[0]], -1)
        self.assertIsNone(kv.alloc_together(iter(pools), 2, wait_s=0))
        self.assertEqual([pool.limits().in_use for pool in pools], [4 * MIB, 4 * MIB])


class Devices(unittest.TestCase):
    def with_driver(self, driver: Driver) -> Driver:
        patch = mock.patch.object(kv.ctypes, "CDLL", return_value=driver)
        patch.start()
        self.addCleanup(patch.stop)
        return driver

    def test_device_that_is_not_there_is_an_error_and_not_the_host(self) -> None:
        self.with_driver(Driver(2))
        for wrong in (2, -1):
            with self.assertRaisesRegex(ValueError, f"no device {wrong}: .* 2"):
                kv._Device(wrong, MIB, MIB)

    def test_error_of_the_driver_has_its_name(self) -> None:
        self.with_driver(Driver(0))
        with self.assertRaisesRegex(kv.PoolError, r"CUDA_ERROR_NO_DEVICE \(100\)"):
            kv._Device(0, MIB, MIB)

    def test_full_device_is_an_error_and_takes_no_memory(self) -> None:
        for answer, error in ((kv._NOT_YET, "no room for one granule"), (kv._FULL, "memory limit"), (-4, "refuses")):
            driver = self.with_driver(Driver(2))
            with mock.patch.object(kv, "_range_new", lambda *_, answer=answer: answer), self.assertRaisesRegex(kv.PoolError, error):
                kv.Pool(4 * MIB, MIB, device=1)
            self.assertEqual(driver.calls, [])

    def test_memory_that_is_left_to_the_driver_is_the_device_s(self) -> None:
        self.with_driver(Driver(2))
        with mock.patch.object(kv, "_range_new", lambda *_: -3):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                self.assertEqual(kv.Pool(4 * MIB, MIB, device=1).kind, "device")
            self.assertRegex(str(said[0].message), "bytes of device memory.*GPUMUX_MEMORY=native")
            with self.assertRaisesRegex(kv.PoolError, "GPUMUX_MEMORY=native"):
                kv.Pool(4 * MIB, MIB, fallback=False)

    def test_pages_of_a_device_are_not_the_host_s(self) -> None:
        driver = self.with_driver(Driver(2))
        for name, error, said in (("cuMemAlloc_v2", 2, "is not loaded.*OUT_OF_MEMORY"), ("cuInit", 3, "forked.*spawn")):
            driver.failing = {name: error}
            with mock.patch.object(kv, "_range_new", None), self.assertRaisesRegex(kv.PoolError, said):
                kv.Pool(4 * MIB, MIB)
        for without in (Driver(0), None):
            loads = mock.patch.object(kv.ctypes, "CDLL", **({"return_value": without} if without else {"side_effect": OSError("no file")}))
            with loads, warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                self.assertEqual(kv.Pool(4 * MIB, MIB).kind, "host")
            self.assertRegex(str(given[0].message), "bytes of host memory")

    def test_pool_on_another_device_changes_no_current_device(self) -> None:
        for current in (None, 0, 1):
            driver = self.with_driver(Driver(2, current))
            memory = kv._Device(1, MIB, MIB)
            self.assertEqual(driver.device(), current)
            # Another thread, which has no context.
            driver.stack = []
            memory.close()
            self.assertEqual((driver.stack, driver.calls), ([], [("cuMemAlloc_v2", 1), ("cuMemFree_v2", 1)]))

    def test_device_without_room_changes_no_current_device(self) -> None:
        for current in (None, 0):
            driver = self.with_driver(Driver(2, current))
            driver.failing["cuMemAlloc_v2"] = 2
            with self.assertRaisesRegex(kv.PoolError, "OUT_OF_MEMORY"):
                kv._Device(1, MIB, MIB)
            self.assertEqual(driver.device(), current)

    def test_pool_uses_the_program_s_own_context_of_its_device(self) -> None:
        driver = self.with_driver(Driver(2))
        driver.stack = [701]
        memory = kv._Device(1, MIB, MIB)
        driver.stack = [100]
        with memory.driver.current():
            self.assertEqual(driver.stack, [100, 701])

    def test_elastic_range_on_another_device_changes_no_current_device(self) -> None:
        for current in (None, 0):
            driver = self.with_driver(Driver(2, current))
            for answer, error in ((kv._DONE, None), (kv._FULL, "memory limit")):
                header = kv._Header(address=1 << 30, bytes=MIB)
                seen = []

                def new(_device: int, _size: int, _granule: int, at: Any) -> int:
                    seen.append(driver.device())
                    at._obj.value = ctypes.addressof(header)
                    return answer

                with mock.patch.object(kv, "_range_new", new):
                    if error:
                        with self.assertRaisesRegex(kv.PoolError, error):
                            kv._Elastic(1, MIB, MIB)
                    else:
                        kv._Elastic(1, MIB, MIB)
                self.assertEqual((seen, driver.device()), ([1], current))


if __name__ == "__main__":
    unittest.main()
