"""vLLM with an elastic KV cache: memory is behind the blocks that are in use, and others may take the rest.

    gpumux run -- vllm serve MODEL --worker-cls gpumux.vllm.Worker [--kv-cache-memory-bytes 64000000000]
    gpumux run -- vllm serve MODEL --tensor-parallel-size 2 --distributed-executor-backend gpumux.vllm.Executor

The size of the KV cache is one of addresses: it may be as large as the device, whatever else is there. Where memory is short, vLLM has fewer free blocks,
and preempts its own requests. What doesn't fit (another version, pipeline parallelism, Mamba layers, no `gpumux run`) is logged, and vLLM's own memory is used.

Classes that vLLM lets its user choose do all of it. The worker lays the KV cache out in blocks and takes it from an elastic range; it chooses the
scheduler, which has memory behind free blocks. With tensor parallelism the executor chooses the scheduler, which has memory in all workers. A KV connector could do neither before a step is planned, and vLLM has one at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from typing import Any, Iterator

try:
    import torch
    import vllm
except ImportError as error:
    raise ImportError(f"gpumux.vllm is for programs that have PyTorch and vLLM: {error}") from error
try:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.kv_cache_interface import KVCacheTensor
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_worker import Worker as GpuWorker
except ImportError as error:
    if not (error.name or "vllm").startswith("vllm"):
        raise  # Of a package that vLLM needs.
    raise ImportError(
        f"gpumux.vllm is for vLLM 0.24 to 0.33, not vLLM {vllm.__version__} ({error}): leave --worker-cls out (the KV cache has a fixed size then)"
    ) from error
try:
    from vllm.v1.attention.backends.utils import get_kv_cache_layout
except ImportError:  # Since 0.29 a block may also be outside of the layers.
    get_kv_cache_layout = None

import gpumux
from gpumux import kv
from gpumux._blocks import Blocks, layout
from gpumux._ranks import Rank as Orders
from gpumux._ranks import Ranks
from gpumux.torch import allocator

logger = logging.getLogger("vllm.gpumux")
URGENT_S, IDLE_S, FIXED_S = 0.25, 0.5, 60.0
_kept: list[Any] = []  # What PyTorch and the device use until the process ends.

USED: dict[type, str] = {
    GpuWorker: "initialize_from_config _maybe_get_memory_pool_context",
    MultiprocExecutor: "_init_executor initialize_from_config collective_rpc",
    SyncScheduler: (
        "schedule update_from_output make_stats running waiting kv_cache_manager kv_cache_config num_lookahead_tokens max_num_scheduled_tokens "
        "max_num_running_reqs"
    ),
    KVCacheManager: "block_pool watermark_blocks",
    BlockPool: "blocks free_block_queue evict_blocks",
    KVCacheBlock: "block_id block_hash",
    KVCacheTensor: "size offset block_stride",
    Request: "num_tokens num_tokens_with_spec num_computed_tokens num_output_placeholders",
}
"""What is used of vLLM's classes: no version tells whether it fits, but these names."""
NOT_USED = "iter_blocks_after"
"""Of vLLM's list of free blocks: only a KV connector calls it."""


class Unfit(Exception):
    """Why the KV cache isn't elastic."""


def names(of: type) -> set[str]:
    """Methods, and attributes that are set when an object is made."""
    made = (getattr(it.__init__, "__code__", None) for it in of.__mro__)  # type: ignore[misc]
    return {*dir(of), *(name for code in made if code for name in code.co_names)}


def check() -> None:
    """Raises Unfit with what this vLLM has not, or has beside what gpumux knows."""
    unknown = [f"{of.__name__}.{name}" for of, own in USED.items() for name in own.split() if name not in names(of)]
    own = (it for it in vars(FreeKVCacheBlockQueue) if not it.startswith("_"))
    unknown += [f"FreeKVCacheBlockQueue.{it}" for it in own if not hasattr(Blocks, it) and it not in NOT_USED.split()]
    if unknown:
        raise Unfit(f"gpumux {gpumux.__version__} does not fit vLLM {vllm.__version__}: {', '.join(unknown)}")


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """A name that the objects of this vLLM have not is a reason, too."""
    try:
        yield
    except AttributeError as error:
        raise Unfit(f"gpumux {gpumux.__version__} does not fit vLLM {vllm.__version__}: {error}") from error


def in_one_process(parallel: Any) -> bool:
    """Whether vLLM's scheduler and its only worker are one process."""
    return parallel.world_size == 1 and parallel.distributed_executor_backend in (None, "uni")


