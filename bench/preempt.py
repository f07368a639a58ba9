"""The workload shapes of GPreempt's evaluation (USENIX ATC 2025): five networks share one GPU, beside the ways of sharing it.

Reads that project's workload definitions (`A.json` … `Z.json`, `REAL.json`): tasks whose client has priority 0 are
latency-critical, the others are batch tasks; each has a network, batch size 1, and arrivals (periodic, Poisson,
continuous or a trace). Requests are served as CUDA graphs. Programs that are not networks (`miniweather`, `bfs`, …) are
played by stand-ins of the same kind, see models.py.

Cases are the workloads, and of the paper's further figures `A@prep0` … `A@prep250` (Fig. 7a: workload A with that much preparation, in µs) and
`A@rate100` … `A@rate300` (Fig. 7b: A's latency task at that rate beside a batch task that always has work).

Modes (each task is a process of its own, unless it says otherwise; hints are given when a task begins to prepare a request):

| mode | |
|---|---|
| `alone` | the latency-critical tasks only |
| `time-slicing` | the driver's default |
| `slices-short`, `slices-long` | the driver's short and long timeslices (`nvidia-smi compute-policy`: needs root, changes a setting of the GPU and sets it back; never a default) |
| `mps` | all in one MPS server |
| `mps-priority` | the same, batch tasks with the lower client priority |
| `mps-30`, `mps-50`, `mps-70` | the same, and batch tasks may use that part of the SMs |
| `streams` | one process; a stream with high or low priority for each task (GPreempt's baseline NP) |
| `green` | one process; batch tasks in a green context with half of the SMs, latency-critical ones in one with the rest |
| `gpreempt` | two contexts by priority: latency-critical tasks are streams of one with a timeslice of 1 s, batch tasks of one with 1 µs, with hints; `gpreempt-unhinted` without |
| `fixed` | fixed timeslices, a context per program: 1 s and 1 µs, without hints. Several batch tasks livelock; not what GPreempt does |
| `xsched` | XSched in XSCHED (a folder with its `lib` and `bin`), by the priorities of its own policy |
| `gpumux` | hints by the program; `unhinted`: the same with programs that know nothing of gpumux; `space`: as `gpumux`, with the batch tasks in one group |

GPreempt's artifact has both contexts in one process. PyTorch keeps one context a process and device, so in `gpreempt` each has a process of its own:
the GPU has the same two channel groups. `gpumux workload two-contexts` has both in one process.

Values: latencies are pooled over the latency-critical tasks; `latency_rate` and `batch_rate` are completed requests per second over all
tasks of their kind. Rounds, intervals and when there are enough rounds: rounds.py.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import common
import rounds
from common import BenchError, Crew, Gpumux, Mode, Mps, Results
from space import Space

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
        """What its process is told: the arrivals of so many seconds from `begin`."""
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


# --- ways of sharing ----------------------------------------------------------------------------


class Fixed(Gpumux):
    """Fixed timeslices by class, a context per program, while programs are measured; else the driver's, as they would not even start."""

    def __init__(self, name: str, logs: Path) -> None:
        super().__init__(name, logs, policy="fixed")
        self.classes: dict[str, str] = {}

    def command(self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()) -> list[str]:
        self.classes[name] = klass or "standard"
        return super().command(command, name, "latency", promise)

    def _set(self, name: str, klass: str) -> None:
        command = [self.binary, "set", self.tenants[name], "--class", klass]
        try:
            subprocess.run(command, env=os.environ | self.environment(), check=True, timeout=20, stdout=subprocess.DEVNULL)
        except subprocess.SubprocessError as error:
            raise BenchError(f"{name} does not become {klass}: {error}") from error

    def before(self, names: Iterable[str]) -> None:
        for name in names:
            self._set(name, self.classes[name])

    def after(self, names: Iterable[str]) -> None:
        for name in names:
            self._set(name, "latency")


class MpsWith(Mps):
    """One MPS server whose batch clients have further variables."""

    def __init__(self, name: str, logs: Path, **batch: str) -> None:
        super().__init__(name, logs)
        self.batch = batch

    def command(self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()) -> list[str]:
        return [*(["env", *(f"{k}={v}" for k, v in self.batch.items())] if klass == "batch" else []), *command]


