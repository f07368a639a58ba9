"""A process under measurement by `memory.py`: a model that answers, a training job, plain copies, or allocations, as `crews.py` orders.

A model prints a line of JSON when it is ready and answers every line on its standard input with one. A training job
prints one when it is ready, starts with a line on its standard input, and like copies prints one at its end.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time

import crews
from crews import tell

GIB = 1 << 30


def done(result: int) -> None:
    """What the driver answers must be success."""
    if result:
        raise SystemExit(f"the driver answers {result}")


def driver() -> ctypes.CDLL:
    """The driver library, with the first GPU's primary context current."""
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    done(cuda.cuInit(0))
    done(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    done(cuda.cuCtxSetCurrent(context))
    return cuda


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
    """Trains with weights, gradients and two moments that fill so many GiB, from its start order on; with `--graph` by a
    CUDA graph. Prints every loss's bits at the end."""
    # What deterministic algorithms need of cuBLAS; read when it is loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.cuda.init()
    tell(ready=True)
    sys.stdin.readline()
    begin = time.monotonic()
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = True
    width = options.width
    # Four times 4 bytes per weight.
    count = max(1, round(options.gib * GIB / (width * width * 16)))
    stack: list[torch.nn.Module] = []
    for _ in range(count):
        stack += [torch.nn.Linear(width, width, bias=False, device="cuda"), torch.nn.ReLU()]
    network = torch.nn.Sequential(*stack)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-5, fused=True, capturable=options.graph)
    data = torch.randn(2048, width, device="cuda")

    def step() -> torch.Tensor:
        loss = network(data).square().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if options.graph:
        # As PyTorch's documentation has it: warm up on another stream, then capture.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

    work = replay if options.graph else step
    losses = [work().item().hex() for _ in range(options.steps)]
    tell(seconds=time.monotonic() - begin, losses=losses)


def alloc(options: argparse.Namespace) -> None:
    """Allocates and frees."""
    size, address = ctypes.c_size_t(options.bytes), ctypes.c_uint64()
    if options.way == "driver":
        cuda = driver()

        def pair() -> None:
            done(cuda.cuMemAlloc_v2(ctypes.byref(address), size))
            done(cuda.cuMemFree_v2(address))
    elif options.way == "async":
        cuda = driver()

        def pair() -> None:
            done(cuda.cuMemAllocAsync(ctypes.byref(address), size, None))
            done(cuda.cuMemFreeAsync(address, None))
    else:
        import torch

        def pair() -> None:
            torch.empty(options.bytes, dtype=torch.uint8, device="cuda")

    crews.answer("pair", pair)


def copy(options: argparse.Namespace) -> None:
    """Plain copies of so many GiB between pinned memory and the GPU: medians of three."""
    cuda, count = driver(), int(options.gib * GIB)
    size, host, device = ctypes.c_size_t(count), ctypes.c_void_p(), ctypes.c_uint64()
    done(cuda.cuMemHostAlloc(ctypes.byref(host), size, 0))
    done(cuda.cuMemAlloc_v2(ctypes.byref(device), size))
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name, function, to, source in (
            ("out_ms", cuda.cuMemcpyDtoH_v2, host, device),
            ("in_ms", cuda.cuMemcpyHtoD_v2, device, host),
        ):
            begin = time.monotonic()
            done(function(to, source, size))
            done(cuda.cuCtxSynchronize())
            found.setdefault(name, []).append((time.monotonic() - begin) * 1e3)
    tell(**{name: statistics.median(times) for name, times in found.items()})


def main() -> None:
    """Does as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["model", "train", "alloc", "copy"])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bytes", type=int, default=2 << 20)
    parser.add_argument("--way", choices=["driver", "async", "torch"], default="driver")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--graph", action="store_true")
    options = parser.parse_args()
    {"model": model, "train": train, "alloc": alloc, "copy": copy}[options.what](options)


if __name__ == "__main__":
    main()
