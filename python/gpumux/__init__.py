"""What a program may tell the library that `gpumux run` preloads into it. Without the library all of it does nothing.

    import gpumux

    gpumux.hint(expected_us=300)      # a request came in: its work reaches the GPU in about 300 µs
    with gpumux.request():            # `gpumux ps --json` shows count, median and 99% of request times
        model(prepare(data))
    gpumux.progress(len(tokens))      # tokens per second feed the scaling profiles
    gpumux.advise(cache.data_ptr(), cache.nbytes, gpumux.DISCARDABLE)  # its contents need not survive a move
    gpumux.on_reclaim(function)       # has it free memory when others need some
    gpumux.sleep()                    # all memory of the tenant moves to the host, until its next work
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import operator
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from gpumux import _daemon
from gpumux._daemon import DaemonError as DaemonError

__version__ = "0.2.0"

HELD, ALREADY, NEEDLESS, TOO_EARLY, LATER, IMPOSSIBLE = 0, 1, 2, 3, 4, -1
"""What became of a hint: see include/gpumux.h."""

KEEP, COLD, DISCARDABLE = 0, 1, 2
DONE, LOST, UNKNOWN = 0, 1, -1
"""What may be said of memory, and the answers: see include/gpumux.h."""

_INT_MAX, _U64_MAX = (1 << 31) - 1, (1 << 64) - 1

# The process itself: the preloaded library is part of it.
_process = ctypes.CDLL(None)
_Reclaim = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
_reclaimers: list[Callable[[int, int], int]] = []
_serving = 0
"""The process whose library calls them."""
_locks: dict[int, Any] = {}
"""Of a process, held while it registers: a forked child has one of its own."""


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_process, name, None)
    if function is not None:
        function.argtypes, function.restype = arguments, result
    return function


_hint = _function("gpumux_hint", ctypes.c_int, ctypes.c_int, ctypes.c_uint)
_begin = _function("gpumux_begin", ctypes.c_uint64)
_end = _function("gpumux_end", None, ctypes.c_uint64)
_progress = _function("gpumux_progress", None, ctypes.c_uint64)
_advise = _function("gpumux_advise", ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
_on_reclaim = _function("gpumux_on_reclaim", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _whole(what: str, value: Any, most: int, least: int = 0) -> int:
    """A whole number in these bounds. ctypes makes another number of one that is not."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is a whole number, not {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"{what} is a whole number from {least} to {most}, not {number}")
    return number


def present() -> bool:
    """Whether the library is there."""
    return _hint is not None


def hint(device: int = 0, expected_us: int = 0) -> int:
    """Says that work for a device (its CUDA ordinal) comes in so many µs, 0 if that is not known."""
    device = _whole("device", device, _INT_MAX, -1)
    # More than a second is too early, however much it is.
    expected_us = min(max(0, _whole("expected_us", expected_us, sys.maxsize, -sys.maxsize)), _INT_MAX)
    return int(_hint(device, expected_us)) if _hint else NEEDLESS


def advise(address: int, size: int, advice: int) -> int:
    """Says something of device memory. `LOST`: it was discardable, and its contents are gone."""
    address, size, advice = _whole("address", address, _U64_MAX), _whole("size", size, _U64_MAX), _whole("advice", advice, _INT_MAX, -_INT_MAX)
    return int(_advise(address, size, advice)) if _advise else UNKNOWN


def on_reclaim(function: Callable[[int, int], int]) -> bool:
    """Has `function(device, missing)` called, in a thread of its own, when others need memory on a device: it frees what
    the program can do without and returns how many bytes that was. Where no function freed any, none is called again for 5 s. Returns whether
    that is possible.
    """
    if not callable(function):
        raise TypeError(f"on_reclaim takes a function, not {function!r}")
    if not _serves():
        return False
    _reclaimers.append(function)
    return True


