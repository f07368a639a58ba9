"""What gpumux costs a program that has the GPU to itself.

Each case is measured without (`alone`) and with `gpumux run` (`gpumux`), alternately, so that drift hits both.
Cases: `eager-loop` (ResNet-50 eager, batch 1: bound by launches), `train-loop` (ResNet-152 training), `launch` (empty kernels through the driver API),
`start-up-true` (`gpumux run -- true`), `start-up-child` (children of a tenant), `start-up-cuda` (a process that
opens the device), `64-at-once` (so many such processes starting together), `calls`, `calls-4`, `calls-16` (single calls of the driver, by so many threads
at once: as `crews.py` measures, ns of a call as a thread sees it).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import crews
from colocation import rate
from common import BenchError, Crew, Gpumux, Mode, Results

CALLS = {"calls": 1, "calls-4": 4, "calls-16": 16}
CASES = ["eager-loop", "train-loop", "launch", "start-up-true", "start-up-child", "start-up-cuda", "64-at-once", *CALLS]
# Of `calls`: crews, and batches of a turn.
CREWS, BATCHES = 3, 8
AT_ONCE = 64
CHILDREN = 100
PROCESSES = 4
# The eager loop: its turns per round, each a part of an ordinary one, and the quantile of their rates that counts.
TURNS = 2
PART = 1 / 8
UNDISTURBED = 0.9
TIMEOUT_S = 240.0


def in_turns(plain: Mode, managed: Mode, rounds: int, measure: Callable[[Mode], Any]) -> dict[str, list[Any]]:
    """What each mode gives, once per round, in the other order every second round."""
    found: dict[str, list[Any]] = {plain.name: [], managed.name: []}
    for number in range(rounds):
        for mode in (plain, managed) if number % 2 == 0 else (managed, plain):
            found[mode.name].append(measure(mode))
    return found


def opens_device() -> list[str]:
    """A program that opens the device, and ends."""
    return [common.gpumux(), "workload", "idle", "--seconds", "0"]


def run(mode: Mode, name: str, command: Sequence[str]) -> tuple[float, str]:
    """Runs a program in this mode: its wall time in ms and its output."""
    begin = time.perf_counter()
    done = subprocess.run(
        mode.command(command, name, None),
        env=os.environ | mode.environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    ms = (time.perf_counter() - begin) * 1e3
    if done.returncode:
        raise BenchError(f"{name} ({mode.name}) ended with {done.returncode}: {done.stderr[-500:]}")
    return ms, done.stdout


def loop(
    results: Results, case: str, plain: Mode, managed: Mode, rounds: int, seconds: float, workers: Sequence[list[str]]
) -> None:
    """Work back to back, by pairs of processes.

    The processes of a pair take many short turns; of each the undisturbed turns count.
    """
    order = {"op": "steps"} if case == "train-loop" else {"op": "repeat", "kind": "eager"}
    names = [f"{case}-{number}" for number in range(len(workers))]
    rates: dict[str, list[float]] = {plain.name: [], managed.name: []}
    with Crew(plain) as without, Crew(managed) as within:
        crews = {plain.name: without, managed.name: within}
        for crew in crews.values():
            crew.have({name: (worker, "standard") for name, worker in zip(names, workers)})
        for name in names:
            one = lambda mode, name=name: rate(crews[mode.name].measure(seconds, {name: order}, lead=0.1)[name])  # noqa: E731
            for mode_name, turn_rates in in_turns(plain, managed, rounds, one).items():
                rates[mode_name].append(common.quantile(turn_rates, UNDISTURBED))
    ratios = [of / to for of, to in zip(rates[managed.name], rates[plain.name], strict=True)]
    common.say(f"{case}: ratio of each pair: {', '.join(f'{it:.4f}' for it in sorted(ratios))}")
    middle = {name: statistics.median(found) for name, found in rates.items()}
    results.add(case, plain.name, {"iterations_per_s": middle[plain.name]})
    values = {"ratio_to_alone": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    results.add(case, managed.name, {"iterations_per_s": middle[managed.name]} | values)


def eager(number: int) -> list[str]:
    """Arguments of the `number`th pair's processes, which share two cores. Two equal ones differ by percents, so there are several."""
    return ["serve", "--model", "resnet50", "--cores", crews.cores(number)]


