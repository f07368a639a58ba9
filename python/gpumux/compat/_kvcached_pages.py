"""The pages of kvcached: which are free, in reserve or in use, and which blocks of a page are. Memory is the business of subclasses."""

from __future__ import annotations

import collections
import fcntl
import os
import struct
import sys
import threading
import time
import weakref
from typing import Any, Callable, Iterable, Sequence

try:
    from kvcached.errors import StateConsistencyError
except ImportError:  # before 0.1.6

    class StateConsistencyError(RuntimeError):  # type: ignore[no-redef]
        """It is not known which pages have memory: none may be used any more."""


_Broadcast = Callable[[int, "list[int]"], Any]

# As kvcached: so many pages have memory before they are needed, and so many of those that were freed keep theirs.
_MIN_RESERVED = int(os.getenv("KVCACHED_MIN_RESERVED_PAGES", "5"))
_MAX_RESERVED = int(os.getenv("KVCACHED_MAX_RESERVED_PAGES", "10"))
_UTILIZATION = float(os.getenv("KVCACHED_GPU_UTILIZATION", "0.95"))
_WATCH_S = 0.1

# By process, device and inode of a shared file: how many caches use it.
_users: collections.Counter[tuple[int, int, int]] = collections.Counter()
_users_lock = threading.RLock()


class InternalPage:
    """The blocks of a page."""

    def __init__(self, page_id: int, page_size: int) -> None:
        self.page_id, self.page_size = page_id, page_size
        self._blocks = 0
        self._free: list[int] = []

    def init(self, block_mem_size: int) -> None:
        """All blocks of this size are free."""
        first, end = self.get_block_range(self.page_id, self.page_size, block_mem_size)
        self._free, self._blocks = list(range(first, end)), end - first

    def alloc(self, num_blocks: int) -> list[int]:
        """So many blocks that were free."""
        if num_blocks > len(self._free):
            raise RuntimeError(f"page {self.page_id} has {len(self._free)} free blocks, not {num_blocks}")
        blocks, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return blocks

    def free(self, block_id: int) -> None:
        """A block is free."""
        self._free.append(block_id)

    def free_batch(self, block_ids: Iterable[int]) -> None:
        """Blocks are free."""
        self._free.extend(block_ids)

    def empty(self) -> bool:
        """Whether all blocks are free."""
        return len(self._free) == self._blocks

    def full(self) -> bool:
        """Whether none is."""
        return not self._free

    def num_free_blocks(self) -> int:
        """How many are."""
        return len(self._free)

    def get_free_blocks(self) -> list[int]:
        """Those that are."""
        return list(self._free)

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_mem_size: int) -> tuple[int, int]:
        """The first block that is wholly in a page, and the one after the last."""
        return -(-page_id * page_size // block_mem_size), (page_id + 1) * page_size // block_mem_size

    @staticmethod
    def get_num_blocks(page_size: int, block_mem_size: int) -> int:
        """Blocks that fit into a page."""
        return page_size // block_mem_size


class _Info:
    """The shared file by which `kvctl` and `kvtop` see and limit a cache: total, used and reserved bytes."""

    def __init__(self, name: str, total: int) -> None:
        self.path = os.path.join("/dev/shm", name)
        self._end: weakref.finalize[..., Any] | None = None
        self._said = False
        with _users_lock:
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                self._report(error)
                return
            self._at = os.fstat(file)
            user = (os.getpid(), self._at.st_dev, self._at.st_ino)
            _users[user] += 1
            # Open until then: its inode is no other file's.
            self._end = weakref.finalize(self, self._remove, self.path, file, user)
            self._write(0, total, 0, 0)

    def release(self) -> None:
        if self._end:
            self._end()

    @staticmethod
    def _remove(path: str, file: int, user: tuple[int, int, int]) -> None:
        """The last user removes the file, unless another has its name by now."""
        with _users_lock:
            _users[user] -= 1
            try:
                if not _users[user] and user[0] == os.getpid() and os.path.samestat(os.fstat(file), os.stat(path)):
                    os.unlink(path)
            except FileNotFoundError:
                pass
            finally:
                os.close(file)

    def _report(self, error: OSError) -> None:
        if not self._said:
            print(f"gpumux: kvcached's {self.path} cannot be written: {error}", file=sys.stderr)
        self._said = True

    def _open(self, flags: int) -> int | None:
        """None where the file was released or removed, or where another file has its name."""
        if not self._end or not self._end.alive:
            return None
        try:
            file = os.open(self.path, flags)
        except FileNotFoundError:
            return None
        if os.path.samestat(os.fstat(file), self._at):
            return file
        os.close(file)
        return None

    def _write(self, at: int, *numbers: int) -> None:
        try:
            file = self._open(os.O_RDWR)
            if file is None:
                return
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.pwrite(file, struct.pack(f"={len(numbers)}q", *numbers), at)
            finally:
                os.close(file)
        except OSError as error:
            self._report(error)

    def update(self, used: int, reserved: int) -> None:
        self._write(8, used, reserved)

    def total(self) -> int | None:
        try:
            file = self._open(os.O_RDONLY)
            if file is None:
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH)
                return int.from_bytes(os.pread(file, 8, 0), sys.byteorder, signed=True)
            finally:
                os.close(file)
        except OSError:
            return None


