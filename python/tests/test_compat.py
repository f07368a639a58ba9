"""Tests of `gpumux.compat.kvcached` without a device, PyTorch or kvcached: stand-ins have what is used of them."""

from __future__ import annotations

import ctypes
import inspect
import gc
import io
import os
import py_compile
import random
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import unittest
import warnings
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
try:
    import torch as _torch  # noqa: F401
except ImportError:
    sys.modules["torch"] = types.ModuleType("torch")

from test_kv import Taken  # noqa: E402

from gpumux import kv  # noqa: E402
from gpumux.compat import _vmm_ops as ops  # noqa: E402
from gpumux.compat._kvcached_pages import StateConsistencyError  # noqa: E402

PAGE = 2 << 20

# The native module of kvcached 0.1.6, as `inspect` writes it.
FUNCTIONS = {
    "init_kvcached": "(dev_str, page_size=0, contiguous_layout=True)",
    "shutdown_kvcached": "()",
    "create_kv_tensors": "(size, dtype_size, dev_str, num_layers, num_kv_buffers=2, group_id=0, unified_pool=False)",
    "kv_tensors_created": "(group_id=0)",
    "map_to_kv_tensors": "(offsets, group_id=0)",
    "map_to_kv_tensors_with_result": "(offsets, group_id=0)",
    "unmap_from_kv_tensors": "(offsets, group_id=0)",
    "prepare_unmap_from_kv_tensors": "(offsets, transaction_id, group_id=0)",
    "commit_unmap_from_kv_tensors": "(transaction_id, group_id=0)",
    "abort_unmap_from_kv_tensors": "(transaction_id, group_id=0)",
    "PageAllocator": "(num_layers, mem_size_per_layer, page_size, world_size=1, pp_rank=0, async_sched=False, "
    "contiguous_layout=True, enable_page_prealloc=True, num_kv_buffers=2, group_id=0, ipc_name='')",
    "InternalPage": "(page_id, page_size)",
}
# How many arguments its methods have.
METHODS = {
    "PageAllocator": {
        "start_prealloc_thread": 0, "stop_prealloc_thread": 0, "alloc_page": 0, "free_page": 1, "free_pages": 1, "resize": 1,
        "trim": 0, "reset_free_page_order": 0, "get_num_free_pages": 0, "get_num_inuse_pages": 0, "get_num_total_pages": 0,
        "get_num_reserved_pages": 0, "get_page_state": 0, "get_avail_physical_pages": 0, "check_and_get_resize_target": 1,
        "get_resize_target": 0, "get_page_id": 2, "group_indices_by_page": 2, "set_broadcast_map_callback": 1,
        "set_broadcast_unmap_callback": 1, "set_use_worker_ipc": 1, "get_transaction_state": 0, "release_shared_segment": 0,
    },
    "InternalPage": {
        "init": 1, "alloc": 1, "free": 1, "free_batch": 1, "empty": 0, "full": 0, "num_free_blocks": 0, "get_free_blocks": 0,
        "get_block_range": 3, "get_num_blocks": 2,
    },
}  # fmt: skip


def signature(it: object) -> inspect.Signature:
    own = inspect.signature(it)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in own.parameters.values()]
    return own.replace(parameters=bare, return_annotation=inspect.Signature.empty)


class Range(Taken):
    """A range of which tests look at the granules."""

    decommit_answer = 0

    def decommit(self, first: int, count: int) -> int:
        if not self.decommit_answer:
            super().decommit(first, count)
        return self.decommit_answer

    def close(self) -> None:
        self.words = None

    def committed(self) -> list[int]:
        return [it for it, word in enumerate(self.words) if word & 7 == kv.IN_USE]


class Names(unittest.TestCase):
    def test_names_and_arguments_are_the_native_module_s(self) -> None:
        for name, arguments in FUNCTIONS.items():
            self.assertEqual(str(signature(getattr(ops, name))), arguments, name)
        for name, methods in METHODS.items():
            own = getattr(ops, name)
            made = own(0, 1) if name == "InternalPage" else own(1, PAGE, PAGE, ipc_name=f"gpumux-test-{os.getpid()}")
            for method, count in methods.items():
                self.assertEqual(len(inspect.signature(getattr(made, method)).parameters), count, method)
            public = {it for it in dir(made) if not it.startswith("_") and callable(getattr(made, it))}
            self.assertEqual(public, set(methods))


