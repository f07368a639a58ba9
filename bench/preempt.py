"""The workload shapes of GPreempt's evaluation (USENIX ATC 2025): five networks share one GPU, beside the ways of sharing it.

Reads that project's workload definitions (`A.json` … `Z.json`, `REAL.json`): tasks whose client has priority 0 are
latency-critical, the others are batch tasks; each has a network, batch size 1, and arrivals (periodic, Poisson,
continuous or a trace). Requests are served as CUDA graphs. Programs that are not networks (`miniweather`, `bfs`, …)
run the same algorithms on a grid and a graph of our own making, see algorithms.py.

Cases are the workloads, and of the paper's further figures `A@prep0` … `A@prep250` (Fig. 7a: workload A with that much preparation, in µs) and
`A@rate100` … `A@rate300` (Fig. 7b: A's latency task at that rate beside a batch task that always has work).

Modes are those of peers.py; each task is a process of its own, but in `streams` and `green` (all tasks in one process) and in `gpreempt`: latency-critical
tasks are streams of one context with a timeslice of 1 s, all batch tasks are streams of another with 1 µs. Hints are given when a task begins to prepare a
request, in `gpumux`, `1us`, `objective`, `launches`, `space` and `gpreempt`; `unhinted` and `gpreempt-unhinted` are without. `no-hints` is without them and without those
that gpumux gives itself.

GPreempt's artifact has both contexts in one process. PyTorch keeps one context a process and device, so in `gpreempt` each has a process of its own:
the GPU has the same two channel groups. With `--driver` all programs are `gpumux workload tasks` instead of PyTorch: kernels of about the networks'
lengths, through the driver's API; `gpreempt` is then one process with two contexts, with a hint of its own. That runs on the emulated device, too.

Values: latencies are pooled over the latency-critical tasks; `latency_rate` and `batch_rate` are completed requests per second over all
tasks of their kind. Rounds, intervals and when there are enough rounds: rounds.py.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import peers
import rounds
import shares
from common import BenchError, Crew, Mode, Results

# The first request after a pause is slower on an idle GPU: what comes in this first part of a round does not count.
SETTLE_S = 0.1
PREPARE_US = (0, 50, 100, 150, 200, 250)
RATES = (100, 150, 200, 250, 300)
WORKLOADS = ["A", "B", "C", "D", "E", "REAL", "Y", "Z"]
CASES = [*WORKLOADS, *(f"A@prep{us}" for us in PREPARE_US), *(f"A@rate{rate}" for rate in RATES)]


class Task(NamedTuple):
    """One task of a workload."""

    name: str
    model: str
    latency: bool
    load: dict[str, Any]
    prepare_us: float

    @property
    def klass(self) -> str:
        """gpumux's class."""
        return "latency" if self.latency else "batch"

    def order(self, seconds: float, hinting: bool = False, begin: float = 0.0) -> dict[str, Any]:
        """What its process receives: the arrivals of so many seconds from `begin`."""
        until_end = arrivals(self.load, begin + seconds, self.name)
        return {
            "op": "requests",
            "kind": "graph",
            "arrivals": [at - begin for at in until_end if at >= begin],
            "prepare_us": self.prepare_us,
            "hint": hinting and self.latency,
        }


def arrivals(load: dict[str, Any], seconds: float, seed: str) -> Iterator[float]:
    """Arrival times of a task in seconds; a seed gives the same ones in every mode. A trace begins anew where it ends."""
    if load["type"] == "trace":
        lap, length = 0.0, load.get("length", math.inf)
        while lap < seconds:
            yield from (at for at in (lap + ms / 1e3 for ms in load["trace"]) if at < min(lap + length, seconds))
            lap += length
        return
    # A continuous task always has its next request waiting; none takes less than 0.1 ms.
    period, rng, now = 1e-4 if load["type"] == "continuous" else 1 / load["frequency"], random.Random(seed), 0.0
    if load["type"] == "periodic":
        now = rng.uniform(0, period)  # tasks do not start in step
    elif load["type"] not in ("poisson", "continuous"):
        raise BenchError(f"unknown load {load['type']}")
    while now < seconds:
        yield now
        now += rng.expovariate(1 / period) if load["type"] == "poisson" else period