class PageAllocator:
    """Pages of the tensors of all layers: page n is at `n * page_size` in each, or in all together in the contiguous layout."""

    def __init__(
        self,
        num_layers: int,
        mem_size_per_layer: int,
        page_size: int,
        world_size: int = 1,
        pp_rank: int = 0,
        async_sched: bool = False,
        contiguous_layout: bool = True,
        enable_page_prealloc: bool = True,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        ipc_name: str = "",
    ) -> None:
        self.group_id, self._page_size, self._world_size, self._async = group_id, page_size, world_size, async_sched
        self._parts = num_layers * num_kv_buffers
        self._scale = self._parts if contiguous_layout else 1
        self._total = self._unused = self._made = mem_size_per_layer // page_size
        self._min, self._max = min(self._total, _MIN_RESERVED), min(self._total, _MAX_RESERVED)
        # Pages without memory, with memory that is not used, and beyond a limit that was set.
        self._free = collections.deque(range(self._total))
        self._reserved: collections.deque[int] = collections.deque()
        self._reclaimed: collections.deque[int] = collections.deque()
        # `_unused` also counts pages that are on their way between these.
        self._changed = threading.Condition()
        self._may_fill, self._on, self._filling = enable_page_prealloc, False, False
        self._broadcast_map: _Broadcast | None = None
        self._broadcast_unmap: _Broadcast | None = None
        self._remote = world_size > 1
        self._limit, self._target, self._next_look = mem_size_per_layer, -1, 0.0
        # Pages are mapped and unmapped by one thread at a time: other processes take one transaction at a time.
        self._mapping = threading.Lock()
        self._failure = ""
        if not ipc_name:
            base = os.getenv("KVCACHED_IPC_NAME") or f"kvcached_engine_{os.getpgrp()}"
            ipc_name = f"{base}_g{group_id}" if group_id else base
        self._info = _Info(ipc_name, mem_size_per_layer * self._parts)

    # ---- memory: subclasses have it ----------------------------------------------------------

    def _map(self, offsets: list[int]) -> bool:
        raise NotImplementedError

    def _unmap(self, offsets: list[int]) -> bool:
        raise NotImplementedError

    def _wait_for_device(self) -> None:
        raise NotImplementedError

    def _free_bytes(self) -> tuple[int, int]:
        """Free and all bytes of the device."""
        raise NotImplementedError

    def _offsets(self, pages: Iterable[int]) -> list[int]:
        return [page * self._page_size * self._scale for page in pages]

    def _check(self) -> None:
        if self._failure:
            raise StateConsistencyError(self._failure)

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = why
            self._changed.notify_all()

    def _map_pages(self, pages: Sequence[int]) -> None:
        with self._mapping:
            self._check()
            try:
                if self._remote and self._broadcast_map:
                    self._broadcast_map(self._world_size, self._offsets(pages))
                elif not self._map(self._offsets(pages)):
                    raise RuntimeError("there are no tensors")
            except StateConsistencyError as error:
                self._fail(str(error))
                raise

    def _unmap_pages(self, pages: Sequence[int]) -> None:
        """They are without memory, and free. Else no page can be used any more: kvcached's code frees these again."""
        with self._mapping:
            self._check()
            try:
                if self._remote and self._broadcast_unmap:
                    self._broadcast_unmap(self._world_size, self._offsets(pages))
                else:
                    if self._async:
                        self._wait_for_device()
                    if not self._unmap(self._offsets(pages)):
                        raise RuntimeError("there are no tensors")
            except Exception as error:
                self._fail(f"{len(pages)} pages are not unmapped: {error}")
                raise StateConsistencyError(self._failure) from error
        with self._changed:
            self._free.extend(pages)
            self._update()

    def _update(self) -> None:
        bundle = self._page_size * self._parts
        self._info.update((self._total - self._unused) * bundle, len(self._reserved) * bundle)
        self._changed.notify_all()

    # ---- pages -------------------------------------------------------------------------------

    def alloc_page(self) -> InternalPage:
        """A page with memory. RuntimeError: none is free, or there is no memory for it now."""
        with self._changed:
            self._check()
            while not self._reserved and not self._free:
                if self._unused <= 0 or not self._may_fill:
                    raise RuntimeError("no page is free")
                self._changed.wait(1.0)
                self._check()
            self._unused -= 1
            has_memory = bool(self._reserved)
            page = (self._reserved or self._free).popleft()
            if has_memory:
                self._fill_soon()
                self._update()
                return InternalPage(page, self._page_size)
        try:
            self._map_pages([page])
        except Exception as error:
            with self._changed:
                self._free.appendleft(page)
                self._unused += 1
                self._changed.notify_all()
            self._check()
            raise RuntimeError(f"page {page} is not mapped: {error}") from error
        with self._changed:
            self._fill_soon()
            self._update()
        return InternalPage(page, self._page_size)

    def free_page(self, page_id: int) -> None:
        """A page is not used any more."""
        self.free_pages([page_id])

    def free_pages(self, page_ids: Sequence[int]) -> None:
        """Pages are not used any more. Some keep their memory for the next."""
        with self._changed:
            self._check()
            kept = max(0, self._max - len(self._reserved))
            self._unused += len(page_ids)
            self._reserved.extend(page_ids[:kept])
            self._update()
        if page_ids[kept:]:
            self._unmap_pages(page_ids[kept:])

    def resize(self, new_mem_size: int) -> bool:
        """Sets how many pages there are, by the bytes of a layer; False while too many are in use."""
        pages = new_mem_size // self._page_size
        with self._changed:
            self._check()
            if pages < self._total - self._unused:
                return False
            if pages >= self._total:
                more = pages - self._total
                again = min(more, len(self._reclaimed))
                self._free.extend(self._reclaimed.popleft() for _ in range(again))
                self._free.extend(range(self._made, self._made + more - again))
                self._made += more - again
                self._total, self._unused = pages, self._unused + more
                self._update()
                return True
            enough = len(self._free) >= self._total - pages
        if not enough:
            self.trim()
        with self._changed:
            less = self._total - pages
            if not 0 <= less <= len(self._free):
                return False
            self._reclaimed.extend(self._free.pop() for _ in range(less))
            self._total, self._unused = pages, self._unused - less
            self._update()
            return True

    def trim(self) -> None:
        """Gives back memory that is in reserve."""
        with self._changed:
            self._check()
            pages = list(self._reserved)
            self._reserved.clear()
            self._update()
        if pages:
            self._unmap_pages(pages)

    def reset_free_page_order(self) -> None:
        """The lowest page comes next."""
        with self._changed:
            self._free = collections.deque(sorted(self._free))

    # ---- the reserve -------------------------------------------------------------------------

    def start_prealloc_thread(self) -> None:
        """From now on some pages have memory before they are needed."""
        with self._changed:
            self._on = self._may_fill
            self._fill_soon()

    def stop_prealloc_thread(self) -> None:
        """From now on none has."""
        with self._changed:
            self._on = False
            while self._filling:
                self._changed.wait(1.0)

    def _fill_soon(self) -> None:
        if self._on and not self._filling and len(self._reserved) < self._min:
            self._filling = True
            try:
                threading.Thread(target=self._fill, name="gpumux kvcached reserve", daemon=True).start()
            except RuntimeError as error:
                self._end_fill([], error)

    def _fill(self) -> None:
        pages: list[int] = []
        try:
            while True:
                with self._changed:
                    self._reserved.extend(pages)
                    pages = []
                    self._update()
                    lacking = min(self._min - len(self._reserved), len(self._free)) if self._on else 0
                    lacking = min(lacking, self.get_avail_physical_pages()) if lacking > 0 else 0
                    if lacking <= 0:
                        self._filling = False
                        return
                    pages = [self._free.popleft() for _ in range(lacking)]
                self._map_pages(pages)
        except Exception as error:
            self._end_fill(pages, error)

    def _end_fill(self, pages: list[int], error: Exception) -> None:
        with self._changed:
            self._free.extendleft(reversed(pages))
            self._filling = False
            self._changed.notify_all()
        print(f"gpumux: kvcached's reserve is not filled: {error}", file=sys.stderr)

    # ---- numbers -----------------------------------------------------------------------------

    def get_num_free_pages(self) -> int:
        """Pages that are not in use."""
        self._check()
        return self._unused

    def get_num_inuse_pages(self) -> int:
        """Pages that are."""
        return int(self.get_page_state()["inuse_pages"])

    def get_num_total_pages(self) -> int:
        """All pages."""
        return self._total

    def get_num_reserved_pages(self) -> int:
        """Pages in reserve."""
        return len(self._reserved)

    def get_page_state(self) -> dict[str, int]:
        """These four at one time."""
        with self._changed:
            return {
                "total_pages": self._total,
                "free_pages": self._unused,
                "inuse_pages": self._total - self._unused,
                "reserved_pages": len(self._reserved),
            }

    def get_transaction_state(self) -> dict[str, Any]:
        """Whether pages can be used. None are set apart: a page that is refused memory is as it was before."""
        return {
            "state": "FAILED" if self._failure else "HEALTHY",
            "quarantined_page_ids": [],
            "quarantined_pages": 0,
            "retained_bytes_upper_bound": 0,
            "last_error": self._failure,
        }

    def release_shared_segment(self) -> bool:
        """Has `kvctl` and `kvtop` not see the cache any more. No thread may use it."""
        self._info.release()
        return True

    def get_avail_physical_pages(self) -> int:
        """Pages for which the device has room."""
        free, total = self._free_bytes()
        return max(0, free - int(total * (1 - _UTILIZATION))) // self._page_size // self._parts

    def check_and_get_resize_target(self, current_mem_size: int) -> int:
        """The bytes of a layer to which `kvctl` has limited it; -1 where they are the current ones."""
        total = self._info.total()
        target = -1 if total is None else total // self._parts
        return -1 if target == current_mem_size else target

    def get_resize_target(self) -> int:
        """The last such limit, up to 0.1 s ago; -1 where there was none."""
        if self._on and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _WATCH_S
            target = self.check_and_get_resize_target(self._limit)
            if target >= 0:
                self._limit = self._target = target
        return self._target

    def get_page_id(self, block_id: int, block_mem_size: int) -> int:
        """The page in which a block begins."""
        return block_id * block_mem_size // self._page_size

    def group_indices_by_page(self, indices: Iterable[int], block_mem_size: int) -> dict[int, list[int]]:
        """Blocks by the page in which they begin."""
        pages: dict[int, list[int]] = {}
        for index in indices:
            pages.setdefault(index * block_mem_size // self._page_size, []).append(index)
        return pages

    # ---- other processes ---------------------------------------------------------------------

    def set_broadcast_map_callback(self, callback: _Broadcast) -> None:
        """Has `callback(world_size, offsets)` map pages in the processes that have the tensors."""
        self._broadcast_map = callback

    def set_broadcast_unmap_callback(self, callback: _Broadcast) -> None:
        """Has it unmap them."""
        self._broadcast_unmap = callback

    def set_use_worker_ipc(self, use_worker_ipc: bool) -> None:
        """Whether other processes have the tensors, even if there is one worker."""
        self._remote = use_worker_ipc or self._world_size > 1