class Case(unittest.TestCase):
    """With ranges that are `Range`, and a PyTorch that hands tensors through."""

    def setUp(self) -> None:
        self.ranges: list[Range] = []

        def made(*arguments: int) -> Range:
            self.ranges.append(Range(*arguments))
            return self.ranges[-1]

        self.synchronized = 0
        cuda = types.SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            mem_get_info=lambda device: (self.free, 100 * PAGE),
            synchronize=self.synchronize,
        )
        self.torch = types.SimpleNamespace(from_dlpack=lambda it: it, cuda=cuda)
        self.free = 1 << 40
        for patch in (mock.patch.object(kv, "_Elastic", made), mock.patch.object(ops, "torch", self.torch)):
            patch.start()
            self.addCleanup(patch.stop)
        self.addCleanup(ops.shutdown_kvcached)

    def synchronize(self, _device: int) -> None:
        self.synchronized += 1

    def create(self, contiguous: bool, *arguments: object, page: int = PAGE, **options: object) -> list[kv.Tensor]:
        ops.init_kvcached("cuda:0", page, contiguous)
        return ops.create_kv_tensors(*arguments, **options)


class Memory(Case):
    def test_page_of_the_contiguous_layout_has_all_layers(self) -> None:
        (tensor,) = self.create(True, 48 * PAGE, 2, "cuda:0", 3)
        self.assertEqual((tensor.shape, tensor.dtype), ((3 * 48 * PAGE // 2,), "int16"))
        (own,) = self.ranges
        # Three layers of keys and values: 12 MiB, in one granule.
        self.assertEqual(own.granule, 6 * PAGE)
        self.assertTrue(ops.map_to_kv_tensors([6 * PAGE, 18 * PAGE]))
        self.assertEqual(own.committed(), [1, 3])
        self.assertTrue(ops.unmap_from_kv_tensors([18 * PAGE]))
        self.assertEqual(own.committed(), [1])

    def test_large_page_has_granules_of_at_most_64_mib(self) -> None:
        self.create(True, 20 * PAGE, 1, "cuda:0", 80)
        self.assertEqual(self.ranges[0].granule, 32 * PAGE)
        ops.map_to_kv_tensors([160 * PAGE])
        self.assertEqual(self.ranges[0].committed(), [5, 6, 7, 8, 9])
        self.create(True, 20 * PAGE, 1, "cuda:0", 61, num_kv_buffers=1)
        self.assertEqual(self.ranges[1].granule, PAGE)

    def test_page_of_separate_tensors_is_in_keys_and_values(self) -> None:
        for page in (PAGE, 2 * PAGE):
            tensors = self.create(False, 8 * page, 2, "cuda:0", 3, page=page)
            own = self.ranges[-1]
            self.assertEqual([it.pool.address - own.address for it in tensors], [0, 8 * page, 16 * page])
            self.assertEqual(tensors[0].shape, (4 * page,))
            ops.map_to_kv_tensors([page, 3 * page])
            self.assertEqual(own.committed(), [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23])
            self.assertEqual(own.granule, page)

    def test_page_of_a_unified_pool_is_in_each_tensor_once(self) -> None:
        self.create(False, 5 * PAGE, 1, "cuda:0", 2, num_kv_buffers=1, unified_pool=True)
        ops.map_to_kv_tensors([4 * PAGE])
        self.assertEqual(self.ranges[0].committed(), [4, 9])

    def test_pages_without_room_are_refused_as_a_whole(self) -> None:
        self.create(False, 8 * PAGE, 2, "cuda:0", 3)
        own = self.ranges[0]
        own.room = 9
        ops.map_to_kv_tensors([0])
        with self.assertRaisesRegex(RuntimeError, "1 pages of 2097152 bytes: there is no room"):
            ops.map_to_kv_tensors([PAGE])
        self.assertEqual(own.committed(), [0, 4, 8, 12, 16, 20])
        own.room = 12
        self.assertTrue(ops.map_to_kv_tensors([PAGE]))

    def test_page_that_cannot_be_unmapped_now_is_for_others(self) -> None:
        self.create(True, 8 * PAGE, 2, "cuda:0", 1)
        ops.map_to_kv_tensors([0, 2 * PAGE])
        self.ranges[0].decommit_answer = 1
        ops.unmap_from_kv_tensors([0])
        self.assertEqual([it & 7 for it in self.ranges[0].words[:2]], [kv.FREE, kv.IN_USE])
        ops.map_to_kv_tensors([0])
        self.assertEqual(self.ranges[0].committed(), [0, 1])

    def test_mapping_twice_changes_nothing(self) -> None:
        self.create(True, 8 * PAGE, 2, "cuda:0", 1)
        for _ in range(2):
            self.assertTrue(ops.map_to_kv_tensors([0, 0]))
        for _ in range(2):
            self.assertTrue(ops.unmap_from_kv_tensors([0]))
        self.assertEqual(self.ranges[0].committed(), [])
        for wrong in ([PAGE], [-2 * PAGE], [8 * PAGE]):
            with self.assertRaises(ValueError):
                ops.map_to_kv_tensors(wrong)

    def test_mapping_tells_which_pages_are_new(self) -> None:
        self.assertEqual(ops.map_to_kv_tensors_with_result([0]), (False, []))
        self.create(False, 8 * PAGE, 1, "cuda:0", 1)
        self.assertEqual(ops.map_to_kv_tensors_with_result([0]), (True, [0]))
        self.assertEqual(ops.map_to_kv_tensors_with_result([PAGE, 0, PAGE]), (True, [PAGE]))
        self.assertEqual(ops.map_to_kv_tensors_with_result([0]), (True, []))

    def test_prepared_pages_keep_memory_until_commit(self) -> None:
        self.assertFalse(ops.prepare_unmap_from_kv_tensors([0], "a"))
        self.create(True, 8 * PAGE, 1, "cuda:0", 2, num_kv_buffers=1)
        ops.map_to_kv_tensors([0, 2 * PAGE, 4 * PAGE])
        for _ in range(2):
            self.assertTrue(ops.prepare_unmap_from_kv_tensors([0, 4 * PAGE, 6 * PAGE], "a"))
        self.assertEqual(self.ranges[0].committed(), [0, 1, 2])
        for call in (
            lambda: ops.map_to_kv_tensors([6 * PAGE]),
            lambda: ops.unmap_from_kv_tensors([2 * PAGE]),
            lambda: ops.prepare_unmap_from_kv_tensors([2 * PAGE], "b"),
            lambda: ops.commit_unmap_from_kv_tensors("b"),
            lambda: ops.abort_unmap_from_kv_tensors("b"),
        ):
            with self.assertRaisesRegex(RuntimeError, "another unmap transaction is pending: a"):
                call()
        for _ in range(2):
            self.assertTrue(ops.commit_unmap_from_kv_tensors("a"))
        self.assertEqual(self.ranges[0].committed(), [1])
        # The answer was lost; the page is used again.
        self.assertEqual(ops.map_to_kv_tensors_with_result([0]), (True, [0]))
        self.assertTrue(ops.prepare_unmap_from_kv_tensors([0], "a"))
        self.assertTrue(ops.commit_unmap_from_kv_tensors("a"))
        self.assertEqual(self.ranges[0].committed(), [0, 1])
        with self.assertRaisesRegex(RuntimeError, "cannot abort a committed unmap transaction: a"):
            ops.abort_unmap_from_kv_tensors("a")

    def test_aborted_pages_stay_mapped(self) -> None:
        self.create(True, 8 * PAGE, 1, "cuda:0", 2, num_kv_buffers=1)
        ops.map_to_kv_tensors([0])
        ops.prepare_unmap_from_kv_tensors([0], "a")
        for _ in range(2):
            self.assertTrue(ops.abort_unmap_from_kv_tensors("a"))
        self.assertEqual(ops.map_to_kv_tensors_with_result([0]), (True, []))
        # This one is aborted before it is prepared.
        self.assertTrue(ops.abort_unmap_from_kv_tensors("b"))
        for transaction in ("a", "b"):
            with self.assertRaisesRegex(RuntimeError, "cannot commit an aborted"):
                ops.prepare_unmap_from_kv_tensors([0], transaction)
            with self.assertRaisesRegex(RuntimeError, "cannot commit an aborted"):
                ops.commit_unmap_from_kv_tensors(transaction)
        self.assertEqual(self.ranges[0].committed(), [0])

    def test_transactions_are_forgotten_in_order(self) -> None:
        self.create(True, 8 * PAGE, 1, "cuda:0", 2, num_kv_buffers=1)
        for it in range(ops._ENDED + 1):
            ops.prepare_unmap_from_kv_tensors([], str(it))
            ops.commit_unmap_from_kv_tensors(str(it))
        self.assertTrue(ops.commit_unmap_from_kv_tensors("1"))
        with self.assertRaisesRegex(RuntimeError, "unknown unmap transaction: 0"):
            ops.commit_unmap_from_kv_tensors("0")
        with self.assertRaises(ValueError):
            ops.prepare_unmap_from_kv_tensors([], "")

    def test_groups_are_apart_and_end_at_shutdown(self) -> None:
        self.create(True, 8 * PAGE, 2, "cuda:0", 1)
        self.assertEqual((ops.kv_tensors_created(), ops.kv_tensors_created(7)), (True, False))
        self.assertFalse(ops.map_to_kv_tensors([0], group_id=7))
        ops.create_kv_tensors(8 * PAGE, 2, "cuda:0", 2, group_id=7)
        ops.map_to_kv_tensors([0], group_id=7)
        self.assertEqual([it.committed() for it in self.ranges], [[], [0]])
        again = ops.create_kv_tensors(8 * PAGE, 2, "cuda:0", 2, group_id=7)
        self.assertEqual((len(self.ranges), len(again)), (2, 1))
        with self.assertRaises(RuntimeError):
            ops.create_kv_tensors(8 * PAGE, 2, "cuda:0", 3, group_id=7)
        ops.shutdown_kvcached()
        self.assertEqual((ops.kv_tensors_created(), [it.words for it in self.ranges]), (False, [None, None]))

    def test_commit_after_shutdown_touches_no_memory(self) -> None:
        self.create(True, 8 * PAGE, 2, "cuda:0", 1)
        ops.map_to_kv_tensors([0])
        for transaction in ("a", "b"):
            ops.prepare_unmap_from_kv_tensors([0], transaction)
            if transaction == "a":
                ops.commit_unmap_from_kv_tensors(transaction)
        group = ops._group(0)
        ops.shutdown_kvcached()
        for transaction in ("a", "b"):
            with self.assertRaisesRegex(RuntimeError, f"unknown unmap transaction: {transaction}"):
                group.end(transaction, commit=True)
        self.assertEqual(group.mapped, set())

    def test_wrong_arguments_are_refused(self) -> None:
        for arguments in (("xpu:0",), ("cuda", 3 << 20), ("cuda", -PAGE)):
            with self.assertRaises(ValueError):
                ops.init_kvcached(*arguments)
        with self.assertRaises(RuntimeError):
            self.create(True, 8 * PAGE, 3, "cuda:0", 1)
        with self.assertRaises(ValueError):
            self.create(False, 7 * PAGE, 1, "cuda:0", 1)

    def test_without_a_device_pages_are_in_the_host_s_memory(self) -> None:
        with mock.patch.object(kv, "_Elastic", side_effect=kv._NotElastic("no library")), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with mock.patch.object(kv, "_Device", side_effect=kv._NoDevice("no driver")):
                self.torch.cuda.is_available = lambda: False
                (tensor,) = self.create(True, 8 * PAGE, 2, "cuda", 1)
                self.assertEqual((tensor.__dlpack_device__(), len(said)), ((1, 0), 1))
                self.assertTrue(ops.map_to_kv_tensors([0]))
                ctypes.memset(tensor.pool.address, 7, 2 * PAGE)
                self.assertTrue(ops.unmap_from_kv_tensors([0]))
                name = f"gpumux-test-{os.getpid()}"
                self.assertGreater(ops.PageAllocator(1, PAGE, PAGE, ipc_name=name).get_avail_physical_pages(), 1 << 30)
                # Elsewhere the tensors must be the device's.
                self.torch.cuda.is_available = lambda: True
                with self.assertRaisesRegex(RuntimeError, "has not room"):
                    self.create(True, 8 * PAGE, 2, "cuda:0", 1)

    def test_full_device_is_an_error_and_has_no_other_memory(self) -> None:
        with mock.patch.object(kv, "_Elastic", side_effect=kv.PoolError("no room")), mock.patch.object(kv, "_Device") as device:
            with self.assertRaisesRegex(RuntimeError, "no room"):
                self.create(True, 8 * PAGE, 2, "cuda:0", 1)
        device.assert_not_called()
        # It may be tried again.
        self.create(True, 8 * PAGE, 2, "cuda:0", 1)


class Pages(Case):
    def allocator(self, pages: int, **options: object) -> ops.PageAllocator:
        self.create(True, 2 * pages * PAGE, 2, "cuda:0", 1)
        name = f"gpumux-test-{os.getpid()}"
        made = ops.PageAllocator(1, pages * PAGE, PAGE, ipc_name=name, **options)
        # Not only when it is collected: the next test's pool has the same file.
        self.addCleanup(made.release_shared_segment)
        self.addCleanup(made.stop_prealloc_thread)
        return made

    def test_blocks_of_a_page_are_those_wholly_in_it(self) -> None:
        self.assertEqual(ops.InternalPage.get_block_range(1, 100, 30), (4, 6))
        page = ops.InternalPage(1, 100)
        page.init(30)
        self.assertEqual((page.alloc(2), page.full(), page.empty()), ([4, 5], True, False))
        with self.assertRaises(RuntimeError):
            page.alloc(1)
        page.free(5)
        page.free_batch([4])
        self.assertEqual((page.empty(), page.get_free_blocks(), page.num_free_blocks()), (True, [5, 4], 2))

    def test_room_of_the_device_is_what_kvcached_may_use(self) -> None:
        pages = self.allocator(4)
        # 5% of the device stay free; a page has keys and values.
        self.free = 15 * PAGE
        self.assertEqual(pages.get_avail_physical_pages(), 5)
        self.free = 4 * PAGE
        self.assertEqual(pages.get_avail_physical_pages(), 0)

    def test_device_is_waited_for_before_pages_are_unmapped(self) -> None:
        for asynchronous in (False, True):
            pages = self.allocator(4, async_sched=asynchronous)
            pages._max = 0
            pages.free_page(pages.alloc_page().page_id)
            self.assertEqual(self.synchronized, int(asynchronous))

    def test_refused_page_stays_free(self) -> None:
        pages = self.allocator(4)
        self.ranges[0].room = 1
        self.assertEqual(pages.alloc_page().page_id, 0)
        with self.assertRaisesRegex(RuntimeError, "no room"):
            pages.alloc_page()
        self.assertEqual((pages.get_num_free_pages(), pages.get_num_inuse_pages()), (3, 1))
        self.ranges[0].room = 4
        self.assertEqual([pages.alloc_page().page_id for _ in range(3)], [1, 2, 3])
        with self.assertRaisesRegex(RuntimeError, "no page is free"):
            pages.alloc_page()

    def test_reserve_is_filled_used_and_trimmed(self) -> None:
        pages = self.allocator(32)
        pages.start_prealloc_thread()
        with pages._changed:
            self.assertTrue(pages._changed.wait_for(lambda: not pages._filling, 30))
        pages.stop_prealloc_thread()
        self.assertEqual((pages.get_num_reserved_pages(), self.ranges[0].committed()), (5, [0, 1, 2, 3, 4]))
        self.assertEqual(pages.get_page_state(), {"total_pages": 32, "free_pages": 32, "inuse_pages": 0, "reserved_pages": 5})
        own = [pages.alloc_page().page_id for _ in range(20)]
        pages.free_pages(own)
        self.assertEqual((pages.get_num_reserved_pages(), len(self.ranges[0].committed())), (10, 10))
        pages.trim()
        self.assertEqual((pages.get_num_reserved_pages(), self.ranges[0].committed()), (0, []))
        pages.reset_free_page_order()
        self.assertEqual(pages.alloc_page().page_id, 0)

    def test_reserve_that_cannot_be_filled_ends_and_is_filled_later(self) -> None:
        for owner, name in ((None, "_free_bytes"), (None, "_update"), (threading.Thread, "start")):
            pages = self.allocator(8)

            def unfilled(pages: ops.PageAllocator = pages) -> bool:
                with pages._changed:
                    return pages._changed.wait_for(lambda: not pages._filling, 5)

            with self.subTest(name):
                try:
                    with mock.patch.object(owner or pages, name, side_effect=RuntimeError("broken")):
                        pages.start_prealloc_thread()
                        self.assertTrue(unfilled())
                    pages.stop_prealloc_thread()
                    self.assertEqual((list(pages._free), list(pages._reserved)), (list(range(8)), []))
                    pages.start_prealloc_thread()
                    self.assertTrue(unfilled())
                    self.assertEqual(list(pages._reserved), [0, 1, 2, 3, 4])
                finally:
                    # Otherwise the cleanup does not end.
                    pages._filling = False

    def test_allocation_waits_for_the_reserve_that_is_being_filled(self) -> None:
        # Python's lock is free meanwhile: the callback is Python.
        pages = self.allocator(5)
        inside, go = threading.Event(), threading.Event()

        def map_pages(_world_size: int, _offsets: list[int]) -> None:
            inside.set()
            go.wait(30)

        pages.set_use_worker_ipc(True)
        pages.set_broadcast_map_callback(map_pages)
        pages.start_prealloc_thread()
        self.assertTrue(inside.wait(30))
        threading.Timer(0.05, go.set).start()
        self.assertEqual(pages.alloc_page().page_id, 0)

    def test_workers_map_and_unmap_at_offsets_of_pages(self) -> None:
        for contiguous, scale in ((True, 4), (False, 1)):
            pages = ops.PageAllocator(2, 8 * PAGE, PAGE, 3, contiguous_layout=contiguous, ipc_name=f"gpumux-test-{os.getpid()}")
            calls: list[object] = []
            pages.set_broadcast_map_callback(lambda size, offsets, calls=calls: calls.append((size, offsets)))
            pages.set_broadcast_unmap_callback(lambda size, offsets, calls=calls: calls.append((size, offsets)))
            pages._max = 0
            pages.alloc_page()
            pages.free_page(pages.alloc_page().page_id)
            self.assertEqual(calls, [(3, [0]), (3, [PAGE * scale]), (3, [PAGE * scale])])

    def assert_failed(self, pages: ops.PageAllocator) -> None:
        for call in (
            pages.alloc_page, pages.trim, pages.get_num_free_pages, lambda: pages.free_page(0), lambda: pages.free_pages([0]),
            lambda: pages.resize(0),
        ):  # fmt: skip
            with self.assertRaisesRegex(StateConsistencyError, "lost"):
                call()
        pages.stop_prealloc_thread()
        self.assertEqual(pages.get_transaction_state()["state"], "FAILED")
        self.assertNotIn(0, pages._free)

    def test_page_that_is_not_unmapped_is_never_given_again(self) -> None:
        pages = self.allocator(4)
        pages._max = 0
        pages.set_use_worker_ipc(True)
        pages.set_broadcast_map_callback(lambda _size, _offsets: None)
        pages.set_broadcast_unmap_callback(mock.Mock(side_effect=RuntimeError("lost")))
        self.assertEqual(pages.get_transaction_state()["state"], "HEALTHY")
        page = pages.alloc_page()
        with self.assertRaisesRegex(StateConsistencyError, "1 pages are not unmapped: lost"):
            pages.free_page(page.page_id)
        self.assert_failed(pages)

    def test_mapping_of_unknown_outcome_ends_the_pool(self) -> None:
        pages = self.allocator(4)
        answers = [None, RuntimeError("refused"), StateConsistencyError("lost")]
        pages.set_use_worker_ipc(True)
        pages.set_broadcast_map_callback(mock.Mock(side_effect=answers))
        pages.alloc_page()
        with self.assertRaisesRegex(RuntimeError, "page 1 is not mapped: refused") as refused:
            pages.alloc_page()
        self.assertNotIsInstance(refused.exception, StateConsistencyError)
        with self.assertRaisesRegex(StateConsistencyError, "lost"):
            pages.alloc_page()
        self.assert_failed(pages)

    def test_workers_get_one_change_at_a_time(self) -> None:
        pages = self.allocator(64)
        pages._max = 0
        inside: list[object] = []
        most = 0

        def change(_size: int, offsets: list[int]) -> None:
            nonlocal most
            inside.append(offsets)
            most = max(most, len(inside))
            time.sleep(0.001)
            inside.remove(offsets)

        def work() -> None:
            for _ in range(20):
                pages.free_page(pages.alloc_page().page_id)

        pages.set_use_worker_ipc(True)
        pages.set_broadcast_map_callback(change)
        pages.set_broadcast_unmap_callback(change)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for it in threads:
            it.start()
        for it in threads:
            it.join()
        self.assertEqual((most, pages.get_num_free_pages()), (1, 64))

    def test_file_of_pools_goes_with_the_last(self) -> None:
        first, second = self.allocator(4), self.allocator(4)
        path = Path(first._info.path)
        self.assertEqual(path, Path(second._info.path))
        for _ in range(2):
            self.assertTrue(first.release_shared_segment())
        self.assertTrue(path.exists())
        second.stop_prealloc_thread()
        second._info.release()
        self.assertFalse(path.exists())

    def test_file_of_another_engine_stays(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "own")
            pages = ops.PageAllocator(1, PAGE, PAGE, ipc_name=str(path))
            path.unlink()
            path.write_bytes(b"another's")
            del pages
            gc.collect()
            self.assertTrue(path.exists())
            self.assertTrue(ops.PageAllocator(1, PAGE, PAGE, ipc_name=f"{folder}/none/own").release_shared_segment())

    def test_released_file_is_not_made_again(self) -> None:
        pages = self.allocator(4)
        page = pages.alloc_page().page_id
        pages.release_shared_segment()
        for use in (lambda: pages.free_page(page), pages.trim, lambda: pages.resize(2 * PAGE)):
            use()
            self.assertFalse(Path(pages._info.path).exists())

    def test_file_of_another_engine_is_neither_written_nor_read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "own")
            for released in (False, True):
                path.unlink(missing_ok=True)
                pages = ops.PageAllocator(1, PAGE, PAGE, ipc_name=str(path))
                if released:
                    pages.release_shared_segment()
                path.unlink(missing_ok=True)
                path.write_bytes(bytes(range(24)))
                pages.trim()
                self.assertEqual((path.read_bytes(), pages.check_and_get_resize_target(PAGE)), (bytes(range(24)), -1))

    def test_file_write_error_is_reported_once_and_costs_no_page(self) -> None:
        pages = self.allocator(4)
        said = io.StringIO()
        with mock.patch("os.pwrite", side_effect=OSError("no room")), mock.patch("sys.stderr", said):
            self.assertEqual([pages.alloc_page().page_id for _ in range(4)], [0, 1, 2, 3])
        self.assertEqual(said.getvalue().count("cannot be written: no room\n"), 1)

    def test_limit_may_return_to_the_first_size(self) -> None:
        pages = self.allocator(8)
        pages.start_prealloc_thread()
        # A resize is refused while too many pages are on their way to the reserve.
        with pages._changed:
            self.assertTrue(pages._changed.wait_for(lambda: not pages._filling, 30))
        for size in (3, 8, 3):
            with open(pages._info.path, "r+b") as file:
                file.write((size * PAGE * 2).to_bytes(8, sys.byteorder))
            for _ in range(2):
                pages._next_look = 0
                self.assertEqual(pages.get_resize_target(), size * PAGE)
            self.assertTrue(pages.resize(pages.get_resize_target()))

    def test_limit_of_another_process_is_found(self) -> None:
        pages = self.allocator(16, group_id=0)
        pages.start_prealloc_thread()
        self.assertEqual(pages.get_resize_target(), -1)
        with open(pages._info.path, "r+b") as file:
            file.write((6 * PAGE * 2).to_bytes(8, sys.byteorder))
        pages._next_look = 0
        self.assertEqual(pages.get_resize_target(), 6 * PAGE)
        self.assertTrue(pages.resize(pages.get_resize_target()))
        pages.stop_prealloc_thread()
        own = [pages.alloc_page() for _ in range(6)]
        path = pages._info.path
        with open(path, "rb") as file:
            numbers = [int.from_bytes(file.read(8), sys.byteorder) for _ in range(3)]
        self.assertEqual((numbers, len(own)), ([6 * PAGE * 2, 6 * PAGE * 2, 0], 6))

    def test_random_use_never_gives_a_page_twice(self) -> None:
        for seed in range(6):
            rng = random.Random(seed)
            pages = self.allocator(40)
            own, have, size = self.ranges[-1], set(), 40
            if seed % 2:
                pages.start_prealloc_thread()
            for _ in range(400):
                own.room = rng.choice([8, 20, 40])
                way = rng.random()
                if way < 0.5:
                    try:
                        page = pages.alloc_page().page_id
                    except RuntimeError:
                        continue
                    self.assertNotIn(page, have)
                    have.add(page)
                elif way < 0.8 and have:
                    gone = rng.sample(sorted(have), min(len(have), rng.randint(1, 9)))
                    have -= set(gone)
                    pages.free_pages(gone)
                elif way < 0.9:
                    asked = rng.randint(0, 40)
                    if pages.resize(asked * PAGE):
                        size = asked
                    else:
                        self.assertTrue(len(have) > asked or seed % 2)
                else:
                    pages.trim()
                self.assertEqual((pages.get_num_inuse_pages(), pages.get_num_total_pages()), (len(have), size))
                self.assertLessEqual(have, set(own.committed()))
            pages.stop_prealloc_thread()
            reserved = set(pages._reserved)
            self.assertEqual(set(own.committed()), have | reserved)
            every = [*have, *reserved, *pages._free, *pages._reclaimed]
            self.assertEqual(sorted(every), list(range(pages._made)))


class Registration(unittest.TestCase):
    """Programs with a kvcached that prints where its module is from."""

    # 0.1.6: a module that is Python has the names of one that is not.
    WRAPPED = {"vmm_ops.py": "from kvcached._C import PageAllocator\n"}
    NATIVE = {**WRAPPED, "_C.py": "PageAllocator = None\n"}

    def program(
        self, command: list[str], kvcached: str = "from kvcached.vmm_ops import PageAllocator", files: dict[str, str] | None = None
    ) -> str:
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder, "kvcached")
            own.mkdir()
            (own / "__init__.py").write_text("")
            Path(folder, "torch.py").write_text("")
            (own / "manager.py").write_text(kvcached + "\nimport kvcached.vmm_ops\nprint(kvcached.vmm_ops.__file__)\n")
            for name, text in (files or {}).items():
                (own / name).write_text(text)
                if name.endswith(".pyc"):
                    py_compile.compile(str(own / name), str(own / name))
            Path(folder, "script.py").write_text(
                textwrap.dedent("""\
                import multiprocessing, sys
                def child():
                    import kvcached.manager
                if __name__ == "__main__":
                    import kvcached.manager
                    print(sys.argv[1:], flush=True)
                    process = multiprocessing.get_context("spawn").Process(target=child)
                    process.start()
                    process.join()
                    sys.exit(process.exitcode)
                """)
            )
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), folder])}
            done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
            return f"{done.returncode}\n{done.stdout}{done.stderr}"

    def test_program_and_its_processes_have_gpumux_s_module(self) -> None:
        for way in (["script.py", "-m", "x"], ["-m", "script", "-m", "x"]):
            said = self.program(["-m", "gpumux.compat.kvcached", *way])
            self.assertEqual(said, f"0\n{ops.__file__}\n['-m', 'x']\n{ops.__file__}\n")

    def test_import_is_enough(self) -> None:
        said = self.program(["-c", "import gpumux.compat.kvcached, kvcached.manager"])
        self.assertEqual(said, f"0\n{ops.__file__}\n")

    def test_native_module_stays_without_gpumux_s_library(self) -> None:
        for files in (self.NATIVE, {"vmm_ops.pyc": "PageAllocator = None\n"}):
            said = self.program(["-c", "import gpumux.compat.kvcached, kvcached.manager"], files=files)
            self.assertIn("use `gpumux run`", said)
            self.assertIn(f"/kvcached/{next(iter(files))}\n", said)

    def test_native_module_that_was_not_built_is_replaced(self) -> None:
        said = self.program(["-c", "import gpumux.compat.kvcached, kvcached.manager"], files=self.WRAPPED)
        self.assertEqual(said, f"0\n{ops.__file__}\n")

    def test_end_of_a_pool_is_kvcached_s_own_error(self) -> None:
        script = "import gpumux.compat.kvcached, gpumux.compat._kvcached_pages as own; print(own.StateConsistencyError)"
        said = self.program(["-c", script], files={"errors.py": "class StateConsistencyError(RuntimeError):\n    pass\n"})
        self.assertEqual(said, "0\n<class 'kvcached.errors.StateConsistencyError'>\n")

    def test_version_that_does_not_fit_is_refused(self) -> None:
        for use in (
            "from kvcached.vmm_ops import (\n    migrate_pages,\n)",
            "from kvcached import vmm_ops\nprint(vmm_ops.migrate_pages)",
            "import kvcached.vmm_ops as native\nprint(native.map_to_kv_tensors, native.migrate_pages)",
            "from kvcached import vmm_ops\nprint(getattr(vmm_ops, 'migrate_pages', None))",
        ):
            said = self.program(["-m", "gpumux.compat.kvcached", "script.py"], use, self.NATIVE)
            why = "kvcached of an unknown version does not fit: it uses migrate_pages of kvcached.vmm_ops"
            self.assertRegex(said, f"(?s)^1\n.*ImportError: {why}")

    def test_import_after_kvcached_is_refused(self) -> None:
        said = self.program(["-c", "import kvcached.manager, gpumux.compat.kvcached"], files=self.NATIVE)
        self.assertIn("ImportError: kvcached is imported already", said)

    def test_runner_without_a_program_prints_its_usage(self) -> None:
        for words in ([], ["-m"]):
            self.assertIn("usage: python -m gpumux.compat.kvcached", self.program(["-m", "gpumux.compat.kvcached", *words]))


if __name__ == "__main__":
    unittest.main()