def tasks(folder: Path, case: str) -> list[Task]:
    """Reads a case: a workload, or one of its variants."""
    workload, _, variant = case.partition("@")
    definition, found = json.loads((folder / f"{workload}.json").read_text()), []
    for task in definition["tasks"]:
        client, load = task["client"], dict(task["load"], length=definition["time"])
        prepare, latency = client.get("preprocess_time", 0), client["priority"] == 0
        if variant.startswith("prep") and latency:
            prepare = float(variant.removeprefix("prep"))
        elif variant.startswith("rate"):
            load |= {"frequency": float(variant.removeprefix("rate"))} if latency else {"type": "continuous"}
        found.append(Task(task["id"], client["model_name"], latency, load, prepare))
    return found


# --- programs that share a process ---------------------------------------------------------------


class Sharing(NamedTuple):
    """A mode: how its programs share (`stage`: modes of the same stage use the same processes), which tasks share a process, and which give hints."""

    stage: str
    together: str = "task"  # or "class", or "all"
    hinting: bool = False


SHARINGS = {
    "alone": Sharing("time-slicing"),
    **{name: Sharing(name) for name in ("time-slicing", "slices-short", "slices-long", "mps", "mps-priority", "mps-30", "mps-50", "mps-70")},
    "streams": Sharing("streams", "all"),
    "green": Sharing("green", "all"),
    **{name: Sharing(name) for name in ("xsched", "xsched-1", "fixed")},
    "gpreempt": Sharing("gpreempt", "class", hinting=True),
    "gpreempt-unhinted": Sharing("gpreempt", "class"),
    "gpumux": Sharing("gpumux", hinting=True),
    **dict.fromkeys(("unhinted", "no-hints"), Sharing("gpumux")),
    **dict.fromkeys(("1us", "objective"), Sharing("gpumux", hinting=True)),
    "launches": Sharing("launches", hinting=True),
    "space": Sharing("space", hinting=True),
}
MODES = list(SHARINGS)
DEFAULT_MODES = ["alone", "time-slicing", "mps", "mps-priority", "gpreempt", "gpreempt-unhinted", "gpumux", "unhinted", "space"]


def processes(together: str, workload: Sequence[Task]) -> dict[str, list[Task]]:
    """Which tasks share a process, by the process's name."""
    found: dict[str, list[Task]] = {}
    for task in workload:
        found.setdefault({"task": task.name, "class": task.klass, "all": "all"}[together], []).append(task)
    return found


# With --driver, a request is so many kernels of so many µs: about what the networks take on an H100, and no more than that.
KERNELS = {"vgg": "20x35", "resnet152": "150x13", "densenet": "150x13", "inception": "80x15", "bert": "40x12", "miniweather": "10x300"}
OTHER_KERNELS = "50x20"


def driver_worker(stage: str, together: str, mine: Sequence[Task], us_per_iteration: float) -> tuple[list[str], str]:
    """The same without PyTorch: arguments of `gpumux workload`, and class."""
    each = [f"{task.name}={KERNELS.get(task.model, OTHER_KERNELS)}={'high' if task.latency else 'low'}" for task in mine]
    both = ["--two-contexts"] if stage == "gpreempt" else []
    klass = "latency" if any(task.latency for task in mine) else "batch"
    return ["tasks", *each, *both, "--us-per-iteration", f"{us_per_iteration:g}"], klass


def worker(stage: str, together: str, mine: Sequence[Task]) -> tuple[list[str], str]:
    """Arguments and class of a process."""
    if together == "task":
        return ["serve", "--model", mine[0].model], mine[0].klass
    each = [f"{task.name}={task.model}={'high' if task.latency else 'low'}" for task in mine]
    return ["many", *each, *(["--green", "0.5"] if stage == "green" else [])], mine[0].klass


def orders(
    sharing: Sharing, workload: Sequence[Task], only_latency: bool, seconds: float, begin: float, driver: bool = False
) -> dict[str, dict[str, Any]]:
    """What the processes receive for one round; `driver`: by the form of several tasks, always."""
    found: dict[str, dict[str, Any]] = {}
    for name, mine in processes(sharing.together, workload).items():
        told = {task.name: task.order(seconds, sharing.hinting, begin) for task in mine if task.latency or not only_latency}
        if told:
            found[name] = told[name] if sharing.together == "task" and not driver else {"op": "many", "tasks": told}
    return found


