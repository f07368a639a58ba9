"""Pages of device memory for caches that grow and shrink, such as the KV cache of a language-model server.

    import gpumux.kv

    pool = gpumux.kv.Pool(bytes_max=64 << 30, page_bytes=2 << 20)
    cache = torch.from_dlpack(pool.tensor())  # one row of bytes a page; its address stays
    pages = pool.alloc(16)                    # their numbers, or None: there is no room now
    pool.free(pages)                          # others get their memory when they lack room
    keys = pool.cached(pages)                 # or: the contents may be of use again
    pages = pool.touch(keys)                  # None for each page whose contents are gone

Under `gpumux run` a pool has memory only behind the pages that it needs. What is free or cached is there for other tenants, which take it
without this program's help, whatever its threads do. Without the library that `gpumux run` preloads, the pool takes `bytes_max` of device
memory at once; without a device, of the host's memory. `Pool.kind` and a warning say so. Where there is a device and no room, a pool is not made.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import heapq
import itertools
import math
import mmap
import operator
import os
import sys
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence, Tuple

import gpumux

OUT, FREE, CACHED, IN_USE = 0, 1, 2, 3
"""States of a granule: see include/gpumux.h."""

_DONE, _NOT_YET, _FULL, _NATIVE = 0, 1, 2, -3
_NOT_INITIALIZED = 3
"""The driver's answer to a forked child."""
_GRANULE = 16 << 20
_LEAST_S = 0.005
"""Without any wait the library does not ask the daemon, which answers sooner than this where there is room."""
_LONGEST_S = 1e6
"""The longest wait: the library takes milliseconds in 32 bits."""
_SLICE_S = 0.25
"""So long the library is asked at a time: in between, signals are handled, a pool may close, and requests take turns."""
_TURN_S = 3.0
"""At the end of each such time, for a sixth of it, all that comes free is for the request that waits longest."""
_WHY = {
    _NOT_YET: "there is no room for one granule on the device now, or the process has 4096 ranges",
    _FULL: "one granule exceeds the tenant's memory limit, or all other memory is guaranteed",
    -1: "a granule is a multiple of 2 MiB, at most 64 MiB, and a range has at most 64 TiB",
    -2: "no context of the device is current",
    _NATIVE: "gpumux leaves this program's memory to the driver (GPUMUX_MEMORY=native, peer access, or a forked child)",
    -4: "the driver refuses to reserve addresses or to map memory",
}

_range_new = gpumux._function(
    "gpumux_range_new", ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p
)
_segment = gpumux._function("gpumux_segment", ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
_range_free = gpumux._function("gpumux_range_free", ctypes.c_int, ctypes.c_uint64)
_commit = gpumux._function(
    "gpumux_commit", ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint
)
_commit_part = gpumux._function(
    "gpumux_commit_part",
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint,
)  # fmt: skip
_decommit = gpumux._function("gpumux_decommit", ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
_mark = gpumux._function(
    "gpumux_mark", ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int
)


class PoolError(RuntimeError):
    """A pool cannot be made, or not in the way that was asked for."""


class _NotElastic(PoolError):
    """The library is missing, or leaves this program's memory to the driver."""


class _NoDevice(PoolError):
    """There is none for this program."""


@dataclass(frozen=True)
class Limits:
    """What a pool has, in bytes."""

    bytes_max: int
    """All pages."""
    target: int
    """So much it should keep: less than `bytes_max` for 10 s after others lacked room, or a request for pages was refused."""
    committed: int
    """Memory that is behind its pages."""
    in_use: int
    """Pages in use."""
    cached: int
    """Pages that are a cache, some of which may be gone."""
    taken: int
    """How many granules without a page in use were taken since it was made, for others or for other requests of the tenant."""
    taken_cached: int
    """Those of them that were a cache."""
    moved: int
    """How often a granule with pages in use was moved to the host."""


class _Header(ctypes.Structure):
    """`struct gpumux_range`"""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("address", "bytes", "granule", "granules", "target", "taken", "taken_cached", "moved")
    ]


class _Driver:
    """The driver API, and a context of the device: the one that is current, if it is of this device, else the primary context."""

    def __init__(self, device: int) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise _NoDevice(f"there is no CUDA driver: {error}") from None
        try:
            self.call("cuInit", 0)
        except PoolError as error:
            if self.library.cuInit(0) == _NOT_INITIALIZED:
                why = "a process that was forked after CUDA's start has no GPU (multiprocessing has another start method, `spawn`)"
                raise PoolError(f"{why}: {error}") from None
            raise _NoDevice(str(error)) from None
        there = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(there))
        if there.value and not 0 <= device < there.value:
            raise ValueError(f"no device {device}: this program sees {there.value}, counted from 0")
        self.context, current = ctypes.c_void_p(), ctypes.c_int(-1)
        if self.library.cuCtxGetDevice(ctypes.byref(current)) or current.value != device:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        else:
            self.call("cuCtxGetCurrent", ctypes.byref(self.context))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The context is current in this thread. Afterwards the one before is, or none: PyTorch's current device stays."""
        self.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def alloc(self, size: int) -> int:
        """The address of so many bytes."""
        at = ctypes.c_uint64()
        with self.current():
            self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return int(at.value)

    def free(self, address: int) -> None:
        with self.current():
            self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self.library, name)(*arguments):
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(error, ctypes.byref(text))
            raise PoolError(f"{name} answers {(text.value or b'an error').decode()} ({error})")


