"""SGLang's KV cache in elastic memory, by hooks of its own registry: see `gpumux.sglang`.

The pool's buffers lie in an elastic range. The allocator gives out only pages with memory. A step
of the scheduler holds memory for what it may take; SGLang ends where an allocation fails that it has planned. What has to fit is known when the
scheduler is made: where it does not, all memory is committed then, and SGLang's own allocator goes on.
"""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any, Callable, Iterable

import torch

from gpumux import kv
from gpumux._slots import Slots, Spread
from gpumux.torch import allocator as memory_pool

logger = logging.getLogger("sglang.gpumux")
DEVICE, MIB2, GRANULE_MAX, SMALLEST = "cuda", 2 << 20, 64 << 20, 10 << 20
"""SMALLEST: PyTorch puts smaller buffers together."""
URGENT_S, IDLE_S, LAST_S, FIXED_S = 0.25, 0.5, 10.0, 60.0
NEW_TOKENS = 4096
"""For so many new tokens of a request SGLang keeps room, at most."""
_caches: list[Cache] = []

USED = {
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool": "_create_buffers",
    "sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator": "alloc free clear available_size free_group_begin free_group_end",
    "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator": (
        "alloc alloc_extend alloc_decode free clear available_size free_group_begin free_group_end"
    ),
    "sglang.srt.managers.scheduler:Scheduler": "get_next_batch_to_run process_batch_result on_idle is_fully_idle",
}
"""What is used of SGLang's classes: no version tells whether it fits, but these names."""

PLANNED = "server_args token_to_kv_pool_allocator running_batch last_batch waiting_queue chunked_req tree_cache"
"""What is used of SGLang's scheduler once it is made."""


class Unfit(Exception):
    """Why the KV cache isn't elastic."""


