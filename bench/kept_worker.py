"""A job that works on one state in steps, in place, and reports its start, what it found, and each step: lines of JSON on standard output.

After step n each word of the state is n: so a wrong or torn state is found. It is saved in one of three ways: not at all, in a file every
`--every` steps, or in a kept buffer at each step.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import argparse  # noqa: E402
import ctypes  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import gpumux.kept  # noqa: E402

PIECE = 64 << 20
"""Files are written and read in such pieces."""


class Driver(gpumux.kv._Driver):
    """The job by the driver's own calls, where there is no PyTorch: a step sets all words."""

    def __init__(self, size: int, kept: bool, _step_ms: float) -> None:
        super().__init__(0)
        self.call("cuCtxSetCurrent", self.context)
        self.size = size
        self.buffer = gpumux.kept.Buffer("state", size, fallback=False) if kept else None
        if self.buffer is None:
            self.address = self.alloc(size)
            self.step(0)
        else:
            self.address = self.buffer.address
        self.piece = (ctypes.c_uint32 * (PIECE // 4))()

    def step(self, number: int) -> None:
        self.call("cuMemsetD32_v2", ctypes.c_uint64(self.address), number, ctypes.c_size_t(self.size // 4))
        self.call("cuCtxSynchronize")

    def commit(self, number: int) -> None:
        assert self.buffer
        self.buffer.commit(number)

    def wait(self) -> None:
        self.call("cuCtxSynchronize")

    def pieces(self) -> Any:
        for offset in range(0, self.size, PIECE):
            yield self.address + offset, min(PIECE, self.size - offset)

    def save(self, file: Any) -> None:
        for at, size in self.pieces():
            self.call("cuMemcpyDtoH_v2", self.piece, ctypes.c_uint64(at), ctypes.c_size_t(size))
            file.write(memoryview(self.piece).cast("B")[:size])

    def load(self, file: Any) -> None:
        for at, size in self.pieces():
            file.readinto(memoryview(self.piece).cast("B")[:size])
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(at), self.piece, ctypes.c_size_t(size))

    def wrong(self, number: int) -> int:
        """How many pieces have other contents."""
        wrong = 0
        for at, size in self.pieces():
            self.call("cuMemcpyDtoH_v2", self.piece, ctypes.c_uint64(at), ctypes.c_size_t(size))
            wrong += bytes(self.piece)[:size] != number.to_bytes(4, "little") * (size // 4)
        return wrong


class Torch:
    """The job with PyTorch: a step is matrix products, and one more in each word."""

    def __init__(self, size: int, kept: bool, step_ms: float) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        self.buffer = None
        if kept:
            torch.zeros(1, device="cuda")
            self.buffer = gpumux.kept.Buffer("state", size, fallback=False)
            self.state = torch.from_dlpack(self.buffer.tensor(dtype="int32"))
        else:
            self.state = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
        self.matrix = torch.ones(2048, 2048, device="cuda")
        self.products, began = 0, time.monotonic()
        while time.monotonic() - began < step_ms / 1000:
            torch.mm(self.matrix, self.matrix)
            torch.cuda.synchronize()
            self.products += 1

    def step(self, _number: int) -> None:
        for _ in range(self.products):
            self.torch.mm(self.matrix, self.matrix)
        self.state.add_(1)
        self.torch.cuda.synchronize()

    def commit(self, number: int) -> None:
        assert self.buffer
        self.buffer.commit(number, self.torch.cuda.current_stream().cuda_stream)

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def save(self, file: Any) -> None:
        for part in self.state.split(PIECE // 4):
            file.write(part.cpu().numpy().data)

    def load(self, file: Any) -> None:
        for part in self.state.split(PIECE // 4):
            host = self.torch.empty_like(part, device="cpu")
            file.readinto(memoryview(host.numpy()).cast("B"))
            part.copy_(host)
        self.torch.cuda.synchronize()

    def wrong(self, number: int) -> int:
        low, high = self.torch.aminmax(self.state)
        return int(low != number) + int(high != number)


def report(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **values}), flush=True)


def found_in(file: Path, job: Any) -> int:
    """The step of the last file; its contents are in the state."""
    if not file.exists():
        return 0
    with open(file, "rb", buffering=0) as saved:
        step = int.from_bytes(saved.read(8), "little")
        job.load(saved)
    return step


def save_in(file: Path, job: Any, step: int) -> None:
    part = file.with_suffix(".part")
    with open(part, "wb", buffering=0) as saved:
        saved.write(step.to_bytes(8, "little"))
        job.save(saved)
    part.replace(file)


def main() -> None:
    """Works until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["restart", "checkpoint", "kept"])
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    if not options.no_torch:
        import torch  # noqa: F401
    report("began", began=BEGAN)
    make = Driver if options.no_torch else Torch
    job = make(options.bytes, options.way == "kept", options.step_ms)
    match options.way:
        case "kept":
            step = job.buffer.step
        case "checkpoint":
            step = found_in(options.file, job)
        case _:
            step = 0
    report("found", step=step)
    report("checked", wrong=job.wrong(step))
    while True:
        step += 1
        began = time.monotonic()
        job.step(step)
        worked = time.monotonic()
        match options.way:
            case "kept":
                job.commit(step)
                job.wait()
            case "checkpoint" if step % options.every == 0:
                save_in(options.file, job, step)
        report("step", step=step, step_ms=(worked - began) * 1000, save_ms=(time.monotonic() - worked) * 1000)


if __name__ == "__main__":
    main()
