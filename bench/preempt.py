"""The workload shapes of GPreempt's evaluation (USENIX ATC 2025): five networks share one GPU.

Reads that project's workload definitions (`A.json` … `Z.json`, `REAL.json`): tasks whose client has priority 0 are
latency-critical, the others are batch tasks; each has a network, batch size 1, and arrivals (periodic, Poisson,
continuous or a trace). Every task is a process of its own and serves requests as CUDA graphs. Programs that
are not networks (`miniweather`, `bfs`, …) are played by stand-ins of the same kind, see models.py.

Modes: `alone` (latency-critical tasks only), `time-slicing`, `mps`, `gpumux` (the latency-critical tasks hint when they begin to
prepare a request, as GPreempt's do), `unhinted` (the same with programs that know nothing of gpumux), `space` (as `gpumux`, with
the batch tasks in one group) and `fixed` (slices of 1 s and 1 µs and nothing else, the published recipe, without hints). Several
batch tasks with work make no progress at 1 µs (they would not even start: `fixed` slices are set while a cell is measured only),
so their rate is what they did until then. Latencies are pooled over the latency-critical tasks; batch_rate is requests per second
over all batch tasks.

The tasks of all modes run from the beginning; those that are not measured are idle. Each case is measured in rounds of ROUND_S,
one mode after the other, so that a disturbance from outside reaches all modes alike.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import common
from common import BenchError, Crew, Gpumux, Mode, Results
from space import Space

MODES = ["alone", "time-slicing", "mps", "gpumux", "unhinted", "space", "fixed"]
HINTING = ("gpumux", "space")
# Modes of one sharing differ in what the tasks are told: alone the batch tasks are idle, unhinted nobody hints.
SHARING = {"alone": "time-slicing", "unhinted": "gpumux"}
ROUND_S = 1.0
# The first request after a pause is slower on an idle GPU: what comes in this first part of a round does not count.
SETTLE_S = 0.1
CASES = ["A", "B", "C", "D", "E", "REAL", "Y", "Z"]


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

    def worker(self) -> tuple[list[str], str]:
        """Arguments and class of its process."""
        return ["serve", "--model", self.model], self.klass

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


class Fixed(Gpumux):
    """Slices by class and nothing else, while programs are measured; else the driver's."""

    def __init__(self, name: str, logs: Path) -> None:
        super().__init__(name, logs, policy="fixed")
        self.classes: dict[str, str] = {}

    def command(
        self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()
    ) -> list[str]:
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


def mode(name: str, logs: Path) -> Mode:
    """The mode of this name."""
    match name:
        case "fixed":
            return Fixed(name, logs)
        case "space":
            return Space(name, logs)
    return common.mode(name, logs)


def arrivals(load: dict[str, Any], seconds: float, seed: str) -> Iterator[float]:
    """Arrival times of a task in seconds; a seed gives the same ones in every mode."""
    if load["type"] == "trace":
        yield from (ms / 1e3 for ms in load["trace"] if ms / 1e3 < seconds)
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


def tasks(definition: Path) -> list[Task]:
    """Reads a workload."""
    found = []
    for task in json.loads(definition.read_text())["tasks"]:
        client = task["client"]
        found.append(
            Task(
                task["id"],
                client["model_name"],
                client["priority"] == 0,
                task["load"],
                client.get("preprocess_time", 0),
            )
        )
    return found


class Cell:
    """One case in one mode, measured in rounds."""

    def __init__(self, case: str, name: str, tasks: list[Task]) -> None:
        self.case, self.name = case, name
        self.tasks = [task for task in tasks if task.latency or name != "alone"]
        self.answers: list[dict[str, dict[str, Any]]] = []

    def measure(self, crew: Crew, seconds: float) -> None:
        """One more round."""
        begin = len(self.answers) * seconds
        orders = {task.name: task.order(seconds, self.name in HINTING, begin) for task in self.tasks}
        self.answers.append(crew.measure(seconds, orders, lead=0.2))

    def keep(self, crew: Crew, logs: Path, seconds: float) -> None:
        """Writes every request and, with gpumux, what the scheduler did in the last seconds."""
        (logs / f"{self.case}-{self.name}.requests.json").write_text(json.dumps(self.answers))
        if isinstance(crew.mode, Gpumux):
            crew.mode.trace(logs / f"{self.case}-{self.name}.trace.json", seconds)

    def values(self) -> dict[str, float]:
        """Of all rounds."""
        ms: dict[str, list[float]] = {task.name: [] for task in self.tasks}
        for answers in self.answers:
            for name, found in ms.items():
                requests = zip(answers[name]["begins_s"], answers[name]["latencies_ms"])
                found += [it for begin, it in requests if begin >= SETTLE_S]
        values = common.latency_values([it for task in self.tasks if task.latency for it in ms[task.name]], tail=True)
        if batch := [task for task in self.tasks if not task.latency]:
            seconds = sum(answers[batch[0].name]["seconds"] - SETTLE_S for answers in self.answers)
            values["batch_rate"] = sum(len(ms[task.name]) for task in batch) / seconds
        return values


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "GPreempt's workloads: latency of the critical tasks and throughput of the others, by mode of sharing.",
        "  GPUMUX=target/release/gpumux python3 bench/preempt.py --workloads gpreempt-workloads\n"
        "  python3 bench/preempt.py --workloads gpreempt-workloads --cases A,REAL --modes alone,gpumux --seconds 20",
    )
    parser.add_argument("--workloads", type=Path, required=True, help="folder of the definitions (A.json, …)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one cell [%(default)s]")
    parser.add_argument("--cases", type=common.listed(CASES), default=CASES)
    parser.add_argument("--modes", type=common.listed(MODES), default=MODES)
    parser.add_argument(
        "--trace", action="store_true", help="keep every request, and gpumux's trace, with the logs"
    )
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    rounds = max(1, round(seconds / ROUND_S))
    cases = {case: tasks(options.workloads / f"{case}.json") for case in options.cases}
    everybody = {task.name: task.worker() for workload in cases.values() for task in workload}
    results = Results("preempt", options.out, CASES, MODES)

    def start(name: str, stack: ExitStack) -> Crew | None:
        with results.cell(name):
            crew = stack.enter_context(Crew(stack.enter_context(mode(name, logs))))
            crew.have(everybody)
            return crew
        return None

    with ExitStack() as stack:
        sharings = list(dict.fromkeys(SHARING.get(name, name) for name in options.modes))
        crews = {name: crew for name in sharings if (crew := start(name, stack))}
        modes = {name: crew for name in MODES if name in options.modes and (crew := crews.get(SHARING.get(name, name)))}
        for case, workload in cases.items():
            cells = {name: Cell(case, name, workload) for name in modes}
            for number in range(rounds):
                for name in list(cells):
                    before = len(results.failed)
                    with results.cell(f"{case} / {name}"):
                        modes[name].have(everybody)
                        cells[name].measure(modes[name], seconds / rounds)
                        if options.trace and number == rounds - 1:
                            cells[name].keep(modes[name], logs, seconds / rounds + 1)
                    if len(results.failed) > before:
                        del cells[name]
            for name, cell in cells.items():
                results.add(case, name, cell.values())
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