class Cache:
    """The KV cache of one pool of SGLang's."""

    def __init__(self, pool: Any) -> None:
        """Raises Unfit."""
        device = torch.device(pool.device)
        if type(pool).__name__ != "MHATokenToKVPool" or device.type != DEVICE:
            raise Unfit(f"a {type(pool).__name__} on {device.type}")
        if pool.kv_cache_layout not in ("nhd", "hnd") or getattr(pool, "is_quantized_kv_cache", False) or getattr(pool, "post_capture_active", False):
            raise Unfit("another layout or number format")
        if pool.memory_saver_adapter.enabled or pool.enable_custom_mem_pool:
            raise Unfit("--enable-memory-saver, or a memory pool for transfers: SGLang's memory is another's")
        row = pool.head_num * pool.head_dim * pool.store_dtype.itemsize
        if pool.head_dim != pool.v_head_dim:
            raise Unfit("keys and values have other sizes")
        self.page: int = pool.page_size
        self.slots_there: int = pool.size + pool.page_size
        self.buffers: int = 2 * pool.layer_num
        unit = math.lcm(row * self.page, MIB2)
        size = self.slots_there * row
        if unit > GRANULE_MAX or size < SMALLEST:
            raise Unfit(f"pages of {row * self.page} bytes a layer, {size} bytes in all")
        self.each: int = -(-size // unit) * unit
        index = device.index if device.index is not None else int(torch.cuda.current_device())
        try:
            self.range: Any = kv._Elastic(index, self.each * self.buffers, unit)
        except kv.PoolError as error:
            raise Unfit(str(error)) from None
        self.per: int = unit // (row * self.page)
        self.given, driver = 0, kv._Driver(index)

        def give(size: int, _device: int, _stream: int | None) -> int:
            if size <= self.each and self.given < self.buffers:
                self.given += 1
                return int(self.range.address) + (self.given - 1) * self.each
            try:
                return driver.alloc(size)
            except kv.PoolError:
                return 0

        self.give = give
        self.pool = torch.cuda.MemPool(memory_pool(give))
        view = kv.Tensor(self, (self.buffers, self.each), "int8")
        self.kind, self.device, self.address = self.range.kind, index, self.range.address
        self.bytes = torch.from_dlpack(view)
        self.allocator: Any = None
        self.scheduler: Any = None

    def _check_open(self) -> None:
        """For `kv.Tensor`."""

    def is_in(self, buffers: Iterable[Any]) -> bool:
        """Whether these are all in it, each in a part of its own."""
        places = sorted((int(it.data_ptr()) - int(self.range.address)) // self.each for it in buffers)
        return places == list(range(self.buffers))

    def adopt(self, allocator: Any) -> bool:
        """The pool's allocator is there: pages with memory are given out from now on, and those that it knows."""
        if self.allocator or (allocator.page_size, allocator.size + self.page) != (self.page, self.slots_there):
            return False
        spread, pages = Spread(self.range, self.buffers), self.slots_there // self.page
        self.allocator = allocator
        self.slots = Slots(spread, spread.granule // self.per, pages, self.fence, self.clear)
        self.clear(0, 1)
        return True

    def fix(self) -> None:
        """All has memory, always."""
        if self.range.commit(0, len(self.range.words), FIXED_S):
            raise RuntimeError("gpumux: there is no memory for SGLang's KV cache of a fixed size (use less: --mem-fraction-static, --max-total-tokens)")
        self.bytes.zero_()
        if self.allocator:
            self.allocator.gpumux = None
            self.allocator.clear()

    def clear(self, first: int, count: int) -> None:
        """Sets new granules to zero: what is behind a request's last token must be finite."""
        self.bytes[:, first * self.range.granule : (first + count) * self.range.granule].zero_()

    def fence(self) -> Fence:
        """Behind the work that the device was given so far."""
        of_model = getattr(self.scheduler, "forward_stream", None)
        return Fence([torch.cuda.current_stream(), *([of_model] if of_model else [])])

    # ---- a step of the scheduler -------------------------------------------------------------

    def begin(self) -> None:
        scheduler = self.scheduler
        lost = self.slots.back()
        if lost:
            drop(scheduler.tree_cache, lambda page: self.slots.granule_of(page // self.page) in lost)
            if any(self.slots._used[it] for it in lost):
                scheduler.tree_cache.reset()
                self.slots.give_all()
            self.slots.lose(lost)
        running = scheduler.running_batch.reqs
        last = scheduler.last_batch.reqs if scheduler.last_batch else []
        need = len(running) + len(last)
        waiting = [*scheduler.waiting_queue, *([scheduler.chunked_req] if scheduler.chunked_req else [])]
        more = 0
        if waiting:
            more = sum(self._room(it, 0) for it in (*running, *last)) + sum(self._room(it, len(it.origin_input_ids) + len(it.output_ids)) for it in waiting)
        wait_s = LAST_S if need == 1 else URGENT_S
        if need:
            self.slots.begin(need, more, wait_s=wait_s)
        else:
            self.slots.begin(more, 0, wait_s=IDLE_S)

    def _room(self, request: Any, prompt: int) -> int:
        """Pages that SGLang keeps for a request when it takes others in."""
        new: int = min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), NEW_TOKENS)
        return -(-(prompt + new) // self.page) + 1

    def rest(self) -> None:
        """The scheduler has nothing to do: what is used is the prefix cache's, unless sessions have a part."""
        free, cached = self.slots._free * self.page, self.scheduler.tree_cache.evictable_size()
        torch.cuda.synchronize()
        self.slots.rest(free + cached == self.allocator.size)


class Fence:
    def __init__(self, streams: Iterable[Any]) -> None:
        self.events = [torch.cuda.Event() for _ in streams]
        for event, stream in zip(self.events, streams):
            event.record(stream)

    def query(self) -> bool:
        return all(it.query() for it in self.events)

    def synchronize(self) -> None:
        for it in self.events:
            it.synchronize()


class First:
    """An order of eviction with these first."""

    def __init__(self, order: Any, nodes: Iterable[Any]) -> None:
        self.order, self.nodes = order, {id(it) for it in nodes}

    def get_priority(self, node: Any) -> Any:
        return id(node) not in self.nodes, self.order.get_priority(node)


def drop(tree: Any, is_lost: Callable[[int], bool]) -> None:
    """Evicts what has lost a slot, and what is behind it. Other trees than SGLang's own for one kind of layers keep it."""
    if type(tree).__name__ != "RadixCache":
        return
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    doomed, stack = [], [(tree.root_node, False)]
    while stack:
        node, gone = stack.pop()
        for child in node.children.values():
            bad = gone or any(map(is_lost, child.value.tolist()))
            doomed += [child] if bad else []
            stack.append((child, bad))
    order = tree.eviction_strategy
    tree.eviction_strategy = First(order, doomed)
    try:
        tree.evict(EvictParams(num_tokens=sum(len(it.value) for it in doomed)))
    finally:
        tree.eviction_strategy = order


def elastic(base: Any) -> Any:
    """An allocator of SGLang's whose pages have memory, where its pool is in elastic memory. Else it is as it was."""

    class Allocator(base):  # type: ignore[misc]
        gpumux: Cache | None = None
        free_pages: Any

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._held_back: list[Any] | None = None
            super().__init__(*arguments, **options)
            cache = getattr(self._kvcache, "gpumux", None)
            if cache and cache.adopt(self):
                self.gpumux, self.need_sort = cache, False
                self.free_pages = self.free_pages[:0]

        def _with(self, pages: int, call: Callable[[], Any]) -> Any:
            """Its own code takes pages from the first ones of a list, which has as many as it may take."""
            if not self.gpumux:
                return call()
            slots = self.gpumux.slots
            given = slots.take(min(pages, slots._available)) or []
            self.free_pages = torch.tensor(given, dtype=torch.int64, device=self.device)
            result = call()
            slots.give(given[len(given) - len(self.free_pages) :])
            self.free_pages = self.free_pages[:0]
            return result

        def alloc(self, need_size: int) -> Any:
            return self._with(need_size // self.page_size, lambda: super(Allocator, self).alloc(need_size))

        def alloc_extend(self, prefix_lens: Any, *arguments: Any, **options: Any) -> Any:
            tokens = options["extend_num_tokens"] if "extend_num_tokens" in options else arguments[4]
            most = int(tokens) // self.page_size + len(prefix_lens) + 1
            return self._with(most, lambda: super(Allocator, self).alloc_extend(prefix_lens, *arguments, **options))

        def alloc_decode(self, seq_lens: Any, *arguments: Any, **options: Any) -> Any:
            return self._with(len(seq_lens), lambda: super(Allocator, self).alloc_decode(seq_lens, *arguments, **options))

        def free(self, free_index: Any) -> None:
            if not self.gpumux:
                super().free(free_index)
            elif self._held_back is not None:
                self._held_back.append(free_index.clone())
            elif free_index.numel():
                self.gpumux.slots.give({it // self.page_size for it in free_index.tolist()})

        def free_segment(self, free_index: Any, **options: Any) -> None:
            if self.gpumux:
                self.free(free_index)
            else:
                super().free_segment(free_index, **options)

        def free_page_ids(self, page_ids: Any) -> None:
            if self.gpumux:
                self.free(page_ids * self.page_size)
            else:
                super().free_page_ids(page_ids)

        def free_group_begin(self) -> None:
            if self.gpumux:
                self._held_back = []
            else:
                super().free_group_begin()

        def free_group_end(self) -> None:
            if not self.gpumux:
                super().free_group_end()
                return
            pending, self._held_back = self._held_back, None
            if pending:
                self.free(torch.cat(pending))

        def available_size(self) -> int:
            """During a step, what it may take; else all that is free."""
            return int(self.gpumux.slots.num_free_blocks * self.page_size if self.gpumux else super().available_size())

        def clear(self) -> None:
            if self.gpumux:
                self._held_back = None
                self.gpumux.slots.give_all()
            else:
                super().clear()

    Allocator.__name__ = Allocator.__qualname__ = base.__name__
    return Allocator


def _made(pool: Any) -> Cache | None:
    try:
        cache = Cache(pool)
    except (Unfit, AttributeError) as why:  # A newer SGLang's pool may lack a name.
        logger.warning("gpumux: the KV cache has a fixed size: %s", why)
        return None
    _caches.append(cache)
    return cache


def create(original: Callable[..., Any], pool: Any) -> Any:
    """Around the pool's `_create_buffers`, with a buffer of its own for keys and for values of each layer."""
    cache = _made(pool)
    if cache is None:
        return original(pool)
    before = pool.enable_custom_mem_pool, pool.custom_mem_pool
    pool.enable_custom_mem_pool, pool.custom_mem_pool = True, cache.pool
    try:
        result = original(pool)
    finally:
        pool.enable_custom_mem_pool, pool.custom_mem_pool = before
    if cache.is_in([*pool.k_buffer, *pool.v_buffer]):
        pool.gpumux = cache
    return result


def fill(original: Callable[..., Any], pool: Any) -> Any:
    """Around the pool's `_create_buffers_normal`: keys and values of a layer are halves of one buffer, which begin in granules of their own here."""
    cache = _made(pool)
    if cache is None:
        return original(pool)
    shape = tuple(pool._kv_buffer_shapes()[0])
    halves = cache.bytes.view(pool.store_dtype).view(pool.layer_num, 2, -1, *shape[1:])
    pool.k_buffer = [it[0, : shape[0]] for it in halves]
    pool.v_buffer = [it[1, : shape[0]] for it in halves]
    pool.gpumux = cache
    return None


def _misfit(scheduler: Any, cache: Cache) -> str:
    if lacking := [it for it in PLANNED.split() if not hasattr(scheduler, it)]:
        return f"SGLang's scheduler has no {', '.join(lacking)}"
    own = scheduler.server_args
    several = [name for name in ("tp_size", "pp_size", "dp_size") if getattr(own, name, 1) > 1]
    return next(
        (
            why
            for why, there in (
                ("SGLang uses its memory in another way", cache.allocator is None or scheduler.token_to_kv_pool_allocator is not cache.allocator),
                (f"several processes ({', '.join(several)}) plan the same steps", several),
                ("speculative decoding", getattr(own, "speculative_algorithm", None)),
                ("prompts and decoding are apart", getattr(own, "disaggregation_mode", "null") != "null"),
                ("the hierarchical cache copies pages beside the scheduler", getattr(own, "enable_hierarchical_cache", False)),
            )
            if there
        ),
        "",
    )


def settle(_result: Any, scheduler: Any, *_arguments: Any, **_options: Any) -> None:
    """After the scheduler was made."""
    for cache in _caches:
        why = _misfit(scheduler, cache)
        if why:
            logger.warning("gpumux: the KV cache has a fixed size: %s", why)
            cache.fix()
            continue
        cache.scheduler, scheduler.gpumux = scheduler, cache
        logger.info("gpumux: the KV cache is elastic: %d tokens, %d in a granule of all layers", cache.slots_there - cache.page, cache.per * cache.page)


def plan(original: Callable[..., Any], scheduler: Any, *arguments: Any, **options: Any) -> Any:
    """Around `get_next_batch_to_run`."""
    cache = getattr(scheduler, "gpumux", None)
    if not cache or scheduler.is_fully_idle():
        return original(scheduler, *arguments, **options)
    cache.begin()
    try:
        return original(scheduler, *arguments, **options)
    finally:
        cache.slots.end()


def done(_result: Any, scheduler: Any, *_arguments: Any, **_options: Any) -> None:
    """After `process_batch_result`."""
    if cache := getattr(scheduler, "gpumux", None):
        cache.slots.end()


def idle(_result: Any, scheduler: Any, *_arguments: Any, **_options: Any) -> None:
    """After `on_idle`."""
    cache = getattr(scheduler, "gpumux", None)
    if cache and cache.slots._resting is None and scheduler.is_fully_idle():
        cache.rest()


def register(registry: Any, kinds: Any) -> None:
    """Registers all hooks. Raises Unfit with the names that this SGLang has not."""
    classes: dict[str, Any] = {}
    missing: list[str] = []
    for place, attributes in USED.items():
        module, name = place.split(":")
        of = getattr(importlib.import_module(module), name, None)
        classes[name] = of
        missing += [f"{name}.{it}" for it in attributes.split() if not hasattr(of, it)]
    if missing:
        raise Unfit(f"SGLang has no {', '.join(missing)}")
    scheduler, pool, allocators = "sglang.srt.managers.scheduler.Scheduler", "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool", "sglang.srt.mem_cache.allocator"
    if hasattr(classes["MHATokenToKVPool"], "_create_buffers_normal"):
        registry.register(f"{pool}._create_buffers_normal", fill, kinds.AROUND)
    else:
        registry.register(f"{pool}._create_buffers", create, kinds.AROUND)
    for name in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"):
        registry.register(f"{allocators}.{name}", elastic(classes[name]), kinds.REPLACE)
    registry.register(f"{scheduler}.__init__", settle, kinds.AFTER)
    registry.register(f"{scheduler}.get_next_batch_to_run", plan, kinds.AROUND)
    registry.register(f"{scheduler}.process_batch_result", done, kinds.AFTER)
    registry.register(f"{scheduler}.on_idle", idle, kinds.AFTER)
