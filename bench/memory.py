"""What moving memory costs and gains: sleep and wake, more tenants than memory, many models on one card, allocations.

Each part writes a results file of its own:

`swap`: cases are sizes (`8GiB`). Modes `gpumux` (a tenant that holds so much is put to sleep and woken, the best of
several), `checkpoint` (the driver's calls on the same program), `copy` (plain copies between pinned memory and the GPU). Values
`out_ms`, `in_ms`, `out_gbps`, `in_gbps`; for `gpumux` also `first_out_ms`, with making and pinning the host memory.

`oversubscribe`: cases `2x60%` and `4x60%`: so many training jobs of 60% of the card each. Modes `serial` (one after
another) and `gpumux` (all at once). Values `total_s`; the losses of all runs must be the same to the bit.

`models`: case `Nxgib`: so many models on one card, asked by turns with idle times. Modes `gpumux` (they sleep
when idle) and `cold` (a process is started for the request). Values: time to the answer, `latency_p50_ms` and `latency_p99_ms`.

`alloc`: cases by size and by who allocates. Modes `alone` and `gpumux`. Value `pair_us`: one allocation with its release.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
from common import BenchError, Gpumux, Mode, Results

WORKER = Path(__file__).resolve().parent / "memory_worker.py"
GIB = 1 << 30
SIZES = ["1GiB", "2GiB", "4GiB", "8GiB", "16GiB", "32GiB"]
JOBS = ["2x60%", "4x60%"]
ALLOCS = {
    "driver-4KiB": ("driver", 4 << 10),
    "driver-2MiB": ("driver", 2 << 20),
    "driver-64MiB": ("driver", 64 << 20),
    "torch-2MiB": ("torch", 2 << 20),
}
PARTS = {
    "swap": (SIZES, ["gpumux", "checkpoint", "copy"]),
    "oversubscribe": (JOBS, ["serial", "gpumux"]),
    "models": (["8x12GiB"], ["gpumux", "cold"]),
    "alloc": (list(ALLOCS), ["alone", "gpumux"]),
}


def gib(case: str) -> int:
    """`8GiB` is 8."""
    return int(case.removesuffix("GiB"))


def with_rates(values: dict[str, float], size: int) -> dict[str, float]:
    """Adds gigabytes per second to the times of moving so many bytes."""
    rates = {f"{way}_gbps": size / values[f"{way}_ms"] / 1e6 for way in ("out", "in")}
    return values | rates


def same(losses: Sequence[Sequence[str]]) -> None:
    """Raises BenchError unless all jobs had the same losses, to the bit."""
    if not losses or any(other != losses[0] for other in losses):
        raise BenchError("the losses differ")


class Api(http.client.HTTPConnection):
    """The daemon's API, without the time that it takes to start a program."""

    def __init__(self, mode: Gpumux) -> None:
        super().__init__("localhost", timeout=300)
        self.path = str(mode.folder / "api.sock")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)

    def ask(self, method: str, path: str) -> Any:
        """The answer; raises BenchError when it is refused."""
        self.request(method, path)
        answer = self.getresponse()
        body = answer.read()
        if answer.status >= 300:
            raise BenchError(f"{method} {path}: {answer.status} {body.decode(errors='replace')}")
        return json.loads(body) if body else None

    def timed_ms(self, path: str) -> float:
        """How long a POST takes."""
        begin = time.monotonic()
        self.ask("POST", path)
        return (time.monotonic() - begin) * 1e3


