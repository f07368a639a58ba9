"""A process under measurement by `memory.py`: a model that answers, a training job, or a loop of allocations.

A model prints a line of JSON when it is ready and answers every line on its standard input with one. The others print one
line of JSON at their end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time

GIB = 1 << 30


def tell(**values: object) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(values), flush=True)


def layers(gib: float, width: int = 8192) -> object:
    """A stack of square linear layers in fp16 of about so many GiB, with random weights."""
    import torch

    count = max(1, round(gib * GIB / (width * width * 2)))
    stack = [torch.nn.Linear(width, width, bias=False, device="cuda", dtype=torch.float16) for _ in range(count)]
    return torch.nn.Sequential(*stack).eval()


def model(options: argparse.Namespace) -> None:
    """Answers requests: one pass through all weights, as for a first token."""
    import torch

    begin = time.monotonic()
    network = layers(options.gib)
    token = torch.ones(1, 8192, device="cuda", dtype=torch.float16) / 8192
    with torch.no_grad():
        first = network(token).float().sum().item()
        tell(ready_s=time.monotonic() - begin, answer=first)
        for _line in sys.stdin:
            begin = time.monotonic()
            answer = network(token).float().sum().item()
            tell(ms=(time.monotonic() - begin) * 1e3, answer=answer, same=answer == first)


def train(options: argparse.Namespace) -> None:
    """Trains with weights, gradients and two moments that fill so many GiB; prints every loss's bits at the end."""
    import torch

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    width = 8192
    # Four times 4 bytes per weight.
    count = max(1, round(options.gib * GIB / (width * width * 16)))
    stack: list[torch.nn.Module] = []
    for _ in range(count):
        stack += [torch.nn.Linear(width, width, bias=False, device="cuda"), torch.nn.ReLU()]
    network = torch.nn.Sequential(*stack)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-5, fused=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = torch.randn(2048, width, device="cuda")
    losses = []
    begin = time.monotonic()
    for _ in range(options.steps):
        loss = network(data).square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    tell(seconds=time.monotonic() - begin, losses=losses)


def alloc(options: argparse.Namespace) -> None:
    """Allocates and frees in a loop; mean time of a pair."""
    if options.way == "driver":
        cuda = ctypes.CDLL("libcuda.so.1")
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        size = ctypes.c_size_t(int(options.bytes))
        for result in (
            cuda.cuInit(0),
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            cuda.cuCtxSetCurrent(context),
        ):
            assert result == 0, result

        def pair() -> None:
            assert cuda.cuMemAlloc_v2(ctypes.byref(address), size) == 0
            assert cuda.cuMemFree_v2(address) == 0
    else:
        import torch

        def pair() -> None:
            torch.empty(int(options.bytes), dtype=torch.uint8, device="cuda")

    for _ in range(20):
        pair()
    begin = time.monotonic()
    for _ in range(options.steps):
        pair()
    tell(us=(time.monotonic() - begin) / options.steps * 1e6)


def copy(options: argparse.Namespace) -> None:
    """Plain copies of so many GiB between pinned memory and the GPU: the best of three."""
    import torch

    count = int(options.gib * GIB)
    device = torch.zeros(count, dtype=torch.uint8, device="cuda")
    host = torch.zeros(count, dtype=torch.uint8).pin_memory()
    best = {}
    for _ in range(3):
        for name, to, source in (("out_ms", host, device), ("in_ms", device, host)):
            torch.cuda.synchronize()
            begin = time.monotonic()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best[name] = min(best.get(name, 1e9), (time.monotonic() - begin) * 1e3)
    tell(**best)


def main() -> None:
    """Does as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["model", "train", "alloc", "copy"])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bytes", type=int, default=2 << 20)
    parser.add_argument("--way", choices=["driver", "torch"], default="driver")
    options = parser.parse_args()
    {"model": model, "train": train, "alloc": alloc, "copy": copy}[options.what](options)


if __name__ == "__main__":
    main()