class Layout:
    """How vLLM lays the KV cache out, all layers of a block in one piece."""

    def __init__(self, config: Any) -> None:
        """Raises Unfit."""
        self.config, self.tensors = config, config.kv_cache_tensors
        self.specs: list[Any] = []
        for group in config.kv_cache_groups:
            several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            self.specs += several.values() if several else [group.kv_cache_spec]
        if not self.specs or not self.tensors:
            raise Unfit("the model has no KV cache")
        block = self.block_bytes()
        fit = layout(block)
        if fit is None:
            raise Unfit(f"a block has {block >> 20} MiB, more than a granule (64 MiB): use a smaller --block-size")
        self.stride, self.granule = fit
        for spec in self.specs if self.stride != block else ():
            if self.stride % self.aligned(spec):
                raise Unfit(f"layers with {type(spec).__name__}: blocks of {block} bytes begin at multiples of {self.aligned(spec)} only")

    def block_bytes(self) -> int:
        """Of all layers. Raises Unfit where vLLM does not put them together."""
        raise NotImplementedError

    def aligned(self, _spec: Any) -> int:
        """The distance of blocks is a multiple of this."""
        return 1

    def place(self) -> None:
        """Sets the distance of blocks in vLLM's configuration."""
        for tensor in self.tensors:
            tensor.size, tensor.block_stride = self.stride * self.config.num_blocks, self.stride


