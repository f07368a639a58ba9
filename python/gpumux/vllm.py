"""vLLM 0.24 with an elastic KV cache: memory is behind the blocks that are in use, and others may take the rest.

    gpumux run -- vllm serve MODEL --worker-cls gpumux.vllm.Worker [--kv-cache-memory-bytes 64000000000]

The size of the KV cache is one of addresses: it may be as large as the device, whatever else is there. Where memory is short, vLLM has fewer free blocks,
and preempts its own requests. What doesn't fit (another version, several GPUs, Mamba layers, no `gpumux run`) is logged, and vLLM's own memory is used.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import Any, Iterator

import torch
import vllm

try:
    from vllm.v1.attention.backends.utils import get_kv_cache_layout
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker
except ImportError as error:
    raise ImportError(
        f"gpumux.vllm is for vLLM 0.24, not vLLM {vllm.__version__} ({error}): leave --worker-cls out (the KV cache has a fixed size then)"
    ) from error

import gpumux
from gpumux import kv
from gpumux._blocks import Blocks, layout
from gpumux.torch import allocator

logger = logging.getLogger("vllm.gpumux")
VERSIONS = ("0.24.",)
URGENT_S, IDLE_S = 0.25, 0.5
_kept: list[Any] = []  # What PyTorch and the device use until the process ends.


class Unfit(Exception):
    """Why the KV cache isn't elastic."""


def in_one_process(parallel: Any) -> bool:
    """Whether vLLM's scheduler and its only worker are one process."""
    return parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni")


