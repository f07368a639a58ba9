"""What a program may tell the library that `gpumux run` preloads into it. Without the library all of it does nothing.

    import gpumux

    gpumux.hint(expected_us=300)      # a request came in: its work reaches the GPU in about 300 µs
    with gpumux.request():            # `gpumux ps --json` shows count, median and 99% of request times
        model(prepare(data))
    gpumux.advise(cache.data_ptr(), cache.nbytes, gpumux.DISCARDABLE)  # its contents need not survive a move
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

HELD, ALREADY, NEEDLESS, TOO_EARLY, LATER, IMPOSSIBLE = 0, 1, 2, 3, 4, -1
"""What became of a hint: see include/gpumux.h."""

KEEP, COLD, DISCARDABLE = 0, 1, 2
DONE, LOST, UNKNOWN = 0, 1, -1
"""What may be said of memory, and the answers: see include/gpumux.h."""

# The process itself: the preloaded library is part of it.
_process = ctypes.CDLL(None)
try:
    _hint, _begin, _end = _process.gpumux_hint, _process.gpumux_begin, _process.gpumux_end
    _advise = _process.gpumux_advise
except AttributeError:
    _hint = _begin = _end = _advise = None
else:
    _advise.argtypes, _advise.restype = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int], ctypes.c_int
    _hint.argtypes, _hint.restype = [ctypes.c_int, ctypes.c_uint], ctypes.c_int
    _begin.argtypes, _begin.restype = [], ctypes.c_uint64
    _end.argtypes, _end.restype = [ctypes.c_uint64], None


def present() -> bool:
    """Whether the library is there."""
    return _hint is not None


def hint(device: int = 0, expected_us: int = 0) -> int:
    """Says that work for a device (its CUDA ordinal) comes in so many µs, 0 if that is not known."""
    return _hint(device, max(0, expected_us)) if _hint else NEEDLESS


def advise(address: int, size: int, advice: int) -> int:
    """Says something of device memory. `LOST`: it was discardable, and its contents are gone."""
    return _advise(address, size, advice) if _advise else UNKNOWN


def begin() -> int:
    """A request begins. The answer is for `end`, which another thread may call."""
    return _begin() if _begin else 0


def end(request: int) -> None:
    """The request of a `begin` is done."""
    if _end:
        _end(request)


@contextlib.contextmanager
def request() -> Iterator[None]:
    """One request; one that ends by an exception is not counted."""
    number = begin()
    yield
    end(number)