class Packed(Layout):
    """Up to vLLM 0.28: a tensor for each layer, which can also be parts of blocks."""

    def block_bytes(self) -> int:
        for spec in self.specs:
            if not getattr(spec, "indexes_kv_by_block_stride", False):
                raise Unfit(f"layers with {type(spec).__name__}: their blocks can't be put together (try --attention-backend TRITON_ATTN)")
        if get_kv_cache_layout and get_kv_cache_layout() != "NHD":
            raise Unfit("vLLM's packed layout is for VLLM_KV_CACHE_LAYOUT=NHD")
        if not get_kv_cache_layout or any(it.block_stride or it.size % self.config.num_blocks for it in self.tensors):
            raise Unfit("vLLM lays the KV cache out in another way")
        return int(sum(it.size for it in self.tensors) // self.config.num_blocks)

    def place(self) -> None:
        offset = 0
        for tensor in self.tensors:
            tensor.offset, offset = offset, offset + tensor.size // self.config.num_blocks
        super().place()


class Placed(Layout):
    """Since vLLM 0.29: one tensor, in which the first layout of `get_supported_kv_cache_layouts` has blocks outside."""

    def block_bytes(self) -> int:
        for spec in self.specs:
            if not hasattr(spec, "head_size"):
                raise Unfit(f"layers with {type(spec).__name__}: they are not attention's")
        block = int(self.tensors[0].block_stride)
        for it in self.tensors:
            if getattr(it, "host_resident", False) or it.block_stride != block or it.size != block * self.config.num_blocks:
                raise Unfit(f"the layers of a block lie apart (layout {self.config.kv_cache_layout}; unset VLLM_KV_CACHE_LAYOUT)")
        return block

    def aligned(self, spec: Any) -> int:
        found = getattr(spec, "get_block_stride_alignment", None)
        return int(found() if found else spec.block_stride_alignment or 1)


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

    def fence(self) -> Any:
        return fence()

    def rests(self) -> bool:
        """Whether a fence can be awaited."""
        return True

    def is_of(self, tensor: Any) -> bool:
        """Whether a layer's tensor is from it."""
        storage = tensor.untyped_storage()
        if not self.given or storage.data_ptr() != self.range.address:
            return False
        self.bytes = torch.empty(0, dtype=torch.int8, device=tensor.device).set_(storage, 0, (self.size,), (1,))
        return True


class Together:
    """The KV caches of all workers, for a scheduler in a process of its own.

    When a step's result is there, all workers have done its work: the last thing they do for it together is what the result comes from.
    """

    def __init__(self, ranks: Ranks, stride: int, pinned: set[int]) -> None:
        self.range, self.stride, self.pinned = ranks, stride, pinned
        self.planned = self.done = 0

    def clear(self, first: int, count: int) -> None:
        """Each worker has done that."""

    def fence(self) -> Passed:
        return Passed(self, self.planned)

    def rests(self) -> bool:
        """Whether no step is under way."""
        return self.planned == self.done


class Passed:
    """Whether all steps have been done that were planned before."""

    def __init__(self, of: Together, steps: int) -> None:
        self.of, self.steps = of, steps

    def query(self) -> bool:
        return self.of.done >= self.steps

    def synchronize(self) -> None:
        """It is used only when no step is under way."""


def fence() -> Any:
    """An event behind the work that the device was given so far."""
    event = torch.cuda.Event()
    event.record()
    return event


def waiting(scheduler: Any) -> list[Any]:
    """Its lists of requests that wait: vLLM up to 0.28 has one of those that it skipped, later ones one of those that have blocks."""
    return [scheduler.waiting, getattr(scheduler, "skipped_waiting", ()), getattr(scheduler, "kv_holding_waiting", ())]


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
    for request in itertools.chain(*waiting(scheduler)):
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
        gpumux_counts = True

        def update_from_output(self, *arguments: Any, **options: Any) -> Any:
            result = super().update_from_output(*arguments, **options)
            try:
                tokens = sum(len(it.new_token_ids) for client in result.values() for it in client.outputs) if self.gpumux_counts else 0
            except (AttributeError, TypeError) as error:
                self.gpumux_counts, tokens = False, 0
                logger.warning("gpumux %s does not fit vLLM %s: tokens are not counted: %s", gpumux.__version__, vllm.__version__, error)
            if tokens:
                gpumux.progress(tokens)
            return result

    return Scheduler


def scheduler_class(base: type, memory: Memory | Together) -> type:
    """A scheduler of vLLM's whose free blocks have memory when a step uses them."""

    class Scheduler(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            pool = self.kv_cache_manager.block_pool
            free = pool.free_block_queue.get_all_free_blocks()
            self.gpumux = pool.free_block_queue = Blocks(
                memory.range, memory.stride, pool.blocks, free, pool.evict_blocks, memory.fence, memory.clear, memory.pinned
            )

        def _end(self) -> None:
            self.gpumux.end(not self.running and not self._waits() and memory.rests())

        def _waits(self) -> bool:
            return any(map(bool, waiting(self)))

        def schedule(self, *arguments: Any, **options: Any) -> Any:
            running, more = need(self)
            if self.running:
                self.gpumux.begin(running, more, self._waits(), URGENT_S)
            else:
                self.gpumux.begin(more, 0, self._waits(), IDLE_S)
            try:
                return super().schedule(*arguments, **options)
            finally:
                if isinstance(memory, Together):
                    memory.planned += 1
                self._end()

        def update_from_output(self, *arguments: Any, **options: Any) -> Any:
            result = super().update_from_output(*arguments, **options)
            if isinstance(memory, Together):
                memory.done += 1
            self._end()
            return result

        def make_stats(self, *arguments: Any, **options: Any) -> Any:
            stats = super().make_stats(*arguments, **options)
            if stats is not None:
                # Routers compare replicas by it: addresses without memory are no room.
                stats.kv_cache_usage = self.gpumux.usage
            return stats

    return Scheduler


def choose(config: Any, memory: Memory | Together | None, blocks: int) -> None:
    """Sets vLLM's scheduler in its configuration."""
    base = counting(AsyncScheduler if config.async_scheduling else SyncScheduler)
    if not memory:
        config.scheduler_cls = config.scheduler_cls or base
        return
    config.scheduler_cls = scheduler_class(base, memory)
    logger.info(
        "gpumux: the KV cache is elastic: %d blocks of %d KiB, %d in a granule",
        blocks, memory.stride >> 10, memory.range.granule // memory.stride,
    )  # fmt: skip


class Worker(GpuWorker):  # type: ignore[misc]
    """vLLM's worker, with an elastic KV cache where it is the only one."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        self.gpumux: Memory | None = None
        super().__init__(vllm_config, *arguments, **options)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        try:
            with fitting():
                self.gpumux = self._memory(kv_cache_config)
        except Unfit as why:
            logger.warning("gpumux: the KV cache has a fixed size: %s", why)
        super().initialize_from_config(kv_cache_config)
        if self.gpumux and not self.gpumux.is_of(self.model_runner.kv_caches[0]):
            logger.warning("gpumux: the KV cache has a fixed size: vLLM has not taken it from gpumux's memory")
            self.gpumux = None
        if in_one_process(self.vllm_config.parallel_config):
            choose(self.vllm_config.scheduler_config, self.gpumux, kv_cache_config.num_blocks)

    def _check_processes(self) -> None:
        """Raises Unfit where the scheduler is another process's."""
        parallel = self.vllm_config.parallel_config
        if not in_one_process(parallel):
            raise Unfit(
                f"vLLM has {parallel.world_size} workers of executor {parallel.distributed_executor_backend}, and its scheduler may be in another "
                "process (elastic: one GPU and --distributed-executor-backend uni, or gpumux.vllm.Executor)"
            )

    def _check(self) -> None:
        """Raises Unfit with what vLLM's configuration says against an elastic KV cache."""
        check()
        self._check_processes()
        if self.vllm_config.model_config.enable_cumem_allocator:
            raise Unfit("vLLM's sleep mode has memory of its own (use `gpumux.sleep()` instead)")
        if self.vllm_config.kv_transfer_config is not None:
            raise Unfit("a KV connector uses the KV cache beside the scheduler")
        if self.vllm_config.scheduler_config.scheduler_cls is not None:
            raise Unfit("another scheduler is chosen with --scheduler-cls")

    def get_supported_kv_cache_layouts(self) -> Any:
        """vLLM 0.29 and newer take the first: one in which all layers of a block lie together. Letters are dimensions, B of blocks."""
        found = super().get_supported_kv_cache_layouts()
        try:
            with fitting():
                self._check()
        except Unfit:
            return found
        return sorted(found, key=lambda it: not it.startswith("B")) if gpumux.present() else found

    def _memory(self, config: Any) -> Memory:
        self._check()
        own = (Placed if hasattr(config, "kv_cache_layout") else Packed)(config)
        memory = Memory(self.device.index, own.stride, own.granule, config.num_blocks)
        own.place()
        return memory

    @contextlib.contextmanager
    def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
        elastic = self.gpumux if tag == "kv_cache" else None
        with torch.cuda.use_mem_pool(elastic.pool) if elastic else super()._maybe_get_memory_pool_context(tag):
            yield


class Rank(Worker):
    """One of several workers. Its executor's process has memory put behind blocks."""

    def _check_processes(self) -> None:
        parallel = self.vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "nnodes"):
            if getattr(parallel, name, 1) > 1:
                raise Unfit(f"{name} is {getattr(parallel, name)}: workers have other blocks, or are on other machines")
        if getattr(self.vllm_config, "speculative_config", None) is not None:
            raise Unfit("speculative decoding with several GPUs: drafts are made after a step's result is there")

    def gpumux_listen(self, key: bytes) -> tuple[str, int, int, set[int]] | None:
        """Where orders are carried out from now on, and what a block and a granule have; None where the KV cache has a fixed size."""
        memory, stream = self.gpumux, torch.cuda.current_stream()
        if memory is None:
            return None

        def clear(first: int, count: int) -> None:
            # Before the next step's work, which this thread's order comes before.
            with torch.cuda.stream(stream):
                memory.clear(first, count)

        return Orders(memory.range, clear).listen(key), memory.stride, memory.range.granule, memory.pinned

    def gpumux_fix(self) -> None:
        """All has memory, always."""
        if self.gpumux and self.gpumux.range.commit(0, len(self.gpumux.range.words), FIXED_S):
            raise RuntimeError("gpumux: there is no memory for vLLM's KV cache of a fixed size (use less: --kv-cache-memory-bytes)")


class Executor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor of several workers, with an elastic KV cache in all of them, or in none."""

    def _init_executor(self) -> None:
        if self.parallel_config.worker_cls in (f"{GpuWorker.__module__}.{GpuWorker.__qualname__}", f"{__name__}.Worker"):
            self.parallel_config.worker_cls = f"{__name__}.Rank"
        else:
            logger.warning("gpumux: the KV cache has a fixed size: another worker is chosen: %s", self.parallel_config.worker_cls)
        super()._init_executor()

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        super().initialize_from_config(kv_cache_configs)
        memory = None
        if self.parallel_config.worker_cls == f"{__name__}.Rank":
            memory = self._meet()
        choose(self.vllm_config.scheduler_config, memory, kv_cache_configs[0].num_blocks)

    def _meet(self) -> Together | None:
        key = os.urandom(32)
        found = self.collective_rpc("gpumux_listen", args=(key,))
        alike = {(it[1], it[2], *sorted(it[3])) if it else None for it in found}
        if None in alike or len(alike) > 1:
            logger.warning("gpumux: the KV cache has a fixed size: not all workers have an elastic one of the same blocks")
            self.collective_rpc("gpumux_fix")
            return None
        _, stride, granule, pinned = found[0]
        return Together(Ranks([it[0] for it in found], key, granule), stride, pinned)