class DriverSlices(Mode):
    """Time slicing with another of the driver's timeslices, on the first GPU, and the default again at the end."""

    def __init__(self, name: str, logs: Path, slices: int) -> None:
        super().__init__(name, logs)
        self.slices = slices

    def _set(self, slices: int) -> subprocess.CompletedProcess[str]:
        command = ["nvidia-smi", "compute-policy", "-i", "0", f"--set-timeslice={slices}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    def __enter__(self) -> Mode:
        done = self._set(self.slices)
        if done.returncode:
            raise BenchError(f"nvidia-smi compute-policy --set-timeslice={self.slices}: {(done.stdout + done.stderr).strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._set(0).returncode:
            common.say("error: the driver's default timeslice is not set back")


class XSched(Mode):
    """Programs under XSched's library and its server, with its policy of highest priority first."""

    def __enter__(self) -> Mode:
        self.root = Path(os.environ.get("XSCHED", "/nowhere"))
        server = self.root / "bin" / "xserver"
        if not server.exists():
            raise BenchError(f"no {server}: build XSched and set XSCHED to its output folder (bench/README.md)")
        with open(self.logs / "xserver.log", "w") as log:
            self.server = subprocess.Popen([str(server), "HPF", "50000"], stdout=log, stderr=log, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        common.end(self.server)

    def command(self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()) -> list[str]:
        settings = {
            "XSCHED_SCHEDULER": "GLB",
            "XSCHED_AUTO_XQUEUE": "ON",
            "XSCHED_AUTO_XQUEUE_PRIORITY": "1" if klass == "latency" else "0",
            "XSCHED_AUTO_XQUEUE_LEVEL": os.environ.get("XSCHED_LEVEL", "1"),
            "XSCHED_CUDA_LV3_IMPL": "TSG",
            "XSCHED_AUTO_XQUEUE_THRESHOLD": "4" if klass == "batch" else "16",
            "XSCHED_AUTO_XQUEUE_BATCH_SIZE": "2" if klass == "batch" else "8",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(self.root / "lib"), os.environ.get("LD_LIBRARY_PATH", "")])),
        }
        return ["env", *(f"{k}={v}" for k, v in settings.items()), *command]


class Sharing(NamedTuple):
    """A mode: how its programs share (`stage`: modes of the same stage use the same processes), which tasks share a process, and who hints."""

    stage: str
    together: str = "task"  # or "class", or "all"
    hinting: bool = False


SHARINGS = {
    "alone": Sharing("time-slicing"),
    "time-slicing": Sharing("time-slicing"),
    "slices-short": Sharing("slices-short"),
    "slices-long": Sharing("slices-long"),
    "mps": Sharing("mps"),
    "mps-priority": Sharing("mps-priority"),
    **{f"mps-{percent}": Sharing(f"mps-{percent}") for percent in (30, 50, 70)},
    "streams": Sharing("streams", "all"),
    "green": Sharing("green", "all"),
    "xsched": Sharing("xsched"),
    "fixed": Sharing("fixed"),
    "gpreempt": Sharing("gpreempt", "class", hinting=True),
    "gpreempt-unhinted": Sharing("gpreempt", "class"),
    "gpumux": Sharing("gpumux", hinting=True),
    "unhinted": Sharing("gpumux"),
    "space": Sharing("space", hinting=True),
}
MODES = list(SHARINGS)
DEFAULT_MODES = ["alone", "time-slicing", "mps", "mps-priority", "gpreempt", "gpreempt-unhinted", "gpumux", "unhinted", "space"]


def mode(stage: str, logs: Path) -> Mode:
    """What puts a stage into force."""
    match stage:
        case "fixed":
            return Fixed(stage, logs)
        case "gpreempt":
            # Two contexts: the policy of fixed timeslices is then what GPreempt sets.
            return Gpumux(stage, logs, policy="fixed")
        case "space":
            return Space(stage, logs)
        case "mps-priority":
            return MpsWith(stage, logs, CUDA_MPS_CLIENT_PRIORITY="1")
        case "mps-30" | "mps-50" | "mps-70":
            return MpsWith(stage, logs, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=stage.removeprefix("mps-"))
        case "slices-short" | "slices-long":
            return DriverSlices(stage, logs, 1 if stage == "slices-short" else 3)
        case "xsched":
            return XSched(stage, logs)
        case "streams" | "green":
            return Mode(stage, logs)
    return common.mode(stage, logs)


