"""Tests of SGLang's KV cache in elastic memory with SGLang's own pool, allocators, prefix cache and registry, on the processor. They need an SGLang that
can be imported, with PyTorch:

PYTHONPATH=DIR python3 -m unittest discover -s python/tests -p test_sglang_wheel.py

DIR has what is in SGLang's wheel, and its dependencies. Its scheduler is made only on a GPU: a stand-in plans steps, with SGLang's functions.
"""

import importlib
import importlib.util
import random
import sys
import unittest
from array import array
from pathlib import Path
from types import SimpleNamespace as Some
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_blocks import Device, Range  # noqa: E402

from gpumux import kv  # noqa: E402

MIB = 1 << 20
LAYERS, HEADS, DIM = 2, 16, 128
ROW = HEADS * DIM * 2


def there() -> bool:
    return bool(importlib.util.find_spec("sglang") and importlib.util.find_spec("torch"))


class Host(Range):
    """A range with memory of the host."""

    kind = "host"

    def __init__(self, *arguments: int) -> None:
        import torch

        super().__init__(*arguments)
        self.bytes = torch.empty(arguments[1], dtype=torch.int8).fill_(77)
        self.address = self.bytes.data_ptr()


def planned(**options: object) -> Some:
    """Of SGLang's scheduler what is used."""
    names = ("server_args", "token_to_kv_pool_allocator", "running_batch", "last_batch", "waiting_queue", "chunked_req", "tree_cache")
    return Some(**dict.fromkeys(names) | options)


