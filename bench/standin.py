"""An engine in vLLM's place (`serve_worker.py --library stand-in`) for devices that compute nothing: its KV cache is a `gpumux.kv.Pool`.

Each token has `TOKEN` bytes in the cache, and the next one is a checksum of all bytes of its request's tokens: one wrong byte makes other tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import zlib
from collections.abc import Iterable, Sequence

import gpumux
from gpumux import kv

TOKEN, PER_PAGE = 4 << 10, 16
WAIT_S = 0.25


class Request:
    """Its tokens, and the pages that have them."""

    def __init__(self, prompt: Sequence[int], output: int) -> None:
        self.tokens, self.given, self.output = list(prompt), len(prompt), output
        self.pages, self.written = list[int](), 0


class StandIn:
    """One token of every request in each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.driver = kv._Driver(0)
        self.driver.call("cuCtxSetCurrent", self.driver.context)
        self.pool = kv.Pool(options.engine["kv_cache_memory_bytes"], TOKEN * PER_PAGE, granule_bytes=2 << 20)
        self.found = (ctypes.c_char * (TOKEN * PER_PAGE))()
        self.open, self.last, self.refused, self.ended = dict[str, Request](), dict[str, list[int]](), 0, 0
        if options.cold:
            gpumux.advise(self.pool.address, self.pool.pages * self.pool.page_bytes, gpumux.COLD)

    def add(self, name: str, prompt: Sequence[int], output: int, _salt: str | None = None) -> None:
        """A request, which makes exactly so many tokens."""
        self.open[name] = Request(prompt, output)

    def step(self) -> list[tuple[str, int]]:
        """One step of the batch."""
        self.last = {}
        for name, request in list(self.open.items()):
            lacking = -(-len(request.tokens) // PER_PAGE) - len(request.pages)
            pages = self.pool.alloc(lacking, wait_s=WAIT_S)
            if pages is None:
                self.refused += 1
                continue
            request.pages += pages
            for position in range(request.written, len(request.tokens)):
                value = (request.tokens[position] * 2_654_435_761 + position) & 0xFFFF_FFFF
                self.driver.call("cuMemsetD32_v2", ctypes.c_uint64(self.at(request, position)), value, ctypes.c_size_t(TOKEN // 4))
            request.written = len(request.tokens)
            request.tokens.append(self.next(request))
            self.last[name] = request.tokens[request.given :]
            if len(self.last[name]) == request.output:
                self.end(name)
        return [(name, len(made)) for name, made in self.last.items()]

    def at(self, request: Request, position: int) -> int:
        """Where a token is."""
        page, inside = divmod(position, PER_PAGE)
        return self.pool.address + request.pages[page] * self.pool.page_bytes + inside * TOKEN

    def next(self, request: Request) -> int:
        """The checksum of what the cache has of it."""
        sum, left = 0, request.written * TOKEN
        for page in request.pages:
            size = min(left, self.pool.page_bytes)
            address = ctypes.c_uint64(self.pool.address + page * self.pool.page_bytes)
            self.driver.call("cuMemcpyDtoH_v2", self.found, address, ctypes.c_size_t(size))
            sum, left = zlib.crc32(memoryview(self.found)[:size], sum), left - size
        return sum % 30_000

    def end(self, name: str) -> None:
        """It is done: of every second one the pages stay as a cache."""
        self.ended += 1
        way = self.pool.cached if self.ended % 2 else self.pool.free
        way(self.open.pop(name).pages)

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.open)

    def preempted(self) -> int:
        """It has no request computed again."""
        return 0

    def state(self) -> dict[str, int]:
        """What became of its cache."""
        limits = self.pool.limits()
        losses = {it: getattr(limits, it) for it in ("taken", "taken_cached", "moved")}
        return {"refused": self.refused, "committed": limits.committed, **losses} if self.pool.kind == "elastic" else {}

    def drop(self, names: Iterable[str]) -> None:
        """Forgets requests."""
        for name in names:
            self.pool.free(self.open.pop(name).pages)