def launch(results: Results, plain: Mode, managed: Mode, rounds: int, seconds: float) -> None:
    """Empty kernels as fast as they can be launched."""
    command = [common.gpumux(), "workload", "launch", "--json", "--seconds", str(seconds)]
    found = in_turns(plain, managed, rounds, lambda mode: json.loads(run(mode, "launch", command)[1]))
    mid = {name: {key: statistics.median(it[key] for it in reports) for key in ("rate", "p50_us", "mean_us")} for name, reports in found.items()}
    for name, it in mid.items():
        values = {"launches_per_s": it["rate"], "launch_p50_us": it["p50_us"], "launch_mean_us": it["mean_us"]}
        if name == managed.name:
            values["ratio_to_alone"] = it["rate"] / mid[plain.name]["rate"]
        results.add("launch", name, values)


def calls(results: Results, case: str, plain: Mode, managed: Mode, rounds: int) -> None:
    """Single calls of the driver."""
    threads = CALLS[case]
    command = [common.gpumux(), "workload", "calls", "--threads", str(threads)]
    found = crews.measure(plain, managed, case, command, CREWS, rounds, BATCHES, pinned=threads == 1)
    crews.add(results, case, found, "ns")


def start_up(
    results: Results,
    case: str,
    plain: Mode,
    managed: Mode,
    rounds: int,
    command: Sequence[str],
    processes: int = 1,
) -> None:
    """Wall time of a program that does next to nothing, per process that it consists of."""
    for mode in (plain, managed):  # caches
        run(mode, case, command)
    ms = in_turns(plain, managed, rounds, lambda mode: run(mode, case, command)[0] / processes)
    mid = {name: statistics.median(all_ms) for name, all_ms in ms.items()}
    for name in (plain.name, managed.name):
        values = {"start_up_p50_ms": mid[name], "start_up_p90_ms": common.quantile(ms[name], 0.9)}
        if name == managed.name:
            values["added_p50_ms"] = mid[name] - mid[plain.name]
        results.add(case, name, values)


def at_once(results: Results, mode: Mode, logs: Path) -> None:
    """Many processes open the device together: until the last one ends, and how many failed."""
    begin = time.perf_counter()
    log = logs / f"at-once-{mode.name}.log"
    started = [mode.start(mode.command(opens_device(), f"many-{number}", None), log) for number in range(AT_ONCE)]
    codes = []
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, TIMEOUT_S - (time.perf_counter() - begin)))
        codes.append(process.poll())
    wall = time.perf_counter() - begin
    for process in started:
        if process.poll() is None:
            common.end(process)
    failed = sum(code != 0 for code in codes)
    results.add("64-at-once", mode.name, {"wall_s": wall, "processes": AT_ONCE, "failures": failed})
    if failed:
        raise BenchError(f"{failed} of {AT_ONCE} failed: {common.tail(log)}")


def main() -> int:
    """Runs all cases that were asked for."""
    parser = common.parser(
        "What gpumux costs a program alone on the GPU: launches, start-up, many processes at once.",
        "  GPUMUX=target/release/gpumux python3 bench/overhead.py\n"
        "  python3 bench/overhead.py --cases start-up-true,start-up-cuda",
    )
    parser.add_argument("--cases", type=common.listed(CASES), default=CASES)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each program [%(default)s]")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one turn [%(default)s]")
    options = parser.parse_args()
    logs = common.begin(options)
    rounds = max(2, options.rounds // (4 if options.quick else 1))
    results = Results("overhead", options.out, CASES, ["alone", "gpumux"])
    plain = Mode("alone", logs)
    children = f"i=0; while [ $i -lt {CHILDREN} ]; do /bin/true; i=$((i+1)); done"
    with results.cell("gpumux"), Gpumux("gpumux", logs) as managed:
        for case in options.cases:
            with results.cell(case):
                match case:
                    case "eager-loop":
                        pairs = [eager(number) for number in range(PROCESSES)]
                        loop(results, case, plain, managed, TURNS * rounds, options.seconds * PART, pairs)
                    case "train-loop":
                        loop(results, case, plain, managed, rounds, options.seconds, [["train", "--model", "resnet152"]])
                    case "launch":
                        launch(results, plain, managed, max(2, rounds // 2), options.seconds / 2)
                    case "start-up-true":
                        start_up(results, case, plain, managed, 6 * rounds, ["/bin/true"])
                    case "start-up-child":
                        command = ["/bin/sh", "-c", children]
                        start_up(results, case, plain, managed, rounds, command, CHILDREN)
                    case "start-up-cuda":
                        start_up(results, case, plain, managed, 2 * rounds, opens_device())
                    case "calls" | "calls-4" | "calls-16":
                        calls(results, case, plain, managed, rounds)
                    case "64-at-once":
                        for mode in (plain, managed):
                            at_once(results, mode, logs)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