@unittest.skipUnless(there(), "SGLang is not installed")
class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        for name in ("managers.scheduler", "mem_cache.allocator", "mem_cache.memory_pool", "mem_cache.radix_cache"):
            importlib.import_module(f"sglang.srt.{name}")

    def setUp(self) -> None:
        import torch

        self.torch, self.module = torch, importlib.import_module("gpumux._sglang")
        self.module._caches.clear()
        self.device = Device()
        given: list = []

        def zeros(shape: object, dtype: object, device: str) -> object:
            """From the memory pool in use, as PyTorch does it."""
            size = torch.Size(shape).numel() * dtype.itemsize
            cache = given[0]
            offset = cache.give(size, 0, None) - cache.range.address
            return cache.range.bytes[offset : offset + size].view(dtype).view(shape)

        made = self.module.Cache.__init__

        def kept(cache: object, pool: object) -> None:
            made(cache, pool)
            given[:] = [cache]

        self.taking = zeros
        for of, name, by in (
            (kv, "_Elastic", Host), (kv, "_Driver", mock.MagicMock()), (self.module, "DEVICE", "cpu"), (self.module, "memory_pool", mock.MagicMock()),
            (self.module.Cache, "__init__", kept), (self.module.Cache, "fence", lambda _self: self.device.fence()),
            (torch.cuda, "synchronize", lambda: self.device.fence().synchronize()), (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "MemPool", mock.MagicMock()), (torch.cuda, "use_mem_pool", mock.MagicMock()),
        ):  # fmt: skip
            patch = mock.patch.object(of, name, by, create=True)
            patch.start()
            self.addCleanup(patch.stop)

    def made(self, slots: int, page: int) -> tuple:
        """SGLang's pool and allocator, by the hooks."""
        from sglang.srt.mem_cache import allocator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool = object.__new__(MHATokenToKVPool)
        options = dict(
            size=slots - page, page_size=page, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, layer_num=LAYERS, device="cpu", use_hnd=False, kv_cache_layout="nhd",
            store_dtype=self.torch.float16, dtype=self.torch.float16, enable_custom_mem_pool=False, custom_mem_pool=None, is_quantized_kv_cache=False,
            post_capture_active=False, memory_saver_adapter=mock.MagicMock(enabled=False), start_layer=0, _kv_vector_x=8,
        )  # fmt: skip
        for name, value in options.items():
            try:
                setattr(pool, name, value)
            except AttributeError:  # Newer versions derive it.
                pass
        plain = getattr(sys.modules[MHATokenToKVPool.__module__], "UnquantizedKVCacheMethod", None)
        pool.quant_method = plain and object.__new__(plain)
        with mock.patch.object(self.torch, "zeros", self.taking), mock.patch.object(MHATokenToKVPool, "_build_kv_buffer_descs", lambda _self: [], create=True):
            with mock.patch.object(MHATokenToKVPool, "_init_data_ptrs_and_strides", lambda _self: None, create=True):
                if hasattr(MHATokenToKVPool, "_create_buffers_normal"):
                    self.module.fill(MHATokenToKVPool._create_buffers_normal, pool)
                else:
                    self.module.create(MHATokenToKVPool._create_buffers, pool)
        base = allocator.TokenToKVPoolAllocator if page == 1 else allocator.PagedTokenToKVPoolAllocator
        of = self.module.elastic(base)
        options = dict(dtype=self.torch.float16, device="cpu", kvcache=pool, need_sort=False)
        return pool, of(slots - page, **options) if page == 1 else of(slots - page, page, **options)

    def test_buffers_are_in_the_range(self) -> None:
        pool, allocator = self.made(8192, 1)
        self.assertTrue(pool.gpumux.is_in([*pool.k_buffer, *pool.v_buffer]))
        self.assertEqual(int(pool.gpumux.bytes[:, : pool.gpumux.range.granule].sum()), 0)
        self.assertEqual((len(pool.k_buffer), tuple(pool.k_buffer[0].shape)), (LAYERS, (8192, HEADS, DIM)))
        self.assertEqual(allocator.available_size(), 8191)
        self.assertIsNone(pool.custom_mem_pool)

    def test_pool_that_is_not_adopted_has_all_memory(self) -> None:
        pool, _ = self.made(8192, 1)
        cache = pool.gpumux
        cache.allocator = None
        with self.assertLogs("sglang.gpumux", "WARNING") as logs:
            self.module.settle(None, planned())
        self.assertIn("in another way", logs.output[0])
        self.assertEqual({cache.range.state(it) for it in range(len(cache.range.words))}, {kv.IN_USE})

    def test_what_does_not_fit_has_sglang_s_allocator(self) -> None:
        for options, why in (({"tp_size": 2}, "tp_size"), ({"speculative_algorithm": "EAGLE"}, "speculative"), ({"enable_hierarchical_cache": True}, "hierarchical")):
            self.module._caches.clear()
            _, allocator = self.made(8192, 1)
            with self.assertLogs("sglang.gpumux", "WARNING") as logs:
                self.module.settle(None, planned(server_args=Some(**options), token_to_kv_pool_allocator=allocator))
            self.assertIn(why, logs.output[0])
            self.assertEqual((allocator.available_size(), len(allocator.free_pages)), (8191, 8191))
            self.assertEqual(allocator.alloc(8191).tolist(), list(range(1, 8192)))

    def test_names_that_are_not_there_have_sglang_s_allocator(self) -> None:
        """As a version newer than those that were known may be."""
        _, allocator = self.made(8192, 1)
        scheduler = planned(token_to_kv_pool_allocator=allocator)
        del scheduler.chunked_req, scheduler.last_batch
        with self.assertLogs("sglang.gpumux", "WARNING") as logs:
            self.module.settle(None, scheduler)
        self.assertIn("SGLang's scheduler has no last_batch, chunked_req", logs.output[0])
        self.assertEqual(allocator.alloc(8191).tolist(), list(range(1, 8192)))
        of = type("MHATokenToKVPool", (Some,), {})
        for hook in (self.module.create, self.module.fill):
            with self.assertLogs("sglang.gpumux", "WARNING") as logs:
                self.assertEqual(hook(lambda _pool: "its own", of(device="cpu")), "its own")
            self.assertIn("fixed size", logs.output[0])

    def test_pages_are_given_out_whole(self) -> None:
        pool, allocator = self.made(8192, 16)
        pool.gpumux.slots.begin(8, 0)
        found = allocator.alloc(64)
        self.assertEqual(found.tolist(), list(range(16, 80)))
        allocator.free(found[:32])
        self.assertEqual(allocator.alloc(1 << 20), None)
        pool.gpumux.slots.end()
        self.assertEqual(allocator.available_size(), 8192 - 16 - 32)
        module = sys.modules[type(allocator).__mro__[1].__module__]
        if hasattr(module, "alloc_decode_naive"):
            torch = self.torch
            allocator.use_triton_kernels = False
            pool.gpumux.slots.begin(8, 0)
            lens = torch.tensor([65, 40])
            out = allocator.alloc_decode(lens, lens, torch.tensor([79, 38]))
            pool.gpumux.slots.end()
            self.assertEqual((int(out[0]) % 16, int(out[1])), (0, 39))
            self.assertEqual(allocator.available_size(), 8192 - 16 - 32 - 16)

    def test_contents_stay_while_others_take_granules(self) -> None:
        """Requests with common prefixes run to their end, and each step reads what earlier ones wrote, as attention does."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        torch, random_ = self.torch, random.Random(2)
        pool, allocator = self.made(4096, 1)
        cache, memory = pool.gpumux, pool.gpumux.range
        tree = RadixCache(CacheInitParams(disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=1))
        scheduler = Some(
            server_args=Some(), token_to_kv_pool_allocator=allocator, tree_cache=tree, waiting_queue=[], running_batch=Some(reqs=[]), last_batch=None,
            chunked_req=None,
        )  # fmt: skip
        scheduler.is_fully_idle = lambda: not scheduler.waiting_queue and not scheduler.running_batch.reqs
        self.module.settle(None, scheduler)
        last = pool.v_buffer[-1]
        taken = hits = refused = 0

        def key(tokens: list) -> object:
            return RadixKey(array("q", tokens), None)

        def path(node: object) -> list:
            parts = []
            while node is not tree.root_node:
                parts.append(node.value.tolist())
                node = node.parent
            return [slot for part in reversed(parts) for slot in part]

        def write(request: Some, begin: int) -> None:
            for slot, token in zip(request.slots[begin:], request.tokens[begin : len(request.slots)]):
                pool.k_buffer[0][slot] = token
                last[slot] = token

        def room(count: int) -> bool:
            if allocator.available_size() < count:
                tree.evict(EvictParams(num_tokens=count - allocator.available_size()))
            return allocator.available_size() >= count

        def steps(_scheduler: object) -> None:
            nonlocal hits, refused
            for request in list(scheduler.running_batch.reqs):
                if not room(1):
                    refused += 1
                    scheduler.running_batch.reqs.remove(request)
                    allocator.free(torch.tensor(request.slots[request.shared :]))
                    tree.dec_lock_ref(request.node)
                    scheduler.waiting_queue.append(request)
                    continue
                request.tokens.append(random_.randrange(100))
                request.output_ids.append(0)
                request.slots += allocator.alloc(1).tolist()
                write(request, len(request.slots) - 1)
            for request in list(scheduler.waiting_queue):
                match = tree.match_prefix(MatchPrefixParams(key=key(request.tokens[:-1])))
                prefix = path(match.last_device_node)
                lacking = len(request.tokens) - len(prefix)
                tree.inc_lock_ref(match.last_device_node)
                if not room(lacking):
                    tree.dec_lock_ref(match.last_device_node)
                    break
                request.node, request.shared, request.slots = match.last_device_node, len(prefix), prefix + allocator.alloc(lacking).tolist()
                hits += len(prefix)
                write(request, len(prefix))
                scheduler.waiting_queue.remove(request)
                scheduler.running_batch.reqs.append(request)
            for request in scheduler.running_batch.reqs:
                slots = torch.tensor(request.slots)
                self.assertTrue(all(memory.state(it // cache.per + buffer * cache.slots.memory.each) == kv.IN_USE for it in request.slots for buffer in range(cache.buffers)))
                for buffer in (pool.k_buffer[0], last):
                    self.assertEqual(buffer[slots, 0, 0].tolist(), request.tokens[: len(request.slots)])

        prefixes = [[random_.randrange(100) for _ in range(300)] for _ in range(4)]
        left = [random_.choice(prefixes) + [random_.randrange(100) for _ in range(random_.randrange(1, 300))] for _ in range(60)]
        for _ in range(6000):
            if not left and scheduler.is_fully_idle():
                break
            for it in range(len(memory.words)):
                if random_.random() < 0.05 and memory.take(it):
                    memory.bytes[it * memory.granule : (it + 1) * memory.granule] = 77
                    taken += 1
            memory.room = random_.choice((10, 16, 24, len(memory.words)))
            while left and random_.random() < 0.05:
                scheduler.waiting_queue.append(
                    Some(tokens=left.pop(), slots=[], origin_input_ids=[0] * 300, output_ids=[], sampling_params=Some(max_new_tokens=random_.randrange(1, 30)))
                )
            self.module.plan(steps, scheduler)
            self.device.given += 1
            if random_.random() < 0.7:
                self.device.done = self.device.given
            for request in list(scheduler.running_batch.reqs):
                if len(request.output_ids) >= request.sampling_params.max_new_tokens:
                    scheduler.running_batch.reqs.remove(request)
                    done = torch.tensor(request.slots)
                    had = tree.insert(InsertParams(key=key(request.tokens[: len(done)]), value=done)).prefix_len
                    allocator.free(done[request.shared : had])
                    tree.dec_lock_ref(request.node)
            self.module.done(None, scheduler)
            if scheduler.is_fully_idle():
                self.module.idle(None, scheduler)
                self.assertEqual(allocator.available_size() + tree.evictable_size(), allocator.size)
        self.assertEqual((left, scheduler.running_batch.reqs), ([], []))
        self.assertGreater(taken, 20)
        self.assertGreater(hits, 1000)
        granules = range(cache.slots.memory.each)
        self.assertTrue(all(memory.state(it) != kv.IN_USE for it in granules if it))

    def test_with_sglang_s_registry_all_hooks_apply(self) -> None:
        # The last by its name: SGLang's classes have the hooks from now on.
        from sglang.srt.managers import scheduler
        from sglang.srt.mem_cache import allocator, memory_pool
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        before = memory_pool.MHATokenToKVPool, allocator.TokenToKVPoolAllocator, scheduler.Scheduler.get_next_batch_to_run
        self.addCleanup(HookRegistry.reset)
        self.module.register(HookRegistry, HookType)
        HookRegistry.apply_hooks()
        self.assertIs(memory_pool.MHATokenToKVPool, before[0])
        self.assertTrue(issubclass(allocator.TokenToKVPoolAllocator, before[1]) and allocator.TokenToKVPoolAllocator is not before[1])
        self.assertIs(scheduler.Scheduler.get_next_batch_to_run.__wrapped__, before[2])
        self.assertEqual(len(HookRegistry._patched), 7)


if __name__ == "__main__":
    unittest.main()
