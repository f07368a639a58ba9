"""Guaranteed and received: the shares of programs that always have work, and what sharing costs them.

Every program repeats the same kernel, so that shares are counts. Cases: `70/30` and `50/25/25` (standard tenants with
these guarantees), `2batch`, `3batch`, `4batch`, `latency+4batch` (a periodic latency tenant beside them), `hinted+4batch` (one that prepares each request for
200 µs, and with gpumux hints when it begins), `latency+15batch`,
`saturating` (a latency tenant that never stops, guaranteed 0.5, beside two batch tenants with 0.3 and 0.2),
`one-leaves` (of two batch tenants one ends half way).

Values: `total_rel` (work done by all, relative to one program alone), `share_N` (of the work done; in results up to commit e179d3db both with the first second),
`worst_window_error` (largest difference of a share from its guarantee, or from equal shares, in any window of one second),
`rest_rel` (`one-leaves`: rate of the one that stays, relative to alone), `latency_p50_us`, `latency_p99_us` (from when a request is due; in results up to commit cb64feb6: from when it is submitted),
`daemon_cpu` (with gpumux: the part of one CPU that the daemon takes meanwhile).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import common
from common import BenchError, CpuTime, Gpumux, Mode, Results

MODES = ["alone", "time-slicing", "mps", "gpumux"]
KERNEL_US = 2000


class Program(NamedTuple):
    """One program of a case."""

    klass: str
    guaranteed: float = 0.0
    ends_early: bool = False
    periodic: bool = False
    hinted: bool = False

    def arguments(self, mode: Mode, work: Sequence[str]) -> list[str]:
        """Of its workload."""
        if not self.periodic:
            return ["batch", *work]
        hint = ["--hint", "manual"] if mode.name == "gpumux" else []
        return [*PERIODIC, *(["--prepare-us", "200", *hint] if self.hinted else [])]

    def environment(self) -> dict[str, str]:
        """Of its process."""
        return {}


BATCH = Program("batch")
CASES: dict[str, list[Program]] = {
    "70/30": [Program("standard", 0.7), Program("standard", 0.3)],
    "50/25/25": [Program("standard", 0.5), Program("standard", 0.25), Program("standard", 0.25)],
    "2batch": [BATCH] * 2,
    "3batch": [BATCH] * 3,
    "4batch": [BATCH] * 4,
    "latency+4batch": [Program("latency", periodic=True), *[BATCH] * 4],
    "hinted+4batch": [Program("latency", periodic=True, hinted=True), *[BATCH] * 4],
    "latency+15batch": [Program("latency", periodic=True), *[BATCH] * 15],
    "saturating": [Program("latency", 0.5), Program("batch", 0.3), Program("batch", 0.2)],
    "one-leaves": [BATCH, Program("batch", ends_early=True)],
}
# A request of 10 kernels of 10 µs every 5 ms.
PERIODIC = ["latency", "--period-us", "5000", "--kernels", "10", "--kernel-us", "10", "--wait", "spin", "--from-arrival"]


def start(mode: Mode, program: Program, name: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a workload as a tenant."""
    promise = ["--guaranteed", str(program.guaranteed)] if program.guaranteed else []
    command = [common.gpumux(), "workload", *arguments, "--json"]
    log = mode.logs / f"{mode.name}-{name}.log"
    return mode.start(mode.command(command, name, program.klass, promise), log, program.environment(), stdout=subprocess.PIPE)


