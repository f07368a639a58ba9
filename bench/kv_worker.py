"""A process with a pool of `gpumux.kv`, which takes orders on its standard input and answers each with one line of JSON."""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import gpumux.kv as kv  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30


class Driver(kv._Driver):
    """Contents by the driver's own calls, where there is no PyTorch."""

    def __init__(self, pool: kv.Pool) -> None:
        super().__init__(pool.device)
        self.pool, self.words = pool, pool.page_bytes // 4
        self.found, self.scratch = (ctypes.c_uint32 * self.words)(), ctypes.c_uint64(self.alloc(MIB))
        self.call("cuCtxSetCurrent", self.context)

    def write(self, pages: list[int], salt: int) -> None:
        for page in pages:
            at = ctypes.c_uint64(self.pool.address + page * self.pool.page_bytes)
            self.call("cuMemsetD32_v2", at, page ^ salt, ctypes.c_size_t(self.words))
        self.call("cuCtxSynchronize")

    def wrong(self, pages: list[int], salt: int) -> int:
        """How many of these pages have other contents."""
        wrong = 0
        for page in pages:
            at = ctypes.c_uint64(self.pool.address + page * self.pool.page_bytes)
            self.call("cuMemcpyDtoH_v2", self.found, at, ctypes.c_size_t(self.pool.page_bytes))
            wrong += bytes(self.found) != (page ^ salt).to_bytes(4, "little") * self.words
        return wrong

    def work(self) -> None:
        """A short piece of work."""
        self.call("cuCtxSetCurrent", self.context)
        self.call("cuMemsetD8_v2", self.scratch, 1, ctypes.c_size_t(MIB))
        self.call("cuCtxSynchronize")


class Torch:
    """Contents by kernels."""

    def __init__(self, pool: kv.Pool) -> None:
        import torch

        self.torch, self.rows = torch, torch.from_dlpack(pool.tensor(dtype="int32"))
        self.matrix = torch.ones(2048, 2048, device="cuda")

    def write(self, pages: list[int], salt: int) -> None:
        for page in pages:
            self.rows[page].fill_(page ^ salt)
        self.torch.cuda.synchronize()

    def wrong(self, pages: list[int], salt: int) -> int:
        """How many of these pages have other contents."""
        wrong = self.torch.zeros((), dtype=self.torch.int64, device="cuda")
        for page in pages:
            low, high = self.torch.aminmax(self.rows[page])
            wrong += (low != page ^ salt) | (high != page ^ salt)
        return int(wrong)

    def work(self) -> None:
        """A short piece of work."""
        for _ in range(8):
            self.torch.mm(self.matrix, self.matrix)
        self.torch.cuda.synchronize()