def cell(workload: Sequence[Task], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What one round gave, of the processes' answers."""
    by_task = {name: it for process, answer in answers.items() for name, it in answer.get("tasks", {process: answer}).items()}
    requests = {name: [*zip(it["begins_s"], it["latencies_ms"])] for name, it in by_task.items()}
    counted = {name: [ms for begin, ms in of if begin >= SETTLE_S] for name, of in requests.items()}
    # A task that always has work began its requests, by their arrivals, long before their turn.
    ended = {name: sum(begin + ms / 1e3 >= SETTLE_S for begin, ms in of) for name, of in requests.items()}
    rates = dict[str, float]()
    for kind, latency in (("latency_rate", True), ("batch_rate", False)):
        mine = [task.name for task in workload if task.latency == latency and task.name in by_task]
        if mine:
            rates[kind] = sum(ended[name] / (by_task[name]["seconds"] - SETTLE_S) for name in mine)
    return rounds.cell([ms for task in workload if task.latency for ms in counted.get(task.name, [])], **rates)


def main() -> int:
    """Runs all rounds that were asked for, or as many as the budget allows."""
    parser = common.parser(
        "GPreempt's workloads: latency of the critical tasks and throughput of all, by mode of sharing.",
        "  GPUMUX=target/release/gpumux python3 bench/preempt.py --workloads gpreempt-workloads --cases C --out results\n"
        "  python3 bench/preempt.py --workloads gpreempt-workloads --cases A,REAL --modes alone,gpumux --rounds 5\n"
        "The exit code is 75 when the budget was spent: the same command goes on.",
    )
    parser.add_argument("--workloads", type=Path, required=True, help="folder of the definitions (A.json, …)")
    rounds.arguments(parser, seconds=4.0)
    parser.add_argument("--driver", action="store_true", help="programs of the driver's API instead of PyTorch: also on the emulated device")
    common.selections(parser, CASES, MODES, peers.BY_NAME, cases=WORKLOADS, modes=DEFAULT_MODES)
    options = parser.parse_args()
    if options.driver and (missing := {"streams", "green"} & set(options.modes)):
        parser.error(f"--driver has no {', '.join(sorted(missing))}: programs of PyTorch make these streams themselves")
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    cases = {case: tasks(options.workloads, case) for case in options.cases}
    results = Results("preempt-driver" if options.driver else "preempt", options.out, CASES, MODES)
    # What one more iteration of the driver programs' kernels takes.
    us_per_iteration = 0.0
    if options.driver:
        report = shares.calibrated(Mode("alone", logs), "latency", 50)
        us_per_iteration = report["kernel_us"] / report["iterations"]
    sharings = dict(SHARINGS)
    if options.driver:
        # GPreempt as it is: both contexts in one process.
        sharings |= {name: it._replace(together="all") for name, it in SHARINGS.items() if it.stage == "gpreempt"}
    program = [common.gpumux(), "workload"] if options.driver else common.TORCH
    together_in = {it.stage: it.together for it in sharings.values()}

    def programs(case: str, stage: str) -> peers.Programs:
        made = (lambda *it: driver_worker(*it, us_per_iteration)) if options.driver else worker
        together = together_in[stage]
        return {process: made(stage, together, of) for process, of in processes(together, cases[case]).items()}

    def measure(crew: Crew, case: str, name: str, number: int) -> dict[str, Any]:
        told = orders(sharings[name], cases[case], name == "alone", seconds, number * seconds, options.driver)
        return cell(cases[case], crew.measure(seconds, told, lead=0.2))

    # A trace is played to its end.
    traces = {case: max((it.load["length"] for it in of if it.load["type"] == "trace"), default=0) for case, of in cases.items()}
    least = {case: math.ceil(length / seconds) for case, length in traces.items()}
    varies = [case for case, length in traces.items() if length]
    stages = {name: sharings[name].stage for name in MODES if name in options.modes}
    settings = peers.SETTINGS | {"unhinted": peers.SETTINGS["gpumux"]}
    return peers.compare(
        results, options.cases, stages, programs, measure, logs, options.budget, options.rounds, least, varies, program, settings, placed=False
    )


if __name__ == "__main__":
    sys.exit(main())