def _serves() -> bool:
    """Whether the library calls `_reclaim`. One function does for all: it has places for 64."""
    global _serving
    with _locks.setdefault(os.getpid(), threading.RLock()):
        if _on_reclaim and _serving != os.getpid() and not _on_reclaim(ctypes.cast(_reclaim, ctypes.c_void_p), None):
            _serving = os.getpid()
            atexit.register(_serve_no_more)
        return _serving == os.getpid()


def _serve_no_more() -> None:
    """The interpreter must not be entered once it is ending. What the functions refer to ends with it."""
    _on_reclaim(None, None)
    _reclaimers.clear()


@_Reclaim  # type: ignore[untyped-decorator,unused-ignore]  # ctypes has no types for it.
def _reclaim(device: int, missing: int, _user: int | None) -> int:
    freed = 0
    for function in list(_reclaimers):
        if freed >= missing:
            break
        try:
            freed += max(0, int(function(device, missing - freed)))
        except BaseException as error:  # It cannot be raised anywhere.
            print(f"gpumux: giving memory back failed: {error!r}", file=sys.stderr)
    return min(freed, _U64_MAX)


def torch_cache(device: int, _missing: int) -> int:
    """For `on_reclaim`: the free blocks of PyTorch's caching allocator, on all devices."""
    import torch  # Only programs that have it use this.

    before = int(torch.cuda.memory_reserved(device))
    torch.cuda.empty_cache()
    return before - int(torch.cuda.memory_reserved(device))


def begin() -> int:
    """A request begins. The answer is for `end`, which another thread may call."""
    return int(_begin()) if _begin else 0


def end(request: int) -> None:
    """The request of a `begin` is done."""
    request = _whole("request", request, _U64_MAX)
    if _end:
        _end(request)


def progress(units: int) -> None:
    """So much more is done, in a unit of the program's own (tokens, samples): scaling profiles then compare the program with itself by it."""
    units = _whole("units", units, _U64_MAX, -_U64_MAX)
    if _progress and units > 0:
        _progress(units)


@contextlib.contextmanager
def request() -> Iterator[None]:
    """One request; one that ends by an exception is not counted."""
    number = begin()
    yield
    end(number)


@dataclass(frozen=True)
class Memory:
    """What the tenant has of one device, in bytes."""

    device: str
    """UUID, as NVML writes it."""
    in_use: int
    """On the device."""
    swapped: int
    """On the host."""
    pinned: int
    """Of `in_use`, what can't be moved."""
    guaranteed: int
    limit: int | None


@dataclass(frozen=True)
class Tenant:
    """The tenant of this process."""

    name: str
    class_: str
    """`latency`, `standard` or `batch`."""
    asleep: bool
    """Its memory is on the host."""
    memory: tuple[Memory, ...]


def tenant() -> Tenant | None:
    """The tenant of this process; None where no daemon manages it: without `gpumux run`, before its first context, without a daemon, in
    a container that has not the daemon's API. Raises `DaemonError` where the daemon does not answer within ten seconds, or ends meanwhile.
    """
    found = _daemon.own()
    if found is None:
        return None
    own = found[1]
    names = ("device", "in_use", "swapped", "pinned", "guaranteed", "limit")
    memory = tuple(Memory(**{name: it.get(name) for name in names}) for it in own["memory"])
    return Tenant(own["name"], own["class"], own["asleep"], memory)


def limits() -> tuple[Memory, ...]:
    """What the tenant has of each device, and may have; nothing where no daemon manages this process."""
    found = tenant()
    return found.memory if found else ()


def sleep() -> bool:
    """Moves all memory of the tenant to the host, also that of its other processes. It is back at the next work of any of them. Returns
    whether a daemon manages this process; raises `DaemonError` with the reason where memory cannot be moved, or the daemon ends meanwhile.
    """
    return _move("sleep")


def wake() -> bool:
    """Brings it back before that. Returns and raises as `sleep`."""
    return _move("wake")


def _move(what: str) -> bool:
    own = _daemon.own()
    if own is not None:
        _daemon.move(what, own[0])
    return own is not None