class Worker:
    """The pool, and what is in it."""

    def __init__(self, options: argparse.Namespace) -> None:
        if not options.no_torch:
            import torch

            torch.cuda.set_device(options.device)
            torch.zeros(1, device="cuda")
        self.pool = kv.Pool(options.bytes, options.page, granule_bytes=options.granule, fallback=False, device=options.device)
        self.contents: Any = Driver(self.pool) if options.no_torch else Torch(self.pool)
        self.kept: list[int] = []
        self.keys: list[int] = []
        self.salt, self.random = options.salt, random.Random(options.salt)

    def granules(self, count: int, tries: int) -> dict[str, float]:
        """What it costs to get and to give back memory of so many granules at once, and of one."""
        memory = self.pool._memory
        return cost(lambda number: memory.commit(0, number, 10.0), lambda number: memory.decommit(0, number), count, tries)

    def listen(self, key: str) -> dict[str, str]:
        """As a rank: where it takes orders."""
        from gpumux._ranks import Rank

        return {"address": Rank(self.pool._memory, lambda *_: None).listen(key.encode())}

    def fill(self, state: str, keep: int) -> dict[str, float]:
        """Borrows all that there is, up to the pool's size: so many bytes in use, the rest in this state."""
        step = max(1, GIB // self.pool.page_bytes)
        while len(self.kept) < self.pool.pages:
            found = self.pool.alloc(min(step, self.pool.pages - len(self.kept)), wait_s=0.5)
            if found is None and step == 1:
                break
            if found is None:
                step = max(1, step // 4)
            self.kept += found or []
        self.kept.sort()
        borrowed = len(self.kept) * self.pool.page_bytes
        number = len(self.kept) if state == "in-use" else keep // self.pool.page_bytes
        rest, self.kept = self.kept[number:], self.kept[:number]
        self.contents.write(self.kept, self.salt)
        if state == "cached":
            self.contents.write(rest, self.salt)
            self.keys = self.pool.cached(rest)
        else:
            self.pool.free(rest)
        return {"holder_gib": borrowed / GIB}

    def get(self, size: int, wait_s: float) -> dict[str, float]:
        """Pages of so many bytes: how long that takes."""
        begin = time.perf_counter()
        found = self.pool.alloc(size // self.pool.page_bytes, wait_s=wait_s)
        took = (time.perf_counter() - begin) * 1000
        if found is None:
            raise RuntimeError(f"no {size} bytes after {took:.0f} ms: {self.pool.limits()}")
        self.contents.write(found, self.salt)
        wrong = self.contents.wrong(found, self.salt)
        self.kept += found
        return {"ms": took, "at": time.monotonic(), "wrong": wrong}

    def release(self) -> dict[str, float]:
        """Nothing is in use any more; all memory is given back."""
        self.pool.free(self.kept)
        self.kept = []
        return {"bytes": self.pool.trim()}

    def verify(self) -> dict[str, float]:
        """Whether every page in use has its contents, and every cached one that is still there."""
        found = [it for it in self.pool.touch(self.keys) if it is not None]
        wrong = self.contents.wrong(self.kept + found, self.salt)
        verified = len(self.kept + found) * self.pool.page_bytes
        self.keys = self.pool.cached(found)
        return {"wrong": wrong, "verified_gib": verified / GIB, "taken": self.pool.limits().taken}

    def shuffle(self, size: int) -> dict[str, float]:
        """Some pages are freed, some become a cache, some come back, and new ones are taken into use: about so many bytes in use."""
        # Whole granules: of one with a page in use nothing can be taken.
        by_granule: dict[int, list[int]] = {}
        for page in self.kept:
            by_granule.setdefault(page * self.pool.page_bytes // self.pool.granule_bytes, []).append(page)
        change, lost = max(1, size // self.pool.page_bytes // 8), 0
        excess = len(self.kept) - size // self.pool.page_bytes
        chosen = self.random.sample(list(by_granule), len(by_granule))
        for way, least in ((self.pool.free, max(change, excess)), (self.pool.cached, change)):
            pages: list[int] = []
            while chosen and len(pages) < least:
                pages += by_granule.pop(chosen.pop())
            self.keys += way(pages) or []
        self.kept = [page for pages in by_granule.values() for page in pages]
        back, self.keys = self.keys[-change:], self.keys[:-change]
        found = self.pool.touch(back)
        self.kept += [it for it in found if it is not None]
        lost = sum(it is None for it in found)
        lacking = size // self.pool.page_bytes - len(self.kept)
        new = self.pool.alloc(lacking, wait_s=20.0) if lacking > 0 else []
        self.contents.write(new or [], self.salt)
        self.kept += new or []
        return {"wrong": self.contents.wrong(self.kept, self.salt), "lost": lost, "refused": new is None}

    def lock(self, seconds: float) -> None:
        """Holds Python's lock."""
        print(json.dumps({}), flush=True)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def work(self, on: bool) -> dict[str, float]:
        """Begins to work without a pause, or stops."""
        self.on = on
        if on:

            def run() -> None:
                while self.on:
                    self.contents.work()

            self.thread = threading.Thread(target=run, daemon=True)
            self.thread.start()
        else:
            self.thread.join()
        return {}


class Ranks:
    """Processes with a pool each, on a device each, which get memory together or not at all."""

    def __init__(self, options: argparse.Namespace) -> None:
        from gpumux._ranks import Ranks

        given = [sys.executable, __file__, "--bytes", str(options.bytes), "--page", str(options.page), "--granule", str(options.granule)]
        given += ["--no-torch"] if options.no_torch else []
        key, pipe = "bench", subprocess.PIPE
        # They end with their standard input, and so with this process.
        self.processes = [subprocess.Popen([*given, "--device", str(it)], stdin=pipe, stdout=pipe, text=True) for it in range(options.ranks)]
        for it in self.processes:
            if "error" in (found := self.answer(it)):
                raise RuntimeError(found["error"])
        for it in self.processes:
            it.stdin.write(json.dumps({"do": "listen", "key": key}) + "\n")
            it.stdin.flush()
        self.ranks = Ranks([self.answer(it)["address"] for it in self.processes], key.encode(), options.granule)

    @staticmethod
    def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        """The next one of a rank."""
        return dict(json.loads(process.stdout.readline() or '{"error": "a rank has ended"}'))

    def granules(self, count: int, tries: int) -> dict[str, float]:
        """The same for all ranks together."""

        def give(number: int) -> None:
            self.ranks._tell("give", 0, number)
            self.ranks.there([])

        return cost(lambda number: self.ranks.commit(0, number, 10.0), give, count, tries)


def cost(commit: Callable[[int], int], give: Callable[[int], object], count: int, tries: int) -> dict[str, float]:
    """Medians, in microseconds a granule."""
    found = {}
    for name, number in (("", count), ("one_", 1)):
        commits, decommits = [], []
        for _ in range(tries):
            begin = time.perf_counter()
            if answer := commit(number):
                raise RuntimeError(f"no memory for {number} granules: {answer}")
            middle = time.perf_counter()
            give(number)
            commits.append((middle - begin) / number * 1e6)
            decommits.append((time.perf_counter() - middle) / number * 1e6)
        # The first ones also ask the daemon for more.
        found |= {f"{name}commit_us": statistics.median(commits), f"{name}decommit_us": statistics.median(decommits)}
    return found


def main() -> None:
    """Carries out orders."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--page", type=int, default=2 * MIB)
    parser.add_argument("--granule", type=int, default=16 * MIB)
    parser.add_argument("--salt", type=int, default=1)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=0, help="processes that get memory together, each with a pool of this size")
    options = parser.parse_args()
    worker: Any = Ranks(options) if options.ranks else Worker(options)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            found = getattr(worker, order.pop("do"))(**order)
        except Exception as error:
            found = {"error": repr(error)}
        print(json.dumps(found or {}), flush=True)


if __name__ == "__main__":
    main()
