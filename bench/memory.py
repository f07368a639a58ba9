"""What moving memory costs and gains: sleep and wake, more tenants than memory, many models on one card, allocations.

Each part writes a results file of its own:

`swap`: cases are sizes (`8GiB`). Modes `gpumux` (a tenant that holds so much is put to sleep and woken: medians), `checkpoint` (the driver's calls on the same program), `copy` (plain copies between pinned memory and the GPU). Values
`out_ms`, `in_ms`, `out_gbps`, `in_gbps`; for `gpumux` also `first_out_ms`, with making and pinning the host memory.

`losses`: one training job, `eager` and as a CUDA `graph`. Modes `alone` and `gpumux`, which puts it to sleep and wakes it all
the time. Values `total_s` and `moves`; the losses must be the same to the bit.

`oversubscribe`: cases `2x60%` and `4x60%`: so many training jobs of 60% of the card each. Modes `serial` (one after
another) and `gpumux` (all at once). Values `total_s`; the losses of all runs must be the same to the bit.

`models`: cases `8x12GiB` (more than the card) and `4x16GiB`: so many models on one card, asked one after another with idle times. Modes `gpumux` (they sleep
when idle) and `cold` (a process is started for the request). Values: time to the answer, `latency_p50_ms` and `latency_p99_ms`.

`alloc`: cases by size and allocator. Modes `alone` and `gpumux`. Values of one allocation with its release: `pair_us`, `pair_noise_us`, `pair_added_us`, as `crews.py` measures.

`all`: every part, one after the other; with `--quick` the cases that prove most, in 150 s.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import itertools
import json
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common
import crews
from common import BenchError, Gpumux, Mode, Results, Worker, say

WORKER = Path(__file__).resolve().parent / "memory_worker.py"
GIB = 1 << 30
SIZES = ["1GiB", "2GiB", "4GiB", "8GiB", "16GiB", "32GiB"]
JOBS = ["2x60%", "4x60%"]
ALLOCS = {
    "driver-4KiB": ("driver", 4 << 10),
    "driver-2MiB": ("driver", 2 << 20),
    "driver-64MiB": ("driver", 64 << 20),
    "async-2MiB": ("async", 2 << 20),
    "torch-2MiB": ("torch", 2 << 20),
}
# Of `alloc`: crews, rounds, and the batches of a turn, of 64 allocations each.
CREWS, ROUNDS, TURN = 3, 20, 10
PARTS = {
    "swap": (SIZES, ["gpumux", "checkpoint", "copy"]),
    "losses": (["eager", "graph"], ["alone", "gpumux"]),
    "oversubscribe": (JOBS, ["serial", "gpumux"]),
    "models": (["8x12GiB", "4x16GiB"], ["gpumux", "cold"]),
    "alloc": (list(ALLOCS), ["alone", "gpumux"]),
}

# Of them, what `all --quick` runs.
QUICK = {
    "swap": (["8GiB", "16GiB"], ["gpumux", "checkpoint", "copy"]),
    "losses": (["eager"], ["alone", "gpumux"]),
    "oversubscribe": (["2x60%"], ["serial", "gpumux"]),
    "alloc": (["driver-2MiB", "async-2MiB"], ["alone", "gpumux"]),
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

    def device(self) -> dict[str, Any]:
        """The first device that programs see. The daemon has all of the machine."""
        seen, every = common.visible(), self.ask("GET", "/v1/devices")
        return next(it for it in every if seen in (it["uuid"], str(it["index"])))

    def memory(self) -> dict[str, Any]:
        """How its memory is used."""
        uuid = self.device()["uuid"]
        return next(it for it in self.ask("GET", "/v1/memory") if it["device"] == uuid)

    def timed_ms(self, path: str) -> float:
        """How long a POST takes."""
        begin = time.monotonic()
        self.ask("POST", path)
        return (time.monotonic() - begin) * 1e3


class Nvml:
    """What the driver reports of the first device that programs see, independently of gpumux."""

    class _Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    def __init__(self) -> None:
        self.library, self.device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        seen = common.visible()
        by, which = (self.library.nvmlDeviceGetHandleByIndex_v2, int(seen)) if seen.isdigit() else (self.library.nvmlDeviceGetHandleByUUID, seen.encode())
        if self.library.nvmlInit_v2() or by(which, ctypes.byref(self.device)):
            raise BenchError(f"NVML does not answer, or knows no device {seen}")

    def count(self) -> int:
        """Devices."""
        found = ctypes.c_uint()
        if result := self.library.nvmlDeviceGetCount_v2(ctypes.byref(found)):
            raise BenchError(f"nvmlDeviceGetCount answers {result}")
        return found.value

    def memory(self) -> Nvml._Memory:
        """In bytes."""
        found = self._Memory()
        if result := self.library.nvmlDeviceGetMemoryInfo(self.device, ctypes.byref(found)):
            raise BenchError(f"nvmlDeviceGetMemoryInfo answers {result}")
        return found


@contextlib.contextmanager
def cell(results: Results, what: str, logs: Path) -> Iterator[None]:
    """A cell that, when it fails, shows the last output of every process."""
    begin = time.time()
    with results.cell(what):
        try:
            yield
        except Exception:
            for log in sorted(logs.glob("*.log")):
                if log.stat().st_mtime >= begin and (text := common.tail(log, 25)):
                    say(f"end of {log.name}:\n    {text}")
            kernel = common.run_quietly("dmesg").splitlines()
            for said in [line for line in kernel if "Xid" in line][-5:]:
                say(said)
            raise


def each(of: Callable[[str, str, Path, argparse.Namespace], dict[str, float]]) -> Callable[..., None]:
    """A part whose cells are measured one after the other: `of(case, mode, logs, options)` gives their values."""

    def part(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
        for case, name in itertools.product(cases, modes):
            with cell(results, f"{case} / {name}", logs):
                results.add(case, name, of(case, name, logs, options))

    return part


@contextlib.contextmanager
def started(mode: Mode, name: str, command: Sequence[str], promise: Sequence[str] = ()) -> Iterator[Worker]:
    """A program in this mode, which ends with the block."""
    worker = Worker(name, [], mode, program=command, promise=promise)
    try:
        yield worker
    finally:
        worker.close(2.0)


def script(what: str, *arguments: str) -> list[str]:
    """The command of a worker."""
    return [sys.executable, str(WORKER), what, *arguments]


@contextlib.contextmanager
def holding(mode: Mode, name: str, size: str, *arguments: str, promise: Sequence[str] = ()) -> Iterator[Worker]:
    """A program that has so much memory, keeps it, and does nothing."""
    ready = mode.logs / f"ready-{mode.name}-{name}"
    # One of an earlier run is no sign.
    ready.unlink(missing_ok=True)
    command = [common.gpumux(), "workload", "idle", "--memory", size, "--seconds", "3600", "--ready-file", str(ready), *arguments]
    with started(mode, name, command, promise) as process:
        common.until(f"{name} has {size}", common.REPLY_S, ready.exists, process.process)
        yield process


def swap_gpumux(case: str, logs: Path, tries: int, *arguments: str) -> dict[str, float]:
    """Sleeps and wakes of a tenant: the medians, the first time out apart, since it makes the host memory."""
    with Gpumux("gpumux", logs) as mode, holding(mode, f"hold-{case}", case, *arguments):
        api, tenant = Api(mode), f"/v1/tenants/{mode.tenants[f'hold-{case}']}"
        outs, ins = [], []
        for _ in range(tries):
            outs.append(api.timed_ms(f"{tenant}/sleep"))
            moved = sum(it["swapped"] for it in api.ask("GET", tenant)["memory"])
            if moved < gib(case) * GIB:
                raise BenchError(f"only {moved} bytes were moved")
            ins.append(api.timed_ms(f"{tenant}/wake"))
        values = {"out_ms": median(outs[1:]), "in_ms": median(ins), "first_out_ms": outs[0]}
    return with_rates(values, gib(case) * GIB)


def swap_checkpoint(case: str, logs: Path) -> dict[str, float]:
    """The driver's own calls, from outside the process."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if cuda.cuInit(0) or not hasattr(cuda, "cuCheckpointProcessCheckpoint"):
        raise BenchError("this driver has no checkpoint calls")

    def call(name: str, pid: int) -> None:
        if result := getattr(cuda, name)(pid, None):
            raise BenchError(f"{name} answers {result}")

    with holding(Mode("checkpoint", logs), f"hold-{case}", case) as process:
        pid, begin = process.process.pid, time.monotonic()
        call("cuCheckpointProcessLock", pid)
        call("cuCheckpointProcessCheckpoint", pid)
        middle = time.monotonic()
        call("cuCheckpointProcessRestore", pid)
        call("cuCheckpointProcessUnlock", pid)
        times = {"out_ms": (middle - begin) * 1e3, "in_ms": (time.monotonic() - middle) * 1e3}
    return with_rates(times, gib(case) * GIB)


