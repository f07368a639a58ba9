"""What is guaranteed while memory does not suffice: progress, accounting, latency, and programs that no other benchmark has.

Jobs are passes over all of their memory (`gpumux workload sweep`): each pass verifies every element, and makes it another. A row is
the worst of its rounds, unless said; a wrong element, an error of a job or a job that is stuck fails the cell.

`together`: jobs that do not fit together, started at the same moment. Cases `2x60%`, `3x45%` (of the device's memory) and `2+endless`: two of 45%
beside one of 60% that never ends. Modes `serial` (one after the other) and `gpumux`; with `--kill` also `kill-tenant` and `kill-daemon`, at
a random moment. With `--room`, a program that gpumux does not manage takes the rest of the device. Values `first_s` (until every job has made its first pass), `longest_s` (between two passes of a job), `total_s`, `total_rel` (mean of all
rounds, relative to that of `serial`, which every fourth round has), `moves`, `passes` (the fewest of a round), `wrong`.

`restart`: the daemon is killed and started again beside a job of 60% that allocates and frees. Values `restarts`, `before_gib` and `worst_gib` (the
accounting less what NVML reports; at most BOUND contexts), `back_s` (until the job is accounted again).

`guaranteed`: a latency tenant with a memory guarantee, `alone` and beside two jobs that exceed the rest together (`gpumux`). Values `latency_p50_ms`,
`latency_p99_ms` from the moment when the two begin, `moves` (of the two after their first passes; at least `--moves`). The server's own memory must not move.

`arena`: two jobs that do not fit together, with their memory in one allocation each (mode `allocation`) or in many (`pieces`). Values `lacking_gib`,
`moved_gib` (bytes in a move to the host, mean of the job with more; fails where that is more than is lacking and OVER), `moves`, `longest_s`, `wrong`.

`chunks`: a tenant with `--size` of memory sleeps and wakes. Cases: one `allocation`, and physical memory that the program maps itself in chunks of a
size. Values as of `memory.py swap`: `out_ms`, `in_ms`, `out_gbps`, `in_gbps`, `first_out_ms`.

`programs`: cases `triton-8-pointers` (`launch_us`, `launch_noise_us`, `launch_added_us`, as `crews.py` measures), `torch-async` and `cupy-async` (`rate` of allocations with a kernel each, by stream-ordered
pools), modes `alone` and `gpumux`; `jax-75%` (mode `gpumux`): JAX with its default preallocation beside a job of 60%: `jax_rate`, `passes`, `moved_gib`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import crews
from common import BenchError, Gpumux, Mode, Results, Worker, say, until
from memory import Api, Nvml, cell, each, holding, started, swap_gpumux

WORKER = Path(__file__).resolve().parent / "residency_worker.py"
GIB, MIB = 1 << 30, 1 << 20
# Accounting may differ from NVML's by so many contexts: what one takes depends on the program's modules.
BOUND = 2
TOGETHER = {"2x60%": (["60%", "60%"], None), "3x45%": (["45%"] * 3, None), "2+endless": (["45%", "45%"], "60%")}
SERIAL_EVERY = 4
KILLS = ["kill-tenant", "kill-daemon"]
# What a job's context takes of a device, roughly, and the contexts of `--room`: three jobs and the program that takes the rest.
CONTEXT, CONTEXTS = 600 * MIB, 4
# A move takes whole chunks of 64 MiB, and tenants keep leases of as much that they do not use yet.
OVER = 128 * MIB
# Of `triton-8-pointers`: crews, rounds, and the batches of a turn, of 64 launches each.
CREWS, ROUNDS, TURN = 4, 20, 30
PARTS = {
    "together": (list(TOGETHER), ["serial", "gpumux", *KILLS]),
    "restart": (["60%"], ["gpumux"]),
    "guaranteed": (["20%"], ["alone", "gpumux"]),
    "arena": (["60%+45%"], ["allocation", "pieces"]),
    "chunks": (["allocation", "16MiB", "64MiB", "256MiB", "1GiB"], ["gpumux"]),
    "programs": (["triton-8-pointers", "torch-async", "cupy-async", "jax-75%"], ["alone", "gpumux"]),
}


def part_of(text: str, total: int) -> int:
    """`60%` of a device, in whole MiB."""
    return int(float(text.removesuffix("%")) / 100 * total) // MIB * MIB


def sweep(size: int, *arguments: str) -> list[str]:
    """The command of a job."""
    return [common.gpumux(), "workload", "sweep", "--json", "--memory", str(size), *arguments]


def pieces(size: int) -> int:
    """Size of a job's allocations: many, as programs have, in whole pieces of physical memory."""
    return max(size // 512 // MIB, 1) * 2 * MIB


class Jobs:
    """Jobs that begin at the same moment, looked at while they run."""

    def __init__(self, mode: Mode, logs: Path, enter: Callable[[Any], Worker]) -> None:
        self.mode, self.enter = mode, enter
        self.folder = Path(logs) / f"{mode.name}-{time.monotonic_ns()}"
        self.folder.mkdir()
        self.workers: dict[str, Worker] = {}
        self.first: dict[str, float] = {}
        self.moves: dict[str, int] = {}
        self.moved: dict[str, int] = {}
        self.api = Api(mode) if isinstance(mode, Gpumux) else None

    def add(self, name: str, size: int, *arguments: str, promise: Sequence[str] = ("--class", "batch"), whole: bool = False) -> None:
        """One more, which waits for `begin`; its memory is in pieces, or whole."""
        files = ["--ready-file", str(self.folder / name), "--start-file", str(self.folder / "start")]
        piece = [] if whole else ["--piece", str(pieces(size))]
        command = sweep(size, *piece, *files, *arguments)
        self.workers[name] = self.enter(started(self.mode, name, command, promise))

    def begin(self) -> None:
        """Lets all of them begin."""
        self.begun = time.monotonic()
        (self.folder / "start").touch()

    def look(self) -> None:
        """Notes which have made a pass, and how often gpumux has moved their memory."""
        for name in self.workers:
            if name not in self.first and (self.folder / name).exists():
                self.first[name] = time.monotonic() - self.begun
        if not self.api:
            return
        try:
            for tenant in self.api.ask("GET", "/v1/tenants"):
                self.moves[tenant["name"]] = max(self.moves.get(tenant["name"], 0), tenant["moves"]["outs"])
                self.moved[tenant["name"]] = max(self.moved.get(tenant["name"], 0), tenant["moves"]["out_bytes"])
        except (OSError, http.client.HTTPException, BenchError):
            # A daemon that was killed answers again, on a new connection, when it has started.
            self.api.close()

    def wait(self, names: Sequence[str], patience_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Until these have ended."""
        while any(self.workers[name].process.poll() is None for name in names):
            self.look()
            meanwhile()
            if time.monotonic() > self.begun + patience_s:
                waiting = [name for name in names if self.workers[name].process.poll() is None]
                stuck = [f"{name} ({'no pass' if name not in self.first else 'some passes'})" for name in waiting]
                self.record()
                raise BenchError(f"not done after {patience_s:.0f} s: {', '.join(stuck)}; see {self.folder}")
            time.sleep(0.02)
        self.look()

    def record(self) -> None:
        """Keeps what gpumux knows of jobs that are stuck."""
        if isinstance(self.mode, Gpumux):
            with contextlib.suppress(Exception):
                (self.folder / "tenants.json").write_text(str(self.mode.tenants_now()))
                self.mode.trace(self.folder / "trace.json", 60)

    def report(self, name: str) -> dict[str, Any]:
        """The report of one that has ended, or that is ended by this; raises BenchError if anything was wrong."""
        worker = self.workers[name]
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGTERM)
        found = worker.reply(common.REPLY_S)
        if found["errors"] or found["mismatches"] or worker.process.wait(20):
            raise BenchError(f"{name}: {found['mismatches']} elements wrong, {found['errors']} errors: {found.get('error', '')}")
        return found


def together_once(case: str, name: str, logs: Path, total: int, passes: int, seed: int) -> dict[str, float]:
    """One round of one mode."""
    sizes, endless = TOGETHER[case]
    values, rng = {"first_s": 0.0, "longest_s": 0.0, "total_s": 0.0, "moves": 0.0, "passes": 0.0, "wrong": 0.0}, random.Random(seed)
    groups = [[n] for n in range(len(sizes))] if name == "serial" else [list(range(len(sizes)))]
    mode = Mode(name, logs) if name == "serial" else Gpumux(name, logs)
    with mode:
        for group in groups:
            with contextlib.ExitStack() as stack:
                jobs = Jobs(mode, logs, stack.enter_context)
                for n in group:
                    jobs.add(f"{name}-job{n}", part_of(sizes[n], total), "--passes", str(passes))
                ending = list(jobs.workers)
                if endless and name != "serial":
                    jobs.add(f"{name}-endless", part_of(endless, total), "--seconds", "3600")
                jobs.begin()
                kill = Kill(name, jobs, rng)
                jobs.wait(ending, 120 + 30 * len(jobs.workers), kill.look)
                values["total_s"] += time.monotonic() - jobs.begun
                for job in [it for it in jobs.workers if it != kill.victim]:
                    found = jobs.report(job)
                    values["longest_s"] = max(values["longest_s"], found["max_us"] / 1e6)
                    values["passes"] += found["calls"]
                    values["wrong"] += found["mismatches"]
                values["first_s"] = max(values["first_s"], *jobs.first.values())
                values["moves"] += sum(jobs.moves.values())
                if name in KILLS and not kill.done:
                    raise BenchError("the jobs ended before anything was killed")
    return values


class Kill:
    """Ends a tenant or the daemon at a random moment; the daemon starts again after up to three seconds."""

    def __init__(self, what: str, jobs: Jobs, rng: random.Random) -> None:
        self.what, self.jobs, self.done = what, jobs, what not in KILLS
        self.at, self.pause = rng.uniform(0.2, 5.0), rng.uniform(0.0, 3.0)
        self.victim = rng.choice(list(jobs.workers)) if what == "kill-tenant" else None

    def look(self) -> None:
        if self.done or time.monotonic() < self.jobs.begun + self.at:
            return
        self.done = True
        say(f"{self.what} after {self.at:.2f} s {self.victim or f'for {self.pause:.2f} s'}")
        if self.victim:
            os.killpg(self.jobs.workers[self.victim].process.pid, signal.SIGKILL)
        elif isinstance(self.jobs.mode, Gpumux):
            self.jobs.mode.kill_daemon()
            time.sleep(self.pause)
            self.jobs.mode.start_daemon()


@contextlib.contextmanager
def room(wanted: str | None, logs: Path) -> Iterator[int]:
    """So many bytes of the device for jobs beside their contexts: the rest is taken by a program that gpumux does not manage."""
    nvml = Nvml()
    if not wanted:
        yield nvml.memory().total
        return
    size = int(float(wanted.removesuffix("GiB")) * GIB)
    rest = nvml.memory().free - size - CONTEXTS * CONTEXT
    with holding(Mode("alone", logs), "rest", f"{rest // MIB}MiB"):
        yield size


def together(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """All cells of `together`, in rounds."""
    with room(options.room, logs) as total:
        for case in cases:
            each_mode: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
            for number, name in itertools.product(range(options.rounds), modes):
                if name == "serial" and number % SERIAL_EVERY:
                    continue
                with cell(results, f"{case} / {name}, round {number}", logs):
                    each_mode[name].append(together_once(case, name, logs, total, options.passes, number))
                    least = {"moves", "passes"}
                    worst = {key: (min if key in least else max)(it[key] for it in each_mode[name]) for key in each_mode[name][0]}
                    if name == "gpumux" and each_mode.get("serial"):
                        mean = {it: statistics.fmean(one["total_s"] for one in each_mode[it]) for it in ("serial", name)}
                        worst["total_rel"] = mean[name] / mean["serial"]
                    results.add(case, name, worst | {"rounds": len(each_mode[name])})


def typical(api: Api, of: Callable[[dict[str, Any]], int]) -> int:
    """A value of the device's memory: the median of ten looks, since jobs allocate and move meanwhile."""
    looks = []
    for _ in range(10):
        looks.append(of(api.memory()))
        time.sleep(0.1)
    return int(statistics.median(looks))


def excess(api: Api, nvml: Nvml) -> int:
    """Bytes that gpumux counts beyond what NVML reports."""
    return typical(api, lambda device: device["total"] - device["free"] - nvml.memory().used)


def restart(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """The cell of `restart`."""
    nvml = Nvml()
    for case in cases:
        with cell(results, f"{case} / gpumux", logs), Gpumux("restart", logs) as mode, contextlib.ExitStack() as stack:
            jobs, size = Jobs(mode, logs, stack.enter_context), part_of(case, nvml.memory().total)
            jobs.add("restart-job", size, "--seconds", "3600", "--churn", str(max(size // 256 // MIB, 1) * MIB))
            jobs.begin()
            job = jobs.workers["restart-job"]
            until("the first pass", 60, lambda: (jobs.folder / "restart-job").exists() or job.process.poll() is not None)
            context = Api(mode).device()["context_bytes"]
            time.sleep(2.5)  # two of the daemon's looks at NVML
            before = excess(Api(mode), nvml)
            off, back = [abs(before)], []
            for number in range(options.restarts):
                mode.kill_daemon()
                time.sleep((number % 4) * 0.7)
                begin = time.monotonic()
                mode.start_daemon()
                counted = lambda: sum(it["in_use"] for it in Api(mode).memory()["tenants"])  # noqa: E731
                until("the job's memory is accounted", 20, lambda: counted() >= size)
                back.append(time.monotonic() - begin)
                off.append(abs(excess(Api(mode), nvml)))
                if job.process.poll() is not None:
                    raise BenchError(f"the job ended after {number + 1} restarts: {common.tail(job.log)}")
                values = {"restarts": number + 1, "before_gib": before / GIB, "worst_gib": max(off) / GIB, "back_s": max(back)}
                results.add(case, "gpumux", values)
            found = jobs.report("restart-job")
            say(f"the job made {found['calls']} passes and found nothing wrong")
            if max(off) > BOUND * context:
                raise BenchError(f"the accounting is off by {max(off) / GIB:.2f} GiB, more than {BOUND} contexts")


def guaranteed(case: str, name: str, logs: Path, options: argparse.Namespace) -> dict[str, float]:
    """One cell of `guaranteed`."""
    total = Nvml().memory().total
    own = part_of(case, total)
    with Gpumux(f"guaranteed-{name}", logs) as mode, contextlib.ExitStack() as stack:
        jobs = Jobs(mode, logs, stack.enter_context)
        requests = ["--rate", "100", "--kernels", "10", "--kernel-us", "50", "--memory", str(own)]
        files = ["--start-file", str(jobs.folder / "measure"), "--ready-file", str(jobs.folder / "warm")]
        command = [common.gpumux(), "workload", "latency", "--json", "--seconds", str(options.seconds), *requests, *files]
        server = stack.enter_context(started(mode, "server", command, ["--class", "latency", "--memory-guaranteed", str(own + 64 * MIB)]))
        until("the server is warm", 60, (jobs.folder / "warm").exists)
        if name == "gpumux":
            device = Api(mode).memory()
            context = Api(mode).device()["context_bytes"]
            # So little more than there is room for that moves are short, and turns are.
            size = (device["free"] - 2 * context + total // 128) // 2 // MIB * MIB
            for n in range(2):
                jobs.add(f"busy{n}", size, "--seconds", "3600")
            until("both have a context", 60, lambda: sum(bool(it["domains"]) for it in mode.tenants_now()) == 3)
        # From now on the server is never idle, so that its memory stays.
        (jobs.folder / "measure").touch()
        jobs.begin()
        deadline = time.monotonic() + options.seconds + 30
        before = None
        while server.lines.empty() and time.monotonic() < deadline:
            jobs.look()
            # While they allocate, each piece may move another.
            if before is None and len(jobs.first) == len(jobs.workers):
                before = sum(jobs.moves.values())
            time.sleep(0.1)
        found = server.reply(5)
        if found["errors"]:
            raise BenchError(f"the server: {found['error']}")
        moves = sum(jobs.moves.get(mode.tenants[job], 0) for job in jobs.workers) - (before or 0)
        own_moves = jobs.moves.get(mode.tenants["server"], 0)
        say(f"{case} / {name}: {moves} moves of the two, {own_moves} of the server")
        if name == "gpumux" and (moves < options.moves or own_moves):
            raise BenchError(f"{moves} moves of the two jobs (at least {options.moves}), {own_moves} of the server (none)")
        for job in jobs.workers:
            jobs.report(job)
    times = {f"latency_{q}_ms": found[f"{q}_us"] / 1e3 for q in ("p50", "p99")}
    return times | {"latency_max_ms": found["max_us"] / 1e3, "late": found["late"], "moves": moves}


def lacking(api: Api) -> int:
    """Bytes that all tenants have, on the device and the host, beyond what the device has room for."""
    return typical(api, lambda device: sum(it["in_use"] + it["swapped"] for it in device["tenants"]) - (device["total"] - device["occupied"]))


def arena(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """All cells of `arena`."""
    total = Nvml().memory().total
    for case, name in itertools.product(cases, modes):
        with cell(results, f"{case} / {name}", logs), Gpumux(f"arena-{name}", logs) as mode, contextlib.ExitStack() as stack:
            jobs = Jobs(mode, logs, stack.enter_context)
            for n, part in enumerate(case.split("+")):
                jobs.add(f"{name}-job{n}", part_of(part, total), "--seconds", "3600", whole=name == "allocation")
            jobs.begin()
            tenants = [mode.tenants[job] for job in jobs.workers]

            def turns(least: Sequence[int]) -> bool:
                jobs.look()
                ended = [job for job, worker in jobs.workers.items() if worker.process.poll() is not None]
                if ended:
                    raise BenchError(f"{ended[0]} has ended: {common.tail(jobs.workers[ended[0]].log)}")
                return all(jobs.moves.get(it, 0) >= count for it, count in zip(tenants, least, strict=True))

            # While they allocate, each allocation may move another.
            until("every job has made a pass", 300, lambda: (turns([0, 0]), len(jobs.first) == len(tenants))[1])
            moves, moved = dict(jobs.moves), dict(jobs.moved)
            until("the turns", 60 + 120 * options.turns, lambda: turns([moves.get(it, 0) + options.turns for it in tenants]))
            over = lacking(Api(mode))
            counts = {it: jobs.moves[it] - moves.get(it, 0) for it in tenants}
            means = [(jobs.moved[it] - moved.get(it, 0)) / counts[it] for it in tenants]
            found = [jobs.report(job) for job in jobs.workers]
            values = {"lacking_gib": over / GIB, "moved_gib": max(means) / GIB, "moves": sum(counts.values())}
            values["longest_s"] = max(it["max_us"] for it in found) / 1e6
            results.add(case, name, values | {"wrong": sum(it["mismatches"] for it in found)})
            if max(means) > over + OVER:
                raise BenchError(f"{max(means) / GIB:.2f} GiB moved in each turn, where {over / GIB:.2f} were lacking")


def chunks(case: str, _name: str, logs: Path, options: argparse.Namespace) -> dict[str, float]:
    """One cell of `chunks`."""
    return swap_gpumux(options.size, logs, 6, *([] if case == "allocation" else ["--chunk", case]))


def programs(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """All cells of `programs`."""
    for case in cases:
        command = [sys.executable, str(WORKER), case]
        if case == "triton-8-pointers":
            # Both modes, in turns.
            with cell(results, case, logs), Gpumux("gpumux", logs) as managed:
                crews.add(results, case, crews.measure(Mode("alone", logs), managed, "triton", command, CREWS, ROUNDS, TURN), "us")
            continue
        for name in modes if case != "jax-75%" else ["gpumux"]:
            with cell(results, f"{case} / {name}", logs), common.mode(name, logs) as mode:
                if case == "jax-75%":
                    results.add(case, name, jax_beside(mode, logs, options))
                    continue
                with started(mode, case, command) as program:
                    results.add(case, name, program.reply(common.READY_S))


def jax_beside(mode: Mode, logs: Path, options: argparse.Namespace) -> dict[str, float]:
    """JAX with its own default beside a job: both run."""
    assert isinstance(mode, Gpumux)
    with contextlib.ExitStack() as stack:
        jobs = Jobs(mode, logs, stack.enter_context)
        jobs.add("beside-jax", part_of("60%", Nvml().memory().total), "--seconds", "3600")
        jobs.begin()
        until("the first pass", 60, lambda: (jobs.look(), jobs.first)[1])
        # What is measured is JAX's default, whatever `gpumux run` sets.
        setting = ["env", "XLA_PYTHON_CLIENT_PREALLOCATE=true"]
        command = [*setting, sys.executable, str(WORKER), "jax-75%", "--seconds", str(options.seconds / 2)]
        program = stack.enter_context(started(mode, "jax", command, ["--class", "batch"]))
        found, moved = program.reply(common.READY_S), 0
        for tenant in Api(mode).ask("GET", "/v1/tenants"):
            moved += tenant["moves"]["out_bytes"] + tenant["moves"]["back_bytes"]
        beside = jobs.report("beside-jax")
        return {"jax_rate": found["rate"], "passes": beside["calls"], "longest_s": beside["max_us"] / 1e6, "moved_gib": moved / GIB}


RUN = {"together": together, "restart": restart, "guaranteed": each(guaranteed), "arena": arena, "chunks": each(chunks), "programs": programs}


def main() -> int:
    """Runs one part, or all."""
    parser = common.parser(
        "What is guaranteed while memory does not suffice.",
        "  GPUMUX=.bundle/bin/gpumux python3 bench/residency.py all\n"
        "  GPUMUX=.bundle/bin/gpumux python3 bench/residency.py together --cases 2x60% --rounds 5 --kill\n"
        "  GPUMUX=.bundle/bin/gpumux python3 bench/residency.py arena\n"
        "  gpumux emu --profile FILE -- python3 bench/residency.py restart --restarts 3",
    )
    common.parts(parser, PARTS)
    parser.add_argument("--rounds", type=int, default=1, help="of `together` [%(default)s]")
    parser.add_argument("--room", help="of the device for `together`, such as 8GiB: memory moves faster, so that a round is short [all]")
    parser.add_argument("--passes", type=int, default=150, help="of a job of `together` [%(default)s]")
    parser.add_argument("--kill", action="store_true", help="kill tenants and the daemon, too, in `together`")
    parser.add_argument("--restarts", type=int, default=20, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=35.0, help="of `guaranteed`, and half of it of JAX [%(default)s]")
    parser.add_argument("--moves", type=int, default=20, help="of the two jobs of `guaranteed`, at least [%(default)s]")
    parser.add_argument("--turns", type=int, default=3, help="moves of each job of `arena` [%(default)s]")
    parser.add_argument("--size", default="8GiB", help="of the tenant of `chunks`, in GiB [%(default)s]")
    options = parser.parse_args()
    logs = common.begin(options)

    def usual(part: str) -> common.Part:
        cases, modes = PARTS[part]
        return cases, [name for name in modes if name not in KILLS or part != "together" or options.kill or options.modes]

    return common.run_parts(parser, options, PARTS, lambda part, *chosen: RUN[part](*chosen, logs, options), "residency-", usual)


if __name__ == "__main__":
    sys.exit(main())