@contextlib.contextmanager
def started(
    mode: Mode, name: str, command: Sequence[str], promise: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A program in this mode, which ends with the block."""
    with open(mode.logs / f"{mode.name}-{name}.log", "a") as log:
        process = subprocess.Popen(
            mode.command(command, name, None, promise),
            env=os.environ | mode.environment(),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        common.end(process, 2.0)


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a worker says next."""
    assert process.stdout
    text = process.stdout.readline()
    if not text:
        raise BenchError(f"a worker ended with {process.wait(10)}: see the logs")
    return json.loads(text)


def worker(what: str, *arguments: str) -> list[str]:
    """The command of a worker."""
    return [sys.executable, str(WORKER), what, *arguments]


def holder(case: str, ready: Path) -> list[str]:
    """A program that holds so much memory and does nothing."""
    held = ["--memory", case, "--seconds", "600", "--ready-file", str(ready)]
    return [common.gpumux(), "workload", "idle", *held]


def wait_for(ready: Path, process: subprocess.Popen[str]) -> None:
    """Waits until a program has made its ready file."""
    deadline = time.monotonic() + common.REPLY_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchError("the program did not become ready")
        time.sleep(0.01)


def swap_gpumux(case: str, logs: Path, tries: int) -> dict[str, float]:
    """Sleeps and wakes of a tenant; the best of some, since the first one makes the host memory."""
    ready = logs / f"ready-{case}"
    with Gpumux("gpumux", logs) as mode:
        with started(mode, f"hold-{case}", holder(case, ready)) as process:
            wait_for(ready, process)
            api, tenant = Api(mode), f"/v1/tenants/{mode.tenants[f'hold-{case}']}"
            outs, ins = [], []
            for _ in range(tries):
                outs.append(api.timed_ms(f"{tenant}/sleep"))
                moved = sum(it["swapped"] for it in api.ask("GET", tenant)["memory"])
                if moved < gib(case) * GIB:
                    raise BenchError(f"only {moved} bytes were moved")
                ins.append(api.timed_ms(f"{tenant}/wake"))
            values = {"out_ms": min(outs), "in_ms": min(ins), "first_out_ms": outs[0]}
    return with_rates(values, gib(case) * GIB)


def swap_checkpoint(case: str, logs: Path) -> dict[str, float]:
    """The driver's own calls, from outside the process."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if cuda.cuInit(0) or not hasattr(cuda, "cuCheckpointProcessCheckpoint"):
        raise BenchError("this driver has no checkpoint calls")

    def call(name: str, pid: int) -> None:
        if result := getattr(cuda, name)(pid, None):
            raise BenchError(f"{name} answers {result}")

    ready, plain = logs / f"ready-checkpoint-{case}", Mode("checkpoint", logs)
    with started(plain, f"hold-{case}", holder(case, ready)) as process:
        wait_for(ready, process)
        begin = time.monotonic()
        call("cuCheckpointProcessLock", process.pid)
        call("cuCheckpointProcessCheckpoint", process.pid)
        middle = time.monotonic()
        call("cuCheckpointProcessRestore", process.pid)
        call("cuCheckpointProcessUnlock", process.pid)
        times = {"out_ms": (middle - begin) * 1e3, "in_ms": (time.monotonic() - middle) * 1e3}
    return with_rates(times, gib(case) * GIB)


def swap_copy(case: str, logs: Path) -> dict[str, float]:
    """Plain copies."""
    with started(Mode("copy", logs), case, worker("copy", "--gib", str(gib(case)))) as process:
        return with_rates(line(process), gib(case) * GIB)


def swap(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, quick: bool) -> None:
    """All cells of `swap`."""
    for case in cases:
        for mode in modes:
            with results.cell(f"{case} / {mode}"):
                match mode:
                    case "gpumux":
                        values = swap_gpumux(case, logs, 3 if quick else 6)
                    case "checkpoint":
                        values = swap_checkpoint(case, logs)
                    case _:
                        values = swap_copy(case, logs)
                results.add(case, mode, values)


def card_gib() -> float:
    """Memory of the first GPU."""
    text = common.run_quietly("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    if not text:
        raise BenchError("nvidia-smi does not say how much memory there is")
    return float(text.splitlines()[0]) / 1024


def oversubscribe(
    results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, quick: bool
) -> None:
    """All cells of `oversubscribe`."""
    size = 0.6 * card_gib()
    command = worker("train", "--gib", f"{size:.1f}", "--steps", "8" if quick else "40")
    for case in cases:
        count = int(case.partition("x")[0])
        losses: list[list[str]] = []
        for name in modes:
            with results.cell(f"{case} / {name}"):
                begin = time.monotonic()
                if name == "serial":
                    for n in range(count):
                        with started(Mode("serial", logs), f"job{n}", command) as process:
                            losses.append(line(process)["losses"])
                else:
                    with Gpumux("gpumux", logs) as mode, contextlib.ExitStack() as stack:
                        jobs = [
                            stack.enter_context(started(mode, f"job{n}", command, ["--class", "batch"]))
                            for n in range(count)
                        ]
                        losses += [line(job)["losses"] for job in jobs]
                total = time.monotonic() - begin
                same(losses)
                results.add(case, name, {"total_s": total})


def visits(models: int, requests: int, seed: int) -> list[tuple[int, float]]:
    """Which model is asked, after which pause; the same for the same seed."""
    rng = random.Random(seed)
    return [(rng.randrange(models), rng.uniform(0.2, 2.0)) for _ in range(requests)]


def models(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, quick: bool) -> None:
    """All cells of `models`."""
    for case in cases:
        count, size = int(case.partition("x")[0]), gib(case.partition("x")[2])
        command = worker("model", "--gib", str(size))
        trace = visits(count, 16 if quick else 80, 1)
        for name in modes:
            with results.cell(f"{case} / {name}"):
                ms: list[float] = []
                if name == "cold":
                    for _ in range(2 if quick else 5):
                        begin = time.monotonic()
                        with started(Mode("cold", logs), "model", command) as process:
                            line(process)
                            ms.append((time.monotonic() - begin) * 1e3)
                    results.add(case, name, common.latency_values(ms))
                    continue
                with Gpumux("gpumux", logs) as mode, contextlib.ExitStack() as stack:
                    promise = ["--class", "latency", "--sleep-after", "1s"]
                    servers = []
                    for n in range(count):
                        servers.append(stack.enter_context(started(mode, f"model{n}", command, promise)))
                        line(servers[-1])
                    for at, pause in trace:
                        time.sleep(pause)
                        begin = time.monotonic()
                        print("ask", file=servers[at].stdin, flush=True)
                        answer = line(servers[at])
                        ms.append((time.monotonic() - begin) * 1e3)
                        if not answer["same"]:
                            raise BenchError(f"model {at} answers otherwise than before it slept")
                    results.add(case, name, common.latency_values(ms))


def alloc(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, quick: bool) -> None:
    """All cells of `alloc`: by turns, so that drift is shared."""
    steps = "2000" if quick else "10000"
    for case in cases:
        way, size = ALLOCS[case]
        command = worker("alloc", "--way", way, "--bytes", str(size), "--steps", steps)
        for name in modes:
            with results.cell(f"{case} / {name}"), common.mode(name, logs) as mode:
                best = []
                for n in range(3):
                    with started(mode, f"alloc{n}", command) as process:
                        best.append(line(process)["us"])
                results.add(case, name, {"pair_us": min(best)})


RUN = {"swap": swap, "oversubscribe": oversubscribe, "models": models, "alloc": alloc}


def main() -> int:
    """Runs one part."""
    parser = common.parser(
        "Moving memory: sleep and wake, more tenants than memory, many models, allocations.",
        "  GPUMUX=target/release/gpumux python3 bench/memory.py swap --cases 8GiB\n"
        "  python3 bench/memory.py oversubscribe --quick",
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--cases", help="a comma-separated selection")
    parser.add_argument("--modes", help="a comma-separated selection")
    options = parser.parse_args()
    try:
        cases, modes = (
            common.listed(all_of)(chosen) if chosen else all_of
            for chosen, all_of in zip((options.cases, options.modes), PARTS[options.part], strict=True)
        )
    except argparse.ArgumentTypeError as wrong:
        parser.error(str(wrong))
    logs = common.begin(options)
    results = Results(options.part, options.out, *PARTS[options.part])
    RUN[options.part](results, cases, modes, logs, options.quick)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