def swap(case: str, name: str, logs: Path, options: argparse.Namespace) -> dict[str, float]:
    """One cell of `swap`."""
    match name:
        case "gpumux":
            return swap_gpumux(case, logs, 3 if options.quick else 6)
        case "checkpoint":
            return swap_checkpoint(case, logs)
        case _:
            with started(Mode("copy", logs), case, script("copy", "--gib", str(gib(case)))) as copying:
                return with_rates(copying.reply(common.READY_S), gib(case) * GIB)


def trained(jobs: Sequence[Worker], patience_s: float) -> list[list[str]]:
    """Has jobs that are ready train, and returns their losses."""
    for job in jobs:
        job.send()
    return [job.reply(patience_s)["losses"] for job in jobs]


def oversubscribe(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """All cells of `oversubscribe`. Starting Python and PyTorch is not measured."""
    size = 0.6 * Nvml().memory().total / GIB
    command = script("train", "--gib", f"{size:.1f}", "--steps", "60" if options.quick else "200")
    patience_s = 120.0 if options.quick else 600.0
    for case in cases:
        count = int(case.partition("x")[0])
        losses: list[list[str]] = []
        for name in modes:
            with cell(results, f"{case} / {name}", logs):
                total = 0.0
                with common.mode("gpumux" if name == "gpumux" else "alone", logs) as mode:
                    for group in [range(count)] if name == "gpumux" else [[n] for n in range(count)]:
                        with contextlib.ExitStack() as stack:
                            promise = ["--class", "batch"]
                            enter = stack.enter_context
                            jobs = [enter(started(mode, f"{name}-job{n}", command, promise)) for n in group]
                            for job in jobs:
                                job.reply(common.READY_S)
                            begin = time.monotonic()
                            losses += trained(jobs, count * patience_s)
                            total += time.monotonic() - begin
                same(losses)
                results.add(case, name, {"total_s": total})


def losses(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """All cells of `losses`: with gpumux, a job is put to sleep and woken all the time."""
    for case in cases:
        steps = "600" if options.quick else "2000"
        command = script("train", "--gib", "4", "--width", "4096", "--steps", steps)
        command += ["--graph"] if case == "graph" else []
        found: list[list[str]] = []
        for name in modes:
            with cell(results, f"{case} / {name}", logs), common.mode(name, logs) as mode:
                with started(mode, f"{name}-{case}", command) as job:
                    job.reply(common.READY_S)
                    begin, moves = time.monotonic(), 0
                    if isinstance(mode, Gpumux):
                        moves = forced(mode, job, f"/v1/tenants/{mode.tenants[f'{name}-{case}']}", 0.3)
                        found.append(job.reply(common.REPLY_S)["losses"])
                        if moves < 3:
                            raise BenchError(f"it was moved only {moves} times")
                    else:
                        found += trained([job], common.REPLY_S)
                    seconds = time.monotonic() - begin
                same(found)
                results.add(case, name, {"total_s": seconds, "moves": moves})


def forced(mode: Gpumux, job: Worker, tenant: str, pause_s: float) -> int:
    """Has a job train, and moves its memory away and back until it has ended; how often."""
    job.send()
    api, moves = Api(mode), 0
    deadline = time.monotonic() + common.REPLY_S
    while job.lines.empty() and time.monotonic() < deadline:
        time.sleep(pause_s)
        # Refused while it captures a graph, has no context yet, or has just ended.
        with contextlib.suppress(BenchError):
            api.ask("POST", f"{tenant}/sleep")
            moves += any(it["swapped"] for it in api.ask("GET", tenant)["memory"])
            api.ask("POST", f"{tenant}/wake")
    return moves


def visits(models: int, requests: int, seed: int) -> list[tuple[int, float]]:
    """Which model is asked, after which pause; the same for the same seed."""
    rng = random.Random(seed)
    return [(rng.randrange(models), rng.uniform(0.2, 2.0)) for _ in range(requests)]


def models(case: str, name: str, logs: Path, options: argparse.Namespace) -> dict[str, float]:
    """One cell of `models`."""
    count, size = int(case.partition("x")[0]), gib(case.partition("x")[2])
    command, ms = script("model", "--gib", str(size)), list[float]()
    if name == "cold":
        for _ in range(2 if options.quick else 5):
            begin = time.monotonic()
            with started(Mode("cold", logs), "model", command) as process:
                process.reply(common.READY_S)
                ms.append((time.monotonic() - begin) * 1e3)
        return common.latency_values(ms)
    with Gpumux("gpumux", logs) as mode, contextlib.ExitStack() as stack:
        promise = ["--class", "latency", "--sleep-after", "1s"]
        servers = [stack.enter_context(started(mode, f"model{n}", command, promise)) for n in range(count)]
        for server in servers:
            server.reply(common.READY_S)
        for at, pause in visits(count, 16 if options.quick else 80, 1):
            time.sleep(pause)
            begin = time.monotonic()
            servers[at].send()
            answer = servers[at].reply(common.REPLY_S)
            ms.append((time.monotonic() - begin) * 1e3)
            if not answer["same"]:
                raise BenchError(f"model {at} answers otherwise than before it slept")
    return common.latency_values(ms)


def alloc(results: Results, cases: Sequence[str], _modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """All cells of `alloc`: both modes, in turns."""
    for case in cases:
        way, size = ALLOCS[case]
        command = script("alloc", "--way", way, "--bytes", str(size))
        with cell(results, case, logs), Gpumux("gpumux", logs) as managed:
            found = crews.measure(Mode("alone", logs), managed, "alloc", command, CREWS, 4 if options.quick else ROUNDS, TURN)
            crews.add(results, case, found, "us")


RUN = {"swap": each(swap), "losses": losses, "oversubscribe": oversubscribe, "models": each(models), "alloc": alloc}


def main() -> int:
    """Runs one part, or all."""
    parser = common.parser(
        "Moving memory: sleep and wake, more tenants than memory, many models, allocations.",
        "  GPUMUX=target/release/gpumux python3 bench/memory.py all --quick\n"
        "  GPUMUX=target/release/gpumux python3 bench/memory.py swap --cases 8GiB\n"
        "  python3 bench/memory.py oversubscribe --quick",
    )
    common.parts(parser, PARTS)
    options = parser.parse_args()
    logs = common.begin(options)

    def usual(part: str) -> common.Part:
        return QUICK.get(part, ([], [])) if options.part == "all" and options.quick else PARTS[part]

    return common.run_parts(parser, options, PARTS, lambda part, *chosen: RUN[part](*chosen, logs, options), usual=usual)


if __name__ == "__main__":
    sys.exit(main())