def processes(together: str, workload: Sequence[Task]) -> dict[str, list[Task]]:
    """Which tasks share a process, by the process's name."""
    found: dict[str, list[Task]] = {}
    for task in workload:
        found.setdefault({"task": task.name, "class": task.klass, "all": "all"}[together], []).append(task)
    return found


def worker(stage: str, together: str, mine: Sequence[Task]) -> tuple[list[str], str]:
    """Arguments and class of a process."""
    if together == "task":
        return ["serve", "--model", mine[0].model], mine[0].klass
    each = [f"{task.name}={task.model}={'high' if task.latency else 'low'}" for task in mine]
    return ["many", *each, *(["--green", "0.5"] if stage == "green" else [])], mine[0].klass


def orders(sharing: Sharing, workload: Sequence[Task], only_latency: bool, seconds: float, begin: float) -> dict[str, dict[str, Any]]:
    """What the processes are told for one round."""
    found: dict[str, dict[str, Any]] = {}
    for name, mine in processes(sharing.together, workload).items():
        told = {task.name: task.order(seconds, sharing.hinting, begin) for task in mine if task.latency or not only_latency}
        if told:
            found[name] = told[name] if sharing.together == "task" else {"op": "many", "tasks": told}
    return found


def cell(workload: Sequence[Task], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What one round gave, of the processes' answers."""
    by_task = {name: it for process, answer in answers.items() for name, it in answer.get("tasks", {process: answer}).items()}
    counted = {
        name: [ms for begin, ms in zip(it["begins_s"], it["latencies_ms"]) if begin >= SETTLE_S] for name, it in by_task.items()
    }
    rates = dict[str, float]()
    for kind, latency in (("latency_rate", True), ("batch_rate", False)):
        mine = [task.name for task in workload if task.latency == latency and task.name in by_task]
        if mine:
            rates[kind] = sum(len(counted[name]) / (by_task[name]["seconds"] - SETTLE_S) for name in mine)
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
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one mode in a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=rounds.MOST, help="rounds at most [%(default)s]")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="seconds for this call [%(default)s]")
    parser.add_argument("--cases", type=common.listed(CASES), default=WORKLOADS)
    parser.add_argument("--modes", type=common.listed(MODES), default=DEFAULT_MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    cases = {case: tasks(options.workloads, case) for case in options.cases}
    modes = [name for name in MODES if name in options.modes]
    results = Results("preempt", options.out, CASES, MODES)
    notes = list[str]()
    with ExitStack() as stack:
        crews = dict[str, Crew]()
        for stage in dict.fromkeys(SHARINGS[name].stage for name in modes):
            try:
                crews[stage] = stack.enter_context(Crew(stack.enter_context(mode(stage, logs))))
            except BenchError as error:
                notes.append(f"{stage} could not run: {' '.join(str(error).split())}.")
                common.say(f"error: {notes[-1]}")
        modes = [name for name in modes if SHARINGS[name].stage in crews]

        def have(stage: str, together: str, case: str) -> None:
            mine = processes(together, cases[case])
            crews[stage].have({name: worker(stage, together, of) for name, of in mine.items()})

        def prepare(case: str) -> None:
            for name in list(modes):
                sharing = SHARINGS[name]
                try:
                    have(sharing.stage, sharing.together, case)
                except BenchError as error:
                    modes.remove(name)
                    notes.append(f"{name} could not run {case}: {' '.join(str(error).split())[:300]}.")
                    common.say(f"error: {notes[-1]}")

        def measure(case: str, name: str, number: int) -> dict[str, Any]:
            sharing = SHARINGS[name]
            have(sharing.stage, sharing.together, case)
            told = orders(sharing, cases[case], name == "alone", seconds, number * seconds)
            return cell(cases[case], crews[sharing.stage].measure(seconds, told, lead=0.2))

        # A trace is played to its end.
        traces = {case: max((it.load["length"] for it in of if it.load["type"] == "trace"), default=0) for case, of in cases.items()}
        least = {case: math.ceil(length / seconds) for case, length in traces.items()}
        plan = rounds.Plan(options.cases, modes, measure, prepare, least)
        done = rounds.run(plan, results, options.budget, options.rounds, notes)
    code = results.finish()
    return code if done else 75


if __name__ == "__main__":
    sys.exit(main())