class _Elastic:
    """A range of gpumux's."""

    kind = "elastic"

    def __init__(self, device: int, size: int, granule: int) -> None:
        if not _range_new:
            raise _NotElastic("gpumux's library is not loaded (start the program with `gpumux run`)")
        at = ctypes.c_void_p()
        with _Driver(device).current():
            answer = _range_new(device, size, granule, ctypes.byref(at))
        if answer != _DONE or not at.value:
            error = _NotElastic if answer == _NATIVE else PoolError
            raise error(f"an elastic range of {size} bytes on device {device}: {_WHY.get(answer, answer)}")
        self.header = _Header.from_address(at.value)
        self.address, self.granule = int(self.header.address), granule
        self.words = (ctypes.c_uint32 * self.header.granules).from_address(at.value + ctypes.sizeof(_Header))

    def gone(self) -> bool:
        return not self.header.address

    def commit(self, first: int, count: int, wait_s: float, part: tuple[int, int] | None = None) -> int:
        """`part`: the name of a request that several ranks make, and their number. An older library has no such requests."""
        wait_s = max(_LEAST_S, wait_s)
        if part and _commit_part:
            return int(_commit_part(self.address, first, count, int(min(wait_s, _LONGEST_S) * 1000), *part))
        deadline = time.monotonic() + wait_s
        while True:
            start = time.monotonic()
            asked_s = min(max(_LEAST_S, deadline - start), _SLICE_S)
            answer = int(_commit(self.address, first, count, round(asked_s * 1000)))
            end = time.monotonic()
            # It answers early where waiting is of no use.
            if answer != _NOT_YET or end >= deadline or end < start + asked_s - 0.001:
                return answer

    def decommit(self, first: int, count: int) -> int:
        return int(_decommit(self.address, first, count))

    def mark(self, first: int, count: int, state: int) -> int:
        return int(_mark(self.address, first, count, state))

    def there(self, granules: Iterable[int]) -> list[int]:
        """Those that have memory."""
        return [it for it in granules if 0 < self.words[it] & 7 <= IN_USE]

    def generation(self, granule: int) -> int:
        return int(self.words[granule]) >> 3

    def committed(self) -> int:
        return sum(1 for word in self.words if word & 7) * self.granule

    def target(self) -> int:
        return int(self.header.target)

    def losses(self) -> dict[str, int]:
        return {name: int(getattr(self.header, name)) for name in ("taken", "taken_cached", "moved")}

    def close(self) -> None:
        _range_free(self.address)


class _Plain:
    """Memory that is there as a whole, and stays."""

    def __init__(self, size: int, granule: int) -> None:
        self.size, self.granule, self.process = size, granule, os.getpid()

    def gone(self) -> bool:
        """In a forked child: the memory is the parent's."""
        return os.getpid() != self.process

    def commit(self, _first: int, _count: int, _wait_s: float) -> int:
        return _DONE

    def decommit(self, _first: int, _count: int) -> int:
        return _DONE

    def mark(self, _first: int, _count: int, _state: int) -> int:
        return 0

    def generation(self, _granule: int) -> int:
        return 0

    def committed(self) -> int:
        return self.size

    target = committed

    def losses(self) -> dict[str, int]:
        return {"taken": 0, "taken_cached": 0, "moved": 0}


class _Device(_Plain):
    kind = "device"

    def __init__(self, device: int, size: int, granule: int) -> None:
        super().__init__(size, granule)
        self.driver = _Driver(device)
        self.address = self.driver.alloc(size)

    def close(self) -> None:
        self.driver.free(self.address)


