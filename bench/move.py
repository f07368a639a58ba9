#!/usr/bin/env python3
"""A tenant that `gpumux move` moves between two GPUs of one kind, back and forth, while it works: whether its results are the same bit for bit,
and what a move takes.

Cases: `plain` has memory with known contents, all of which it checks and writes anew in each step; `training` writes the loss of each step; `decode` is a server
whose decoder is one CUDA graph a token, and writes each token with its logit. What the last two write is compared with the same steps without moves.
`plain` runs on the emulated device, too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
from common import BenchError, Gpumux, Results, say

CASES = ("plain", "training", "decode")
GIB = 1 << 30
CHUNK = 64 << 20
AFTER = 2  # steps that a program makes after each move before the next one


# --- the programs that are moved ----------------------------------------------------------------


def plain(options: argparse.Namespace) -> Callable[[int], str]:
    """Memory with known contents, by the driver API."""
    cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)

    def call(name: str, *args: Any) -> None:
        if error := getattr(cuda, name)(*args):
            raise RuntimeError(f"{name} answers {error}")

    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    chunks = []
    for _ in range(max(1, int(options.gib * GIB) // CHUNK)):
        at = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(CHUNK))
        chunks.append(at)
    back = ctypes.create_string_buffer(CHUNK)

    def value(n: int, step: int) -> int:
        return (n * 2654435761 + step) & 0xFFFFFFFF

    def work(step: int) -> str:
        wrong = 0
        for n, at in enumerate(chunks):
            if step > 0:
                call("cuMemcpyDtoH_v2", back, at, ctypes.c_size_t(CHUNK))
                # The first word is right, and each is as the one before it: a comparison of 64 MiB that takes Python no time.
                first = int.from_bytes(back[:4], "little")
                wrong += first != value(n, step - 1) or libc.memcmp(back, ctypes.byref(back, 4), ctypes.c_size_t(CHUNK - 4)) != 0
            call("cuMemsetD32_v2", at, ctypes.c_uint32(value(n, step)), ctypes.c_size_t(CHUNK // 4))
        call("cuCtxSynchronize")
        return f"{wrong} wrong"

    return work


def training(options: argparse.Namespace) -> Callable[[int], str]:
    """A network of about a tenth of the size, with its gradients, the state of Adam, and a buffer for the rest."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    layers = [it for _ in range(6) for it in (torch.nn.Linear(4096, 4096), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(4096, 1)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    data, target = torch.randn(512, 4096, device="cuda"), torch.randn(512, 1, device="cuda")
    rest = torch.arange(max(0, int((options.gib - 2) * GIB)) // 8, device="cuda")

    def work(_step: int) -> str:
        loss = torch.nn.functional.mse_loss(net(data), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        # A sum of whole numbers: every byte of the buffer counts.
        return f"{float(loss).hex()} {int(rest.sum())}"

    return work


def decode(options: argparse.Namespace) -> Callable[[int], str]:
    """A decoder of random weights with a cache of keys and values, of which each token is one CUDA graph."""
    import torch

    torch.manual_seed(2)
    wide, heads, layers, longest, words = 2048, 16, 8, 1024, 32_000
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}

    def weights(*shape: int) -> Any:
        return torch.randn(*shape, **half) * shape[-1] ** -0.5

    table = weights(words, wide)
    blocks = [(weights(3 * wide, wide), weights(wide, wide), weights(4 * wide, wide), weights(wide, 4 * wide)) for _ in range(layers)]
    cache = [torch.zeros(2, longest, heads, wide // heads, **half) for _ in blocks]
    token, position = torch.zeros(1, dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
    logit, places = torch.zeros(1, **half), torch.arange(longest, device="cuda")

    def one() -> None:
        x = table[token]
        for (into, out, up, down), kept in zip(blocks, cache, strict=True):
            query, key, value = (torch.nn.functional.rms_norm(x, (wide,)) @ into.T).view(3, heads, wide // heads)
            kept[0].index_copy_(0, position, key[None])
            kept[1].index_copy_(0, position, value[None])
            scores = torch.einsum("hd,lhd->hl", query, kept[0]) * (wide // heads) ** -0.5
            scores = scores.masked_fill(places > position, float("-inf")).softmax(-1)
            x = x + torch.einsum("hl,lhd->hd", scores, kept[1]).reshape(1, wide) @ out.T
            x = x + torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (wide,)) @ up.T) @ down.T
        best = (torch.nn.functional.rms_norm(x, (wide,)) @ table.T).max(-1)
        token.copy_(best.indices)
        logit.copy_(best.values)
        position.copy_((position + 1) % longest)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    # Captured, not run: from here on the graph alone makes tokens.
    rest = torch.arange(max(0, int((options.gib - 2) * GIB)) // 8, device="cuda")
    total = int(rest.sum())

    def work(step: int, _alive: Callable[[], None] = one) -> str:  # what the graph reads must not be freed
        graph.replay()
        torch.cuda.synchronize()
        whole = int(rest.sum()) == total if step % 50 == 0 else True
        return f"{int(token)} {float(logit).hex()} {whole}"

    return work


def be(options: argparse.Namespace) -> int:
    """Makes steps and writes the result of each: so many, or until the standard input ends."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    work = {"plain": plain, "training": training, "decode": decode}[options.be](options)
    os.set_blocking(0, False)
    with open(options.file, "w") as out:
        step = 0
        while options.steps == 0 or step < options.steps:
            out.write(work(step) + "\n")
            out.flush()
            step += 1
            with contextlib.suppress(BlockingIOError):
                if options.steps == 0 and os.read(0, 1) == b"":
                    break
    return 0


# --- the moves ----------------------------------------------------------------------------------


def count(file: Path) -> int:
    """Lines that were written so far."""
    with contextlib.suppress(OSError):
        return file.read_bytes().count(b"\n")
    return 0


@contextlib.contextmanager
def started(mode: Gpumux, case: str, file: Path, steps: int, options: argparse.Namespace, logs: Path) -> Iterator[subprocess.Popen[Any]]:
    """The case's program as a tenant that sees both GPUs."""
    own = [sys.executable, __file__, "--be", case, "--file", str(file), "--steps", str(steps), "--gib", str(options.gib)]
    command = mode.command(own, case, None, ["--gpu", common.visible(2)])
    program = mode.start(command, logs / f"{case}-{steps}.log", stdin=subprocess.PIPE)
    try:
        yield program
    finally:
        common.end(program)


def moved(mode: Gpumux, tenant: str, gpu: int) -> dict[str, float]:
    """One move."""
    asked = mode.ask("move", tenant, "--gpu", common.visible(2).split(",")[gpu], "--json", timeout=330)
    if asked.returncode != 0:
        raise BenchError(asked.stderr.strip())
    return {name: value for name, value in json.loads(asked.stdout).items() if isinstance(value, float)}


def resident(mode: Gpumux, tenant: str) -> float:
    """GiB that a tenant has."""
    own = [it for it in mode.tenants_now() if it["name"] == tenant]
    return sum(share["in_use"] for it in own for share in it["memory"]) / GIB


def run(mode: Gpumux, case: str, options: argparse.Namespace, logs: Path) -> dict[str, float]:
    """A case's moves, then the same steps without any."""
    files = [logs / f"{case}-{name}.txt" for name in ("moved", "unmoved")]
    took: list[dict[str, float]] = []
    with started(mode, case, files[0], 0, options, logs) as program:
        tenant = mode.tenants[case]
        common.until("the first steps", common.READY_S, lambda: count(files[0]) >= AFTER, program)
        size = resident(mode, tenant)
        for n in range(options.moves):
            one = moved(mode, tenant, 1 - n % 2)
            one["pause_s"] = sum(one.values())
            took.append(one)
            say(f"{case}: move {n + 1}: " + ", ".join(f"{name} {value:.3f}" for name, value in one.items()))
            goal = count(files[0]) + AFTER
            common.until("the next steps", 60, lambda goal=goal: count(files[0]) >= goal, program)  # type: ignore[misc]
        assert program.stdin
        program.stdin.close()
        if program.wait(60) != 0:
            raise BenchError(f"the program failed: {common.tail(logs / f'{case}-0.log')}")
    steps = count(files[0])
    values = {"moves": len(took), "steps": steps, "gib": size}
    for name in took[0]:
        values[name] = sum(it[name] for it in took) / len(took)
    # The first move makes host memory, too.
    later = took[1:] or took
    for name in ("out_s", "driver_s", "back_s"):
        values[f"{name}_per_gib"] = sum(it[name] for it in later) / len(later) / max(size, 1e-9)
    with started(mode, case, files[1], steps, options, logs) as program:
        if program.wait(common.READY_S + options.seconds) != 0:
            raise BenchError(f"the program failed: {common.tail(logs / f'{case}-{steps}.log')}")
    texts = [file.read_text() for file in files]
    right = case != "plain" or set(texts[0].splitlines()) == {"0 wrong"}
    values["bit_exact"] = float(right and texts[0] == texts[1])
    return values


def main() -> int:
    """Moves the chosen programs."""
    parser = common.parser(
        "Tenants that move between two GPUs.",
        "  GPUMUX=.bundle/bin/gpumux python3 bench/move.py\n"
        "  GPUMUX=.bundle/bin/gpumux python3 bench/move.py --cases training --gib 16 --moves 40\n"
        "  gpumux emu --devices 2 -- python3 bench/move.py --cases plain --gib 0.25",
    )
    parser.add_argument("--cases", type=common.listed(CASES), default=list(CASES), help="a comma-separated selection")
    parser.add_argument("--gib", type=float, default=4.0, help="memory of a program [%(default)s]")
    parser.add_argument("--moves", type=int, default=20, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=300.0, help="for the steps without moves, at most [%(default)s]")
    for own in ("--be", "--file"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        return be(options)
    logs = common.begin(options)
    moves = options.moves
    options.moves = max(2, moves // 4) if options.quick else moves
    results = Results("move", options.out, CASES, ["gpumux"])
    for case in options.cases:
        with results.cell(case), Gpumux("gpumux", logs) as mode:
            values = run(mode, case, options, logs)
            results.add(case, "gpumux", values)
            if not values["bit_exact"]:
                raise BenchError("the results differ from those without moves")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
