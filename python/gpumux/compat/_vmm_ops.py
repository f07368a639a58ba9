"""What kvcached has in its native module `kvcached.vmm_ops`, on elastic ranges: see `gpumux.compat.kvcached`.

`map_to_kv_tensors` commits granules and `unmap_from_kv_tensors` decommits them. Where nothing is mapped, one granule is, as kvcached's
"zero page". Where the device has no memory left, these functions raise RuntimeError, for which kvcached's Python code frees blocks or has
requests wait. The native module did so only since 0.1.6; before, it aborted the process.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Iterable, Sequence

try:
    import torch
except ImportError as error:
    raise ImportError(f"gpumux.compat.kvcached is for programs that have PyTorch: {error}") from error

import gpumux
from gpumux import kv
from gpumux.compat._kvcached_pages import InternalPage as InternalPage
from gpumux.compat._kvcached_pages import PageAllocator as Pages

FITS = "kvcached 0.1.4 to 0.1.6"
"""The versions whose native module has these names and arguments."""

_MIB2, _LARGEST_GRANULE = 2 << 20, 64 << 20
_WAIT_S = 1.0
"""How long a page may wait for others to give way."""
_ENDED = 64
"""So many transactions of a group are remembered."""
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


class _View:
    """A part of a range, for `kv.Tensor`."""

    def __init__(self, memory: Any, device: int, offset: int) -> None:
        self.kind, self.device, self.address = memory.kind, device, memory.address + offset

    def _check_open(self) -> None:
        pass


class _Group:
    """The tensors of layers that have their pages in common."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.layers = 0
        self.asked: tuple[Any, ...] = ()
        self.tensors: list[Any] = []
        self.memory: Any = None
        # Bytes of a page and of a granule; where the same page is in each tensor, and where the next does not begin any more.
        self.span = self.granule = self.bytes = 0
        self.bases: list[int] = []
        self.mapped: set[int] = set()
        # The transaction that is open and its pages; whether those that ended were committed.
        self.pending: tuple[str, list[int]] | None = None
        self.ended: dict[str, bool] = {}

    def create(self, config: _Config, size: int, dtype: str, layers: int, buffers: int, unified: bool) -> list[Any]:
        size = -(-size // config.page) * config.page
        asked = (size, dtype, layers, buffers, unified)
        with self.lock:
            if self.layers:
                if asked != self.asked:
                    raise RuntimeError(f"tensors of another shape were made before: {self.asked}, now {asked}")
                return self.tensors
            # A page of the contiguous layout has the parts of all layers, next to each other.
            self.span = config.page * layers * buffers if config.contiguous else config.page
            if config.contiguous:
                self.bases, self.bytes = [0], size * layers
            elif unified:
                self.bases, self.bytes = [size * layer for layer in range(layers)], size
            else:
                # Keys in the first half of a layer, values in the second.
                if size % (2 * config.page):
                    raise ValueError(f"{size} bytes of a layer are not keys and values in pages of {config.page} bytes")
                self.bases, self.bytes = [size // 2 * half for half in range(2 * layers)], size // 2
            self.granule = max(it for it in range(_MIB2, _LARGEST_GRANULE + 1, _MIB2) if self.span % it == 0)
            granules = -(-size * layers // self.granule)
            self.memory = kv._backing(config.device, granules * self.granule, self.granule, fallback=True)
            if self.memory.kind == "host" and config.on_device and torch.cuda.is_available():
                why = "has no elastic memory here" if gpumux.present() else "is not loaded (use `gpumux run`)"
                raise RuntimeError(f"gpumux's library {why}, and the device has not room for all pages at once")
            self.asked, self.layers = asked, layers
            count, own = (1, size * layers) if config.contiguous else (layers, size)
            shape = (own * 8 // int(dtype[3:]),)
            views: list[Any] = [_View(self.memory, config.device, own * it) for it in range(count)]
            self.tensors = [torch.from_dlpack(kv.Tensor(view, shape, dtype)) for view in views]
            return self.tensors

    def _runs(self, offsets: Iterable[int]) -> Iterable[tuple[int, int]]:
        """The granules of these pages."""
        each = self.span // self.granule
        firsts = ((base + offset) // self.granule for base in self.bases for offset in offsets)
        return kv._runs(sorted(first + it for first in firsts for it in range(each)))

    def _own(self, offsets: Sequence[int], mapped: bool) -> list[int]:
        """Those that are mapped, or are not; others are reported, as the native module does."""
        for offset in offsets:
            if offset % self.span or not 0 <= offset <= self.bytes - self.span:
                raise ValueError(f"no page begins at {offset}: pages have {self.span} bytes, of {self.bytes}")
            if (offset in self.mapped) != mapped:
                print(f"gpumux: kvcached's page at {offset} is {'not' if mapped else 'already'} mapped", file=sys.stderr)
        return [it for it in dict.fromkeys(offsets) if (it in self.mapped) == mapped]

    def map(self, offsets: Sequence[int]) -> list[int] | None:
        """Those that were not mapped before; None where there are no tensors."""
        with self.lock:
            if not self.layers:
                return None
            self._open()
            own, deadline = self._own(offsets, mapped=False), time.monotonic() + _WAIT_S
            done: list[tuple[int, int]] = []
            for first, count in self._runs(own):
                answer = self.memory.commit(first, count, deadline - time.monotonic())
                if answer != kv._DONE:
                    for run in done:
                        self._give(*run)
                    raise RuntimeError(f"no memory for {len(own)} pages of {self.span} bytes: {kv._WHY.get(answer, answer)}")
                done.append((first, count))
            self.mapped.update(own)
            return own

    def unmap(self, offsets: Sequence[int]) -> bool:
        with self.lock:
            if not self.layers:
                return False
            self._open()
            self._drop(self._own(offsets, mapped=True))
            return True

    def prepare(self, offsets: Sequence[int], transaction: str) -> bool:
        with self.lock:
            if not self.layers:
                return False
            if self._open(transaction) is None and not self._has_ended(transaction, commit=True):
                self.pending = transaction, self._own(offsets, mapped=True)
            return True

    def end(self, transaction: str, commit: bool) -> bool:
        with self.lock:
            pages = self._open(transaction)
            if pages is None and self._has_ended(transaction, commit):
                return True
            if commit:
                if pages is None:
                    raise RuntimeError(f"unknown unmap transaction: {transaction}")
                self._drop(pages)
            # What is aborted may still be on its way here.
            self.pending, self.ended[transaction] = None, commit
            if len(self.ended) > _ENDED:
                del self.ended[next(iter(self.ended))]
            return True

    def _open(self, transaction: str | None = None) -> list[int] | None:
        """The pages of this transaction, if it is open. While another is, nothing changes."""
        if transaction == "":
            raise ValueError("an unmap transaction id must not be empty")
        if self.pending and self.pending[0] != transaction:
            raise RuntimeError(f"another unmap transaction is pending: {self.pending[0]}")
        return self.pending[1] if self.pending else None

    def _has_ended(self, transaction: str, commit: bool) -> bool:
        if self.ended.get(transaction, commit) != commit:
            raise RuntimeError(f"cannot {'commit an aborted' if commit else 'abort a committed'} unmap transaction: {transaction}")
        return transaction in self.ended

    def _drop(self, pages: Sequence[int]) -> None:
        for first, count in self._runs(pages):
            self._give(first, count)
        self.mapped.difference_update(pages)

    def _give(self, first: int, count: int) -> None:
        # During a capture memory cannot be unmapped: others may take it then.
        if self.memory.decommit(first, count) != kv._DONE:
            self.memory.mark(first, count, kv.FREE)

    def close(self) -> None:
        with self.lock:
            if self.layers:
                self.memory.close()
            # A call that got this group before the shutdown may still come.
            self.layers, self.pending = 0, None
            self.ended.clear()
            self.mapped.clear()


class _Config:
    """What `init_kvcached` got."""

    def __init__(self, dev_str: str, page: int, contiguous: bool) -> None:
        kind, _, index = dev_str.partition(":")
        if kind not in ("cuda", "cpu"):
            raise ValueError(f"no device of gpumux's: {dev_str}")
        if page <= 0 or page % _MIB2:
            raise ValueError(f"a page has a multiple of 2 MiB, not {page} bytes")
        self.on_device, self.page, self.contiguous = kind == "cuda", page, contiguous
        self.device = int(index) if index and self.on_device else 0
        if self.on_device and not index:
                self.device = int(torch.cuda.current_device())


_lock = threading.Lock()
_config: _Config | None = None
_groups: dict[int, _Group] = {}


def _device() -> int:
    return _config.device if _config else int(torch.cuda.current_device())


def _group(group_id: int) -> _Group:
    with _lock:
        return _groups.setdefault(group_id, _Group())


def init_kvcached(dev_str: str, page_size: int = 0, contiguous_layout: bool = True) -> None:
    """Sets the device, the bytes of a page (0: as before, at first 2 MiB) and the layout."""
    global _config
    config = _Config(dev_str, page_size or (_config.page if _config else _MIB2), contiguous_layout)
    shutdown_kvcached()
    _config = config


def shutdown_kvcached() -> None:
    """Frees all memory. Tensors of it must not be used any more."""
    with _lock:
        groups = list(_groups.values())
        _groups.clear()
    for group in groups:
        group.close()


def create_kv_tensors(
    size: int,
    dtype_size: int,
    dev_str: str,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    unified_pool: bool = False,
) -> list[Any]:
    """Tensors of `size` bytes for each layer, or one for all of them in the contiguous layout, with no memory yet."""
    if _config is None:
        raise RuntimeError("init_kvcached comes first")
    if dtype_size not in _INTEGERS:
        raise RuntimeError(f"no type of {dtype_size} bytes")
    return _group(group_id).create(_config, size, _INTEGERS[dtype_size], num_layers, num_kv_buffers, unified_pool)


def kv_tensors_created(group_id: int = 0) -> bool:
    """Whether a group has tensors."""
    return _group(group_id).layers > 0


def map_to_kv_tensors(offsets: Sequence[int], group_id: int = 0) -> bool:
    """Gets memory for the pages at these offsets in all layers, all or none; False where there are no tensors."""
    return _group(group_id).map(offsets) is not None


def map_to_kv_tensors_with_result(offsets: Sequence[int], group_id: int = 0) -> tuple[bool, list[int]]:
    """The same, and the pages that had no memory before."""
    own = _group(group_id).map(offsets)
    return own is not None, own or []


def unmap_from_kv_tensors(offsets: Sequence[int], group_id: int = 0) -> bool:
    """Gives their memory back."""
    return _group(group_id).unmap(offsets)


def prepare_unmap_from_kv_tensors(offsets: Sequence[int], transaction_id: str, group_id: int = 0) -> bool:
    """Has pages keep their memory until the transaction ends. All processes prepare it before the first commits it."""
    return _group(group_id).prepare(offsets, transaction_id)


def commit_unmap_from_kv_tensors(transaction_id: str, group_id: int = 0) -> bool:
    """Gives their memory back; again, if it is asked again."""
    return _group(group_id).end(transaction_id, commit=True)


def abort_unmap_from_kv_tensors(transaction_id: str, group_id: int = 0) -> bool:
    """They stay mapped; the transaction cannot be prepared any more."""
    return _group(group_id).end(transaction_id, commit=False)


class PageAllocator(Pages):
    """The pages of a group's tensors."""

    def _map(self, offsets: list[int]) -> bool:
        return map_to_kv_tensors(offsets, self.group_id)

    def _unmap(self, offsets: list[int]) -> bool:
        return unmap_from_kv_tensors(offsets, self.group_id)

    def _wait_for_device(self) -> None:
        torch.cuda.synchronize(_device())

    def _free_bytes(self) -> tuple[int, int]:
        if not torch.cuda.is_available():
            return 1 << 62, 0
        free, total = torch.cuda.mem_get_info(_device())
        return int(free), int(total)