class _Host(_Plain):
    kind = "host"

    def __init__(self, size: int, granule: int) -> None:
        super().__init__(size, granule)
        self.memory = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        if not self.gone():
            self.memory.madvise(mmap.MADV_REMOVE)  # The addresses go with the last view of them.


def _backing(device: int, size: int, granule: int, fallback: bool) -> Any:
    """An elastic range; where there is no such memory, and it is allowed, all of the memory at once. A device that is full is an error."""
    try:
        return _Elastic(device, size, granule)
    except (_NotElastic, _NoDevice) as error:
        if not fallback:
            raise
        why = str(error)
    try:
        plain: Any = _Device(device, size, granule)
    except _NoDevice as error:
        why = why if why == str(error) else f"{why}; {error}"
        try:
            plain = _Host(size, granule)
        except (OSError, OverflowError) as no_room:
            raise PoolError(f"{why}; the host has no room for {size} bytes: {no_room}") from None
    except PoolError as error:
        raise PoolError(f"{why}; all {size} bytes at once: {error}") from None
    where = "device" if plain.kind == "device" else "host"
    warnings.warn(f"gpumux.kv: all {size} bytes of {where} memory are taken now, and stay: {why}", stacklevel=3)
    return plain


def _granule_of(size: int) -> int:
    """Granules as small as a range of this size can have without having too many."""
    return next((it << 20 for it in (2, 4, 8) if size // (it << 20) <= 4096), 16 << 20)


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbours among sorted numbers: the first, and how many."""
    first = count = -1
    for number in numbers:
        if count > 0 and number == first + count:
            count += 1
            continue
        if count > 0:
            yield first, count
        first, count = number, 1
    if count > 0:
        yield first, count


def _numbers(what: str, given: Iterable[Any]) -> list[int]:
    """Python's own, which are as long as their values need: products of numpy's 32-bit page numbers are not."""
    given = list(given)
    try:
        return list(map(operator.index, given))
    except TypeError:
        return [gpumux._whole(what, it, sys.maxsize, -sys.maxsize) for it in given]  # It names the wrong one.


_Entry = Tuple[int, Tuple[int, ...]]
"""A cached page, and how often its granules had lost their memory."""


class _Claim(NamedTuple):
    """Pages that are to have memory."""

    pages: list[int]
    evicted: list[tuple[int, _Entry]]
    """The last of them, which were cached, by their keys."""
    lacking: list[int]
    """Granules that must have memory first."""


class _Refused(Exception):
    """No room, however long it is awaited."""


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _in_child() -> None:
    """Another thread of the parent may have held a lock."""
    for pool in list(_pools):
        pool._make_locks()


os.register_at_fork(after_in_child=_in_child)


def _release(memory: Any, reclaimers: list[Callable[[int, int], int]]) -> None:
    """Of a pool that is closed, or that nothing refers to any more."""
    for it in reclaimers:
        with contextlib.suppress(ValueError):  # None is called any more when Python ends.
            gpumux._reclaimers.remove(it)
    if not memory.gone():
        with contextlib.suppress(PoolError):  # Its context may have ended.
            memory.close()


class Pool:
    """Pages of one device's memory at addresses that stay.

    `bytes_max` are its addresses, `page_bytes` the size of a page, of any number of bytes. Memory comes in granules of `granule_bytes`
    (a multiple of 2 MiB, at most 64 MiB). With `fallback=False` it is an error where memory cannot be elastic.

    Its methods may be called by any thread, also while another one waits for memory. Pages must not be freed, cached or left to others
    while a kernel that uses them is still to run.
    """

    def __init__(
        self,
        bytes_max: int,
        page_bytes: int,
        *,
        device: int = 0,
        granule_bytes: int = _GRANULE,
        fallback: bool = True,
    ) -> None:
        sizes = {"bytes_max": bytes_max, "page_bytes": page_bytes, "granule_bytes": granule_bytes}
        bytes_max, page_bytes, granule_bytes = (gpumux._whole(name, it, 1 << 62) for name, it in sizes.items())
        device = gpumux._whole("device", device, gpumux._INT_MAX)
        if page_bytes <= 0 or bytes_max < page_bytes:
            raise ValueError(f"a pool has at least one page: {bytes_max} bytes in pages of {page_bytes}")
        if granule_bytes % (2 << 20) or not 0 < granule_bytes <= 64 << 20:
            raise ValueError(f"a granule is a multiple of 2 MiB, at most 64 MiB: {granule_bytes} bytes")
        self.device, self.page_bytes, self.pages = device, page_bytes, bytes_max // page_bytes
        granules = math.ceil(self.pages * page_bytes / granule_bytes)
        self._memory = _backing(device, granules * granule_bytes, granule_bytes, fallback)
        self.kind: str = self._memory.kind
        """`elastic`, `device` or `host`."""
        self.address: int = self._memory.address
        """Where page 0 is; page n is `n * page_bytes` behind it."""
        self.granule_bytes = granule_bytes
        self._make_locks()
        _pools.add(self)
        self._closed, self._process = False, os.getpid()
        self._reclaimers: list[Callable[[int, int], int]] = []
        # When Python ends, the driver frees all.
        self._release = weakref.finalize(self, _release, self._memory, self._reclaimers)
        self._release.atexit = False
        # Of each page: free, cached or in use. Of each granule: how many such pages reach into it, and how many requests await its memory.
        self._states = bytearray([FREE]) * self.pages
        self._in_use, self._has_cached, self._awaited = [0] * granules, [0] * granules, [0] * granules
        # Free pages by the granule in which they begin; granules that have some, the lowest first.
        self._free: list[list[int]] = [[] for _ in range(granules)]
        for page in reversed(range(self.pages)):
            self._free[page * page_bytes // granule_bytes].append(page)
        self._open = [granule for granule in range(granules) if self._free[granule]]
        self._is_open = bytearray(bool(it) for it in self._free)
        self._unused = self.pages
        # By key, the oldest first.
        self._cache: collections.OrderedDict[int, _Entry] = collections.OrderedDict()
        self._keys = 0
        # Pages of requests that are under way, and the keys of those that were cached and may be again.
        self._claimed = 0
        self._away: set[int] = set()
        # Threads that have used it.
        self._users: set[int] = set()

    def _make_locks(self) -> None:
        # The second is held while memory is awaited, and never taken by a thread that has the first.
        self._lock, self._asks = threading.RLock(), threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Of the requests that wait: since when, the oldest first.
        self._line: list[list[float]] = []

    # ---- pages -------------------------------------------------------------------------------

    def alloc(self, count: int, wait_s: float = 1.0) -> list[int] | None:
        """So many pages, with undefined contents; None when there is no room for them within about `wait_s`, which may be infinite. That
        is the answer at once beyond the tenant's limit, and where too many pages are in use and only this thread uses the pool.

        Where room is short, the pool's own cached pages go first, the oldest before the others; where these are too few, they stay. Requests
        of other threads have what is there while a larger one waits, but for half a second of every three. An exception while memory is
        awaited, such as KeyboardInterrupt, leaves all as before.
        """
        count, wait_s = operator.index(count), max(0.0, float(wait_s))
        if count < 0:
            raise ValueError(f"a number of pages is 0 or more: {count}")
        self._users.add(threading.get_ident())
        turn = [time.monotonic()]
        # What another request has for a moment may be there then.
        deadline = turn[0] + max(wait_s, 2 * _LEAST_S if self._claimed else 0)
        pages = None
        if not self._is_held_back(turn):
            pages = self._back(count)
            if pages is None:
                pages = self._back_own(count)
        if pages is not None or time.monotonic() >= deadline or not self._may_come(count):
            return pages
        try:
            with self._lock:
                self._line.append(turn)
            while (now := time.monotonic()) < deadline:
                pages = self._grow(count, turn, min(deadline, now + _SLICE_S))
                if pages is not None:
                    return pages
                with self._lock:
                    self._changed.wait(_LEAST_S)  # The turn of others.
        except _Refused:
            pass
        finally:
            with self._lock:
                self._line = [it for it in self._line if it is not turn]
                self._wake()
        return None

    def free(self, pages: Sequence[int]) -> None:
        """Their contents are not needed any more."""
        pages = _numbers("a page", pages)
        with self._lock:
            self._check_open()
            self._users.add(threading.get_ident())
            self._leave(pages)
            self._unpick(pages)
            self._settle(pages)
            self._wake()

    def cached(self, pages: Sequence[int]) -> list[int]:
        """Their contents can be made anew, and may be of use: a key for each, by which `touch` finds it."""
        pages = _numbers("a page", pages)
        with self._lock:
            self._check_open()
            self._users.add(threading.get_ident())
            self._leave(pages)
            keys = []
            for page in pages:
                self._keys += 1
                self._keep(self._keys, (page, tuple(self._memory.generation(it) for it in self._granules(page))))
                keys.append(self._keys)
            self._settle(pages)
            self._wake()
            return keys

    def touch(self, keys: Sequence[int]) -> list[int | None]:
        """Takes cached pages into use again: the number of each, or None where its contents are gone, or another thread's request awaits
        memory for it. Keys are used once."""
        keys = _numbers("a key", keys)
        with self._lock:
            self._check_open()
            gone = self._memory.gone()
            found: list[int | None] = []
            for key in keys:
                entry = self._cache.pop(key, None)
                if entry is None:
                    self._away.discard(key)
                    found.append(None)
                    continue
                page, generations = entry
                granules = self._granules(page)
                there = not gone and all(self._is_held(it) or not self._memory.mark(it, 1, IN_USE) for it in granules)
                there = there and generations == tuple(self._memory.generation(it) for it in granules)
                self._uncache(page)
                if there:
                    self._enter([page])
                else:
                    self._unpick([page])
                    self._settle([page])
                found.append(page if there else None)
            return found

    def trim(self) -> int:
        """Gives all memory without contents back now; how many bytes that were."""
        with self._lock:
            self._check_open()
            before = self._memory.committed()
            unused = (it for it, used in enumerate(self._in_use) if not used and not self._has_cached[it])
            for first, count in _runs(unused):
                self._memory.decommit(first, count)
            # Other threads may have got memory meanwhile.
            return max(0, int(before - self._memory.committed()))

    def limits(self) -> Limits:
        """What it has now."""
        with self._lock:
            self._check_open()
            cached = len(self._cache)
            return Limits(
                bytes_max=self.pages * self.page_bytes,
                target=min(int(self._memory.target()), self.pages * self.page_bytes),
                committed=self._memory.committed(),
                in_use=(self.pages - self._unused - cached) * self.page_bytes,
                cached=cached * self.page_bytes,
                **self._memory.losses(),
            )

    def on_reclaim(self, function: Callable[[int], object]) -> bool:
        """Has `function(missing)` called, in a thread of its own, when others lack so many bytes on the device, before pages in use are
        moved: it frees pages. Where no function of the process freed any, none is called again for 5 s. Returns whether that is possible."""

        if not callable(function):
            raise TypeError(f"on_reclaim takes a function, not {function!r}")

        own = weakref.ref(self)

        def call(device: int, missing: int) -> int:
            pool = own()
            if pool is None or device != pool.device or pool._closed or pool._memory.gone():
                return 0
            function(missing)
            return pool.trim()

        with self._lock:
            self._check_open()
            if self.kind != "elastic" or not gpumux.on_reclaim(call):
                return False
            self._reclaimers.append(call)
            return True

    def close(self) -> None:
        """Frees all of it; tensors of it must not be used any more. A pool to which nothing refers any more, no tensor either, is freed, too."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake()
        # A request that is under way ends first.
        with self._asks:
            self._release()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # ---- tensors -----------------------------------------------------------------------------

    def tensor(self, shape: Sequence[int] | None = None, dtype: str = "uint8") -> Tensor:
        """All of the pages, for `torch.from_dlpack` and others: a row for each, or as it is said. Of pages that are not in use the contents
        are undefined. NumPy's arrays of it are for reading only."""
        _code, bits = _dtype(dtype)
        if shape is None and self.page_bytes * 8 % bits:
            raise ValueError(f"a page of {self.page_bytes} bytes is no row of {dtype}")
        shape = tuple(_numbers("a length", shape)) if shape is not None else (self.pages, self.page_bytes * 8 // bits)
        if any(it < 0 for it in shape) or math.prod(shape) * bits // 8 > self.pages * self.page_bytes:
            raise ValueError(f"{shape} of {dtype} is more than {self.pages} pages of {self.page_bytes} bytes")
        return Tensor(self, shape, dtype)

    # ---- inside ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the pool is closed")
        if self._memory.gone() and os.getpid() == self._process:
            raise PoolError("the pool's memory is gone: its context has ended (cudaDeviceReset, cuCtxDestroy), or the program has freed its address")

    def _granules(self, page: int) -> range:
        first = page * self.page_bytes
        return range(first // self.granule_bytes, (first + self.page_bytes - 1) // self.granule_bytes + 1)

    def _granules_of(self, pages: Iterable[int]) -> list[int]:
        return sorted({granule for page in pages for granule in self._granules(page)})

    def _pick(self, count: int) -> list[int]:
        """Free pages at the lowest addresses."""
        pages: list[int] = []
        while len(pages) < count:
            granule = self._open[0]
            free = self._free[granule]
            while free and len(pages) < count:
                pages.append(free.pop())
            if not free:
                heapq.heappop(self._open)
                self._is_open[granule] = False
        self._unused -= count
        return pages

    def _unpick(self, pages: Iterable[int]) -> None:
        """These pages are free."""
        for page in pages:
            self._states[page] = FREE
            granule = self._granules(page)[0]
            self._free[granule].append(page)
            self._unused += 1
            if not self._is_open[granule]:
                self._is_open[granule] = True
                heapq.heappush(self._open, granule)

    def _can_have(self, count: int) -> bool:
        self._check_open()
        return not self._memory.gone() and count <= self._unused + len(self._cache)

    def _is_held(self, granule: int) -> bool:
        """Whether pages of it are in use, and have their memory."""
        return bool(self._in_use[granule] and not self._awaited[granule])

    def _backed(self) -> set[int]:
        """The granules that have memory which no thread awaits."""
        every = range(len(self._in_use))
        there = self._memory.there(every) if self.kind == "elastic" else every
        return {it for it in there if not self._awaited[it]}

    def _wake(self) -> None:
        """Pages have come free, or will not: those that wait look again."""
        if self._line:
            self._changed.notify_all()

    def _may_come(self, count: int) -> bool:
        """Whether waiting may help. Only other threads free pages meanwhile."""
        with self._lock:
            most = self.pages if len(self._users) > 1 else self._unused + len(self._cache) + self._claimed
            return not self._memory.gone() and count <= most

    def _is_held_back(self, turn: list[float]) -> bool:
        """It is the time of the request that waits longest."""
        line = self._line
        if not line:
            return False
        return line[0] is not turn and (time.monotonic() - line[0][0]) % _TURN_S > _TURN_S * 5 / 6

    def _within(self, backed: set[int]) -> tuple[bool, Callable[[int], bool]]:
        """Whether each page is within one granule, and what says of a page whether all of it is in these."""
        size, granule = self.page_bytes, self.granule_bytes
        if granule % size == 0:
            return True, lambda page: page * size // granule in backed
        return False, lambda page: backed.issuperset(self._granules(page))

    def _back(self, count: int) -> list[int] | None:
        """So many pages, if there is memory for them now. Other threads use the pool meanwhile."""
        claim, backed = None, False
        try:
            with self._lock:
                claim = self._claim(count)
            backed = claim is not None and self._commit(claim.lacking, time.monotonic()) == _DONE
            return claim.pages if claim and backed else None
        finally:
            if claim:
                self._end(claim, backed)

    def _grow(self, count: int, turn: list[float], until: float) -> list[int] | None:
        """So many pages, once there is memory for what the pool lacks. Other threads may have what it has meanwhile."""
        claim, done = None, False
        try:
            with self._lock:
                if not self._is_held_back(turn):
                    pages = self._back_own(count)
                    if pages is not None:
                        return pages
                    claim = self._claim_lacking(count)
                if claim is None:
                    self._check_open()
                    self._changed.wait(min(until - time.monotonic(), _SLICE_S / 5))
                    return None
            answer = self._commit(claim.lacking, until)
            if answer not in (_DONE, _NOT_YET):
                self._check_open()
                raise _Refused
            rest = self._back_own(count - len(claim.pages)) if answer == _DONE else None
            done = rest is not None
            return claim.pages + rest if rest is not None else None
        finally:
            if claim:
                self._end(claim, done)

    def _claim(self, count: int) -> _Claim | None:
        """Free pages at the lowest addresses, and the oldest cached ones where these are too few: they are in use."""
        if not self._can_have(count):
            return None
        keys = list(itertools.islice(self._cache, count - self._unused)) if count > self._unused else []
        return self._hold(self._pick(count - len(keys)), keys)

    def _claim_lacking(self, count: int) -> _Claim | None:
        """As many of these as have no memory: free pages, then cached ones, whose contents are gone."""
        if not self._can_have(count):
            return None
        backed = self._backed()
        within, has = self._within(backed)
        free: list[int] = []
        for granule in sorted(self._open):
            if not (within and granule in backed):
                free.extend(page for page in reversed(self._free[granule]) if not has(page))
        gone = [key for key, (page, _generations) in self._cache.items() if not has(page)]
        need = count - (self._unused - len(free)) - (len(self._cache) - len(gone))
        if need <= 0:
            return None
        self._take(free[:need])
        return self._hold(free[:need], gone[: max(0, need - len(free))])

    def _hold(self, pages: list[int], keys: Sequence[int]) -> _Claim:
        """These pages, which are not free any more, and cached ones are in use."""
        evicted = [(key, self._cache.pop(key)) for key in keys]
        if keys:
            self._away.update(keys)
        for _key, (page, _generations) in evicted:
            self._uncache(page)
        pages = pages + [page for _key, (page, _generations) in evicted]
        self._claimed += len(pages)
        lacking = [granule for granule in self._granules_of(pages) if not self._is_held(granule)]
        self._enter(pages)
        for granule in lacking:
            self._awaited[granule] += 1
        return _Claim(pages, evicted, lacking)

    def _end(self, claim: _Claim, backed: bool) -> None:
        """These pages have memory now, or they are what they were."""
        pages, evicted, lacking = claim
        with self._lock:
            for granule in lacking:
                self._awaited[granule] -= 1
            self._claimed -= len(pages)
            kept = [it for it in evicted if it[0] in self._away]
            if evicted:
                self._away.difference_update(key for key, _entry in evicted)
            self._wake()
            if backed or self._closed:
                return
            self._leave(pages)
            # Keys that were said to be gone meanwhile are.
            cached = {page for _key, (page, _generations) in kept}
            self._unpick(page for page in reversed(pages) if page not in cached)
            for key, entry in reversed(kept):
                self._keep(key, entry)
                self._cache.move_to_end(key, last=False)
            self._settle(pages)

    def _commit(self, granules: Sequence[int], until: float) -> int:
        """Has memory behind granules. One thread asks at a time: others may want the same ones, and what a refused request got is taken back."""
        if not granules:
            return _DONE
        if not self._asks.acquire(timeout=max(0.0, until - time.monotonic())):
            return _NOT_YET
        try:
            return _NOT_YET if self._closed else self._have(granules, until)
        finally:
            self._asks.release()

    def _have(self, granules: Sequence[int], until: float) -> int:
        answers = (int(self._memory.commit(first, count, until - time.monotonic())) for first, count in _runs(granules))
        return next((it for it in answers if it != _DONE), _DONE)

    def _back_own(self, count: int) -> list[int] | None:
        """Pages that have memory already: free ones at the lowest addresses, then the oldest cached ones."""
        with self._lock:
            before = None
            while self._can_have(count):
                backed = self._backed()
                _within, has = self._within(backed)
                free = (page for granule in sorted(backed.intersection(self._open)) for page in reversed(self._free[granule]))
                unused = list(itertools.islice(filter(has, free), count))
                cached = ((key, page) for key, (page, _generations) in self._cache.items() if has(page))
                evicted = dict(itertools.islice(cached, count - len(unused)))
                pages = [*unused, *evicted.values()]
                # Others may take some until they are in use. What they took is left out then.
                if len(pages) < count or pages == before:
                    break
                before, lacking = pages, [granule for granule in self._granules_of(pages) if not self._in_use[granule]]
                try:
                    if self._have(lacking, 0) == _DONE:
                        self._take(unused)
                        for key, page in evicted.items():
                            del self._cache[key]
                            self._uncache(page)
                        self._enter(pages)
                        return pages
                finally:
                    self._settle_granules(lacking)
            return None

    def _take(self, pages: Iterable[int]) -> None:
        """These pages are not free any more."""
        for page in pages:
            self._free[self._granules(page)[0]].remove(page)
            self._unused -= 1
        self._open = [granule for granule in self._open if self._free[granule]]
        heapq.heapify(self._open)
        self._is_open = bytearray(bool(it) for it in self._free)

    def _enter(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._states[page] = IN_USE
            for granule in self._granules(page):
                self._in_use[granule] += 1

    def _leave(self, pages: Sequence[int]) -> None:
        """These pages are in use, and no longer."""
        wrong = [page for page in pages if not 0 <= page < self.pages or self._states[page] != IN_USE]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages that are not in use: {wrong[:8]}" if wrong else "a page is named twice")
        for page in pages:
            for granule in self._granules(page):
                self._in_use[granule] -= 1

    def _keep(self, key: int, entry: _Entry) -> None:
        """A page is cached."""
        self._cache[key] = entry
        self._states[entry[0]] = CACHED
        for granule in self._granules(entry[0]):
            self._has_cached[granule] += 1

    def _uncache(self, page: int) -> None:
        for granule in self._granules(page):
            self._has_cached[granule] -= 1

    def _settle(self, pages: Iterable[int]) -> None:
        """Others may have what is not in use."""
        self._settle_granules(self._granules_of(pages))

    def _settle_granules(self, granules: Iterable[int]) -> None:
        by_state: dict[int, list[int]] = {FREE: [], CACHED: []}
        for granule in granules:
            if not self._in_use[granule]:
                by_state[CACHED if self._has_cached[granule] else FREE].append(granule)
        for state, own in by_state.items():
            for first, count in _runs(own):
                self._memory.mark(first, count, state)


# ---- DLPack --------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_TYPES = {
    f"{kind}{bits}": (code, bits)
    for code, kind, sizes in ((0, "int", (8, 16, 32, 64)), (1, "uint", (8, 16, 32, 64)), (2, "float", (16, 32, 64)), (4, "bfloat", (16,)))
    for bits in sizes
}
"""DLPack's code of a type, and its bits. A reader that does not know a type leaves the capsule, which keeps the pool."""
# Since DLPack 1.1.
_TYPES.update((f"float8_{kind}", (code, 8)) for code, kind in ((10, "e4m3fn"), (11, "e4m3fnuz"), (12, "e5m2"), (13, "e5m2fnuz"), (14, "e8m0fnu")))
_CPU, _CUDA = 1, 2
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _dtype(name: str) -> tuple[int, int]:
    if not isinstance(name, str):
        raise TypeError(f"a type is named as 'float16' is, not {name!r}")
    if name not in _TYPES:
        raise ValueError(f"no type of DLPack's: {name}")
    return _TYPES[name]


def alloc_together(pools: Sequence[Pool], count: int, wait_s: float = 1.0) -> list[list[int]] | None:
    """So many pages of each pool, such as those of one model on several GPUs, all or none: None when one of them has no room for them
    within about `wait_s`."""
    pools, deadline = list(pools), time.monotonic() + max(0.0, float(wait_s))
    found: list[list[int]] = []
    try:
        for pool in pools:
            pages = pool.alloc(count, deadline - time.monotonic())
            if pages is None:
                return None
            found.append(pages)
        given, found = found, []
        return given
    finally:
        for pool, pages in zip(pools, found):
            pool.free(pages)


class Tensor:
    """A pool's pages, or a part of a kept buffer, as an array, by DLPack (`torch.from_dlpack`, `cupy.from_dlpack`, `numpy.from_dlpack`).

    Arrays of it keep the pool. So does what `__dlpack__` returns, if no reader takes it.
    """

    def __init__(
        self, pool: Any, shape: tuple[int, ...], dtype: str, offset: int = 0, released: Callable[[], object] | None = None
    ) -> None:
        """`released` is called when its reader has no array of it any more, by whichever thread lets the last one go."""
        self.pool, self.shape, self.dtype, self.offset = pool, shape, dtype, offset
        self.released = released

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0) if self.pool.kind == "host" else (_CUDA, self.pool.device)

    def __dlpack__(self, *, dl_device: Any = None, copy: bool | None = None, **_wishes: Any) -> Any:
        self.pool._check_open()
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("arrays are the pool's own memory, on its device: copy what from_dlpack returns")
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        managed = _DLManagedTensor()
        managed.tensor.data = self.pool.address + self.offset
        managed.tensor.device_type, managed.tensor.device_id = self.__dlpack_device__()
        managed.tensor.ndim, managed.tensor.shape = len(self.shape), shape
        managed.tensor.code, managed.tensor.bits = _dtype(self.dtype)
        managed.tensor.lanes = 1
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        _exported[ctypes.addressof(managed)] = self, shape, managed
        return _capsule(ctypes.addressof(managed), b"dltensor", None)


# What readers look at, until they let it go.
_exported: dict[int, tuple[Tensor, Any, _DLManagedTensor]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # type: ignore[untyped-decorator,unused-ignore]  # ctypes has no types for it.
def _deleter(address: int) -> None:
    tensor = _exported.pop(address)[0]
    if tensor.released:
        tensor.released()


@atexit.register
def _leave() -> None:
    """Readers may end after Python, whose functions they can't call then: what they look at stays."""
    for _tensor, _shape, managed in list(_exported.values()):
        managed.deleter = None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_exported))