def pages(config: Any) -> list[int]:
    """Bytes of a block in each of vLLM's KV cache tensors. Raises Unfit."""
    specs = []
    for group in config.kv_cache_groups:
        several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        specs += several.values() if several else [group.kv_cache_spec]
    if not specs or not config.kv_cache_tensors:
        raise Unfit("the model has no KV cache")
    for spec in specs:
        if not getattr(spec, "indexes_kv_by_block_stride", False):
            raise Unfit(f"layers with {type(spec).__name__}: their blocks can't be put together (try --attention-backend TRITON_ATTN)")
    if any(it.block_stride or it.size % config.num_blocks for it in config.kv_cache_tensors):
        raise Unfit("vLLM lays the KV cache out in another way")
    return [it.size // config.num_blocks for it in config.kv_cache_tensors]


def pack(config: Any, sizes: list[int], stride: int) -> None:
    """Has vLLM put all layers of a block into one piece, blocks one after another: its own packed layout."""
    offset = 0
    for tensor, size in zip(config.kv_cache_tensors, sizes, strict=True):
        tensor.size, tensor.offset, tensor.block_stride = stride * config.num_blocks, offset, stride
        offset += size


class Memory:
    """An elastic range from which PyTorch takes the KV cache."""

    def __init__(self, device: int, stride: int, granule: int, blocks: int) -> None:
        self.size, self.stride = stride * blocks, stride
        try:
            self.range: Any = kv._Elastic(device, -(-self.size // granule) * granule, granule)
        except kv.PoolError as error:
            raise Unfit(str(error)) from None
        self.given = False
        # Warm-up and padded batches use block 0. PyTorch may use what is behind the last block, if it isn't at the end of 2 MiB.
        last = (self.size - 1) // granule
        self.pinned = {0} | ({last} if self.size % (2 << 20) else set())
        for number in self.pinned:
            if self.range.commit(number, 1, 10.0):
                self.range.close()
                raise Unfit("there is no memory for the first block")
        driver = kv._Driver(device)

        def give(size: int, _device: int, _stream: int | None) -> int:
            if not self.given and self.size <= size <= self.range.header.bytes:
                self.given = True
                return int(self.range.address)
            try:
                return driver.alloc(size)
            except kv.PoolError:
                return 0

        self.give = give
        self.pool = torch.cuda.MemPool(allocator(give))
        _kept.append(self)

    def clear(self, first: int, count: int) -> None:
        """Sets new granules to zero: what is behind a request's last token must be finite."""
        begin = first * self.range.granule
        with torch.inference_mode():
            self.bytes[begin : begin + count * self.range.granule].zero_()

    def is_of(self, tensor: Any) -> bool:
        """Whether a layer's tensor is from it."""
        storage = tensor.untyped_storage()
        if not self.given or storage.data_ptr() != self.range.address:
            return False
        self.bytes = torch.empty(0, dtype=torch.int8, device=tensor.device).set_(storage, 0, (self.size,), (1,))
        return True


def fence() -> Any:
    """An event behind the work that the device was given so far."""
    event = torch.cuda.Event()
    event.record()
    return event


def need(scheduler: Any) -> tuple[int, int]:
    """Blocks that the next step needs for its running requests, and can use for others, at most."""
    size = min(it.kv_cache_spec.block_size for it in scheduler.kv_cache_config.kv_cache_groups)
    groups, ahead = len(scheduler.kv_cache_config.kv_cache_groups), scheduler.num_lookahead_tokens
    running = more = 0
    for request in scheduler.running:
        there = request.num_computed_tokens
        tokens = request.num_tokens_with_spec + request.num_output_placeholders + ahead
        # Exact but for looking ahead: under pressure each block that is asked for too much would cost time.
        running += max(0, -(-tokens // size) + (there // -size))
    budget, room = scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs - len(scheduler.running)
    for request in itertools.chain(scheduler.waiting, scheduler.skipped_waiting):
        if budget <= 0 or room <= 0:
            break
        more += (request.num_tokens + ahead) // size + 1
        budget, room = budget - request.num_tokens, room - 1
    if more:
        more += scheduler.kv_cache_manager.watermark_blocks
    return running * groups, more * groups


def counting(base: type) -> type:
    """A scheduler of vLLM's that reports new tokens as progress, for scaling profiles."""

    class Scheduler(base):  # type: ignore[misc]
        def update_from_output(self, *arguments: Any, **options: Any) -> Any:
            result = super().update_from_output(*arguments, **options)
            gpumux.progress(sum(len(it.new_token_ids) for client in result.values() for it in client.outputs))
            return result

    return Scheduler


def scheduler_class(base: type, memory: Memory) -> type:
    """A scheduler of vLLM's whose free blocks have memory when a step uses them."""

    class Scheduler(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            pool = self.kv_cache_manager.block_pool
            free = pool.free_block_queue.get_all_free_blocks()
            self.gpumux = pool.free_block_queue = Blocks(
                memory.range, memory.stride, pool.blocks, free, pool.evict_blocks, fence, memory.clear, memory.pinned
            )

        def _waits(self) -> bool:
            return bool(self.waiting) or bool(self.skipped_waiting)

        def schedule(self, *arguments: Any, **options: Any) -> Any:
            running, more = need(self)
            if self.running:
                self.gpumux.begin(running, more, self._waits(), URGENT_S)
            else:
                self.gpumux.begin(more, 0, self._waits(), IDLE_S)
            try:
                return super().schedule(*arguments, **options)
            finally:
                self.gpumux.end(not self.running and not self._waits())

        def update_from_output(self, *arguments: Any, **options: Any) -> Any:
            result = super().update_from_output(*arguments, **options)
            self.gpumux.end(not self.running and not self._waits())
            return result

        def make_stats(self, *arguments: Any, **options: Any) -> Any:
            stats = super().make_stats(*arguments, **options)
            if stats is not None:
                # Routers compare replicas by it: addresses without memory are no room.
                stats.kv_cache_usage = self.gpumux.usage
            return stats

    return Scheduler


class Worker(GpuWorker):
    """vLLM's worker, with an elastic KV cache where it is the only one."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        self.gpumux: Memory | None = None
        super().__init__(vllm_config, *arguments, **options)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        try:
            self.gpumux = self._memory(kv_cache_config)
        except Unfit as why:
            logger.warning("gpumux: the KV cache has a fixed size: %s", why)
        super().initialize_from_config(kv_cache_config)
        if self.gpumux and not self.gpumux.is_of(self.model_runner.kv_caches[0]):
            logger.warning("gpumux: the KV cache has a fixed size: vLLM has not taken it from gpumux's memory")
            self.gpumux = None
        config = self.vllm_config.scheduler_config
        if not in_one_process(self.vllm_config.parallel_config):
            return  # The scheduler is another process's.
        base = counting(AsyncScheduler if config.async_scheduling else SyncScheduler)
        if not self.gpumux:
            config.scheduler_cls = config.scheduler_cls or base
            return
        config.scheduler_cls = scheduler_class(base, self.gpumux)
        logger.info(
            "gpumux: the KV cache is elastic: %d blocks of %d KiB, %d in a granule",
            kv_cache_config.num_blocks, self.gpumux.stride >> 10, self.gpumux.range.granule // self.gpumux.stride,
        )  # fmt: skip

    def _memory(self, config: Any) -> Memory:
        if not vllm.__version__.startswith(VERSIONS):
            raise Unfit(f"vLLM {vllm.__version__} is not one of {', '.join(VERSIONS)}x")
        parallel = self.vllm_config.parallel_config
        if not in_one_process(parallel):
            raise Unfit(
                f"vLLM has {parallel.world_size} workers of executor {parallel.distributed_executor_backend}, and its scheduler may be in another "
                "process (elastic: one GPU and --distributed-executor-backend uni)"
            )
        if self.vllm_config.model_config.enable_cumem_allocator:
            raise Unfit("vLLM's sleep mode has memory of its own (use `gpumux.sleep()` instead)")
        if self.vllm_config.kv_transfer_config is not None:
            raise Unfit("a KV connector uses the KV cache beside the scheduler")
        if self.vllm_config.scheduler_config.scheduler_cls is not None:
            raise Unfit("another scheduler is chosen with --scheduler-cls")
        if get_kv_cache_layout() != "NHD":
            raise Unfit("vLLM's packed layout is for VLLM_KV_CACHE_LAYOUT=NHD")
        sizes = pages(config)
        fit = layout(sum(sizes))
        if fit is None:
            raise Unfit(f"a block has {sum(sizes) >> 20} MiB, more than a granule (64 MiB): use a smaller --block-size")
        memory = Memory(self.device.index, *fit, config.num_blocks)
        pack(config, sizes, fit[0])
        return memory

    @contextlib.contextmanager
    def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
        elastic = tag == "kv_cache" and self.gpumux
        with torch.cuda.use_mem_pool(self.gpumux.pool) if elastic else super()._maybe_get_memory_pool_context(tag):
            yield
