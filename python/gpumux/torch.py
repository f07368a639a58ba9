"""A memory pool of PyTorch's whose memory is elastic.

    import gpumux.torch, torch

    with torch.cuda.use_mem_pool(gpumux.torch.mem_pool()):
        weights = torch.empty(1 << 30, device="cuda")

Each segment that PyTorch takes for the pool is an elastic range. All of it is in use until PyTorch frees it, so that it moves to the host and back
as other memory. It is not there for others while PyTorch keeps it: for memory that follows what is in use, see `gpumux.kv`.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any, Callable

try:
    import torch
except ImportError as error:
    raise ImportError(f"gpumux.torch is for programs that have PyTorch: {error}") from error

from gpumux import kv

_Give = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_kept: list[Any] = []  # What PyTorch may call until the process ends.


def allocator(give: Callable[[int, int, int | None], int]) -> Any:
    """An allocator for `torch.cuda.MemPool` that never frees. `give(bytes, device, stream)` returns an address, or 0 where there is no memory.

    PyTorch also frees when the process ends, when no function of Python's can be called any more.
    """
    function = _Give(give)
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    made = torch._C._cuda_customAllocator(ctypes.cast(function, ctypes.c_void_p).value, nothing)
    _kept.append((function, made))
    return made


@functools.lru_cache(maxsize=None)
def _elastic() -> Any:
    """The allocator of all pools. PyTorch calls it with its allocator's lock held, so nothing of it may wait for Python's."""
    give, free = (ctypes.cast(it, ctypes.c_void_p).value for it in (kv._segment, kv._range_free))
    return torch._C._cuda_customAllocator(give, free)


def mem_pool(*, fallback: bool = True) -> Any:
    """A `torch.cuda.MemPool` whose memory is elastic, on the device that is current when memory is taken.

    Memory that others have is awaited for 30 s; then PyTorch raises torch.cuda.OutOfMemoryError, and the program may go on. Where memory
    can't be elastic, as without `gpumux run`, the pool has PyTorch's own memory and a warning has the reason; with `fallback=False` it is a
    PoolError. On a full device, without a GPU, or without `torch.cuda.MemPool`, it always is.
    """
    if not hasattr(torch.cuda, "MemPool"):
        raise kv.PoolError(f"PyTorch {torch.__version__} has no torch.cuda.MemPool: use 2.5 or newer")
    if not torch.cuda.is_available():
        raise kv.PoolError("PyTorch finds no GPU, and its memory pools are of GPUs (for memory of the host, use gpumux.kv.Pool)")
    try:
        kv._Elastic(torch.cuda.current_device(), 2 << 20, 2 << 20).close()
        if not kv._segment:
            raise kv._NotElastic("gpumux's library is older than this package, and has no segments")
    except kv._NotElastic as error:
        if not fallback:
            raise
        warnings.warn(f"gpumux.torch: the pool has PyTorch's own memory: {error}", stacklevel=2)
        return torch.cuda.MemPool()
    return torch.cuda.MemPool(_elastic())
