"""A program under measurement by `residency.py`. It prints one line of JSON, with what it measured, when it has checked its results; the
program of `triton-8-pointers` then prints one for every order."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import crews
from crews import tell

MIB = 1 << 20


def triton_8_pointers(_: argparse.Namespace) -> None:
    """Triton's launcher asks the driver for every pointer argument of every launch. Answers orders."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add(a, b, c, d, e, f, g, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = at < n
        total = tl.load(a + at, mask) + tl.load(b + at, mask) + tl.load(c + at, mask) + tl.load(d + at, mask)
        total += tl.load(e + at, mask) + tl.load(f + at, mask) + tl.load(g + at, mask)
        tl.store(out + at, total, mask)

    inputs = [torch.full((1024,), float(n), device="cuda") for n in range(7)]
    out = torch.empty(1024, device="cuda")
    launch = lambda: add[(1,)](*inputs, out, 1024, BLOCK=1024)  # noqa: E731
    launch()
    torch.cuda.synchronize()
    if not bool((out == 21.0).all()):
        raise SystemExit("the sum is wrong")
    crews.answer("launch", launch, torch.cuda.synchronize)


def allocations(make: Callable[[int, int], object], settle: Callable[[], object]) -> float:
    """Allocations a second, of sizes from 1 MiB to 64 MiB, each written by a kernel; the last eight are kept."""
    for _ in range(2):  # the first time fills the pool
        kept: list[object] = [None] * 8
        begin, count = time.perf_counter(), 4000
        for n in range(count):
            kept[n % 8] = make((1 << n % 7) * MIB, n % 100)
        settle()
        rate = count / (time.perf_counter() - begin)
    return rate


def torch_async(_: argparse.Namespace) -> None:
    """PyTorch with the driver's stream-ordered allocator."""
    import os

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    import torch

    last: list[torch.Tensor] = []

    def make(size: int, value: int) -> torch.Tensor:
        made = torch.full((size,), value, dtype=torch.uint8, device="cuda")
        last[:] = [made]
        return made

    rate = allocations(make, torch.cuda.synchronize)
    if torch.cuda.get_allocator_backend() != "cudaMallocAsync" or not bool((last[0] == 3999 % 100).all()):
        raise SystemExit("another allocator, or wrong contents")
    tell(rate=rate)


def cupy_async(_: argparse.Namespace) -> None:
    """CuPy with the same."""
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    last: list[cupy.ndarray] = []

    def make(size: int, value: int) -> cupy.ndarray:
        made = cupy.full((size,), value, dtype=cupy.uint8)
        last[:] = [made]
        return made

    rate = allocations(make, lambda: cupy.cuda.Device().synchronize())
    if not bool((last[0] == 3999 % 100).all()):
        raise SystemExit("wrong contents")
    tell(rate=rate)


def jax_default(options: argparse.Namespace) -> None:
    """Matrix products, with JAX's own memory settings."""
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda x, w: jnp.tanh(x @ w))
    x, w = jnp.eye(4096), jnp.full((4096, 4096), 1e-3)
    expected = float(step(x, w).sum())
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < options.seconds:
        found = step(x, w)
        count += 1
        if count % 16 == 0 and float(found.sum()) != expected:
            raise SystemExit("the result differs")
    found.block_until_ready()
    tell(rate=count / (time.perf_counter() - begin))


CASES = {"triton-8-pointers": triton_8_pointers, "torch-async": torch_async, "cupy-async": cupy_async, "jax-75%": jax_default}


def main() -> None:
    """Runs one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    CASES[options.case](options)


if __name__ == "__main__":
    main()