@contextlib.contextmanager
def ending(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Ends processes with the block, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            common.end(process, 1.0)


def reports(processes: Sequence[subprocess.Popen[str]], deadline: float) -> list[dict[str, Any]]:
    """What the workloads found, in order."""
    return [report(process, deadline) for process in processes]


def report(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    """What a workload found."""
    try:
        out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise BenchError("a workload did not end in time") from None
    if process.returncode:
        raise BenchError(f"a workload ended with {process.returncode}")
    return json.loads(out)


def calibrated(plain: Mode, workload: str, kernel_us: int) -> dict[str, Any]:
    """What a workload finds of its kernels alone: how many iterations make one of this length."""
    process = start(plain, BATCH, "calibrate", [workload, "--kernel-us", str(kernel_us), "--calibrate"])
    with ending([process]):
        return report(process, time.monotonic() + common.REPLY_S)


def run(mode: Mode, programs: Sequence[Program], work: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Runs programs together: their reports, in order."""
    return timed_run(mode, programs, work, seconds)[0]


def timed_run(mode: Mode, programs: Sequence[Program], work: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], float]:
    """The same, and when the first of them ended."""
    return at_once(mode, [(it, it.arguments(mode, work), seconds / 2 if it.ends_early else seconds) for it in programs])


def at_once(
    mode: Mode, programs: Sequence[tuple[Program, Sequence[str], float]], patience_s: float = common.REPLY_S
) -> tuple[list[dict[str, Any]], float]:
    """The same of programs with arguments and seconds of their own."""
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder, ending(processes):
        barrier = f"{len(programs)}:{folder}/barrier"
        for number, (program, arguments, seconds) in enumerate(programs):
            processes.append(start(mode, program, f"{number}", [*arguments, "--seconds", str(seconds), "--barrier", barrier]))
        deadline = time.monotonic() + max(seconds for _, _, seconds in programs) + patience_s
        first = report(processes[0], deadline)
        ended = time.monotonic()
        return [first, *reports(processes[1:], deadline)], ended


def latency(report: dict[str, Any]) -> dict[str, float]:
    """The quantiles of a report under the names of results."""
    return {"latency_p50_us": report["p50_us"], "latency_p99_us": report["p99_us"]}


def evaluate(programs: Sequence[Program], found: Sequence[dict[str, Any]], solo: float) -> dict[str, float]:
    """The values of one cell, given the rate of one program alone."""
    values = latency(found[0]) if programs[0].periodic else {}
    steady = [(p, r) for p, r in zip(programs, found) if not p.periodic]
    if any(program.ends_early for program in programs):
        stays = next(r for p, r in steady if not p.ends_early)["per_second"]
        # The second in which the other one ended belongs to neither half.
        rest = stays[len(stays) // 2 + 1 :]
        return values | {"rest_rel": sum(rest) / len(rest) / solo}
    # All start within the first second.
    counts = [report["per_second"][1:] for _, report in steady]
    total = [sum(window) for window in zip(*counts)]
    values["total_rel"] = sum(total) / len(total) / solo
    shares = [sum(own) / sum(total) for own in counts]
    values |= {f"share_{number + 1}": share for number, share in enumerate(shares)}
    # Beside a saturating latency tenant the others get at least their guarantee, not exactly it.
    promised = [program.guaranteed or 1 / len(steady) for program, _ in steady]
    values["worst_window_error"] = max(abs(mine / every - promise) for own, promise in zip(counts, promised) for mine, every in zip(own, total))
    return values


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "Shares promised and received, and the cost of sharing, for programs that always have work.",
        "  GPUMUX=target/release/gpumux python3 bench/shares.py\n"
        "  python3 bench/shares.py --cases 70/30,4batch --modes gpumux --seconds 20",
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one cell [%(default)s]")
    common.selections(parser, list(CASES), MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = max(4.0, options.seconds / (4 if options.quick else 1))
    results = Results("shares", options.out, list(CASES), MODES)

    plain = Mode("alone", logs)
    calibrated = run(plain, [BATCH], ["--kernel-us", str(KERNEL_US)], seconds)[0]
    work = ["--iterations", str(calibrated["iterations"])]

    for name in options.modes:
        with results.cell(name), common.mode(name, logs) as mode:
            if name == "alone":
                for case in options.cases:
                    if CASES[case][0].periodic:
                        with results.cell(f"{case} / {name}"):
                            results.add(case, name, latency(run(plain, CASES[case][:1], work, seconds)[0]))
                continue
            # Alone is measured anew in every mode, so that drift does not count.
            solo = run(plain, [BATCH], work, seconds / 2)[0]["rate"]
            for case in options.cases:
                with results.cell(f"{case} / {name}"):
                    with contextlib.ExitStack() as stack:
                        watched = stack.enter_context(CpuTime(mode.daemon.pid)) if isinstance(mode, Gpumux) else None
                        found, end = timed_run(mode, CASES[case], work, seconds)
                        values = evaluate(CASES[case], found, solo)
                        if watched:
                            # Neither the programs' start nor their end.
                            values["daemon_cpu"] = watched.part(end - seconds + 1, end - 1)
                    results.add(case, name, values)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
