"""Ways of sharing a GPU: what puts each mode of the benchmarks into force.

| mode | |
|---|---|
| `alone`, `time-slicing` | the driver's default; alone, other programs are idle |
| `slices-short`, `slices-long` | the driver's short and long timeslices (`nvidia-smi compute-policy`: needs root, changes a setting of the GPU and sets it back; never a default) |
| `apart` | batch programs on another GPU of the machine: they share its processors and nothing of the GPU. What is slower there is the host's |
| `mps` | all in one MPS server |
| `mps-priority` | the same, batch programs with the lower client priority |
| `mps-30`, `mps-50`, `mps-70` | the same, and batch programs may use that part of the SMs |
| `streams`, `green` | one process, which makes streams with priorities, or green contexts (half of the SMs each), itself |
| `fixed` | fixed timeslices, a context per program: 1 s and 1 µs. Several batch programs livelock; not what GPreempt does |
| `gpreempt` | the same timeslices for two contexts by priority |
| `xsched`, `xsched-1` | XSched in XSCHED (a folder with its `lib` and `bin`), by the priorities of its own policy: at its highest level that works, and at level 1 |
| `gpumux` | a daemon with its defaults |
| `no-hints`, `1us`, `objective` | the same programs with hints off, with the shortest timeslice for batch programs beside every kind of program, and with long ones (by `--latency-objective`) |
| `launches` | the same with `--mechanism launches`: programs are scheduled at launch, as where the driver refuses the controls |
| `space`, `group` | the same, with the batch programs in one group; with all programs in one |
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import rounds
from common import BenchError, Crew, Gpumux, Mode, Mps, Results

MODES = [
    "alone", "apart", "time-slicing", "slices-short", "slices-long", "mps", "mps-priority", "mps-30", "mps-50", "mps-70", "streams", "green", "gpreempt",
    "xsched", "xsched-1", "gpumux", "gpumux-alone", "no-hints", "1us", "objective", "launches", "space", "group",
]  # fmt: skip
# Programs by name: their arguments, and their class.
Programs = dict[str, tuple[Sequence[str], str]]
# One program after the other, and whose programs they are.
ALONE = {"alone": "time-slicing", "gpumux-alone": "gpumux"}
# Both programs in one process, with these arguments.
TOGETHER = {"streams": [], "green": ["--green", "0.5"]}
# Modes that change a setting of the GPU, or need another one: only by name.
BY_NAME = ("apart", "slices-short", "slices-long")
# Modes that differ in the hints and the objective of latency programs: set before each cell, so that they share their processes.
SETTINGS = {"gpumux": ("auto", "none"), "no-hints": ("off", "none"), "1us": ("auto", "0.01ms"), "objective": ("auto", "100ms")}


def stages(modes: Sequence[str], chosen: Sequence[str]) -> dict[str, str]:
    """The stage of each chosen mode: modes of one stage have the same processes."""
    return {name: "gpumux" if name in SETTINGS else ALONE.get(name, name) for name in modes if name in chosen}


def tried(stage: str) -> str:
    """What the table above says of a mode."""
    rows = (line.split("|") for line in (__doc__ or "").splitlines() if line.startswith("| `"))
    return next((row[2].strip() for row in rows if f"`{stage}`" in row[1]), "")


class Fixed(Gpumux):
    """Fixed timeslices by class, a context per program, while programs are measured; else the driver's, as they would not even start."""

    def __init__(self, name: str, logs: Path) -> None:
        super().__init__(name, logs, policy="fixed")
        self.classes: dict[str, str] = {}

    def command(self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()) -> list[str]:
        self.classes[name] = klass or "standard"
        return super().command(command, name, "latency", promise)

    def before(self, names: Iterable[str]) -> None:
        for name in names:
            self.set(name, "--class", self.classes[name])

    def after(self, names: Iterable[str]) -> None:
        for name in names:
            self.set(name, "--class", "latency")


class Apart(Mode):
    """Batch programs on another GPU."""

    def __enter__(self) -> Mode:
        self.other = common.another_gpu()
        return self

    def variables(self, name: str, klass: str | None) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": self.other} if klass == "batch" else {}


class MpsWith(Mps):
    """One MPS server whose batch clients have further variables."""

    def __init__(self, name: str, logs: Path, **batch: str) -> None:
        super().__init__(name, logs)
        self.batch = batch

    def variables(self, name: str, klass: str | None) -> dict[str, str]:
        return self.batch if klass == "batch" else {}


class DriverSlices(Mode):
    """Time slicing with another of the driver's timeslices, on the GPU of the programs, and the default again at the end."""

    def __init__(self, name: str, logs: Path, slices: int) -> None:
        super().__init__(name, logs)
        self.slices = slices

    def _set(self, slices: int) -> subprocess.CompletedProcess[str]:
        command = ["nvidia-smi", "compute-policy", "-i", common.visible(), f"--set-timeslice={slices}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    def __enter__(self) -> Mode:
        done = self._set(self.slices)
        if done.returncode:
            raise BenchError(f"nvidia-smi compute-policy --set-timeslice={self.slices}: {(done.stdout + done.stderr).strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._set(0).returncode:
            common.say("error: the driver's default timeslice is not set back")


def loaded_driver() -> str:
    """The path of the driver's library. XSched looks for it in the usual folders only, and runs without it where they have none."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libcuda.so" in line:
                return line[line.index("/") :]
    raise BenchError("no libcuda.so.1 can be loaded")


class XSched(Mode):
    """Programs under XSched's library, with its policy of highest priority first. All levels share one server: it has one address on a machine."""

    PORT = 50000
    server: subprocess.Popen[Any] | None = None
    users = 0

    def __init__(self, name: str, logs: Path, level: int) -> None:
        super().__init__(name, logs)
        self.level = level

    def __enter__(self) -> Mode:
        self.root = Path(os.environ.get("XSCHED", "/nowhere")).absolute()
        server = self.root / "bin" / "xserver"
        if not server.exists():
            raise BenchError(f"no {server}: build XSched and set XSCHED to its output folder (bench/README.md)")
        self.driver = os.environ.get("XSCHED_CUDA_LIB") or loaded_driver()
        if not XSched.users:
            with open(self.logs / "xserver.log", "w") as log:
                XSched.server = subprocess.Popen([str(server), "HPF", str(self.PORT)], stdout=log, stderr=log, start_new_session=True)
        XSched.users += 1
        return self

    def __exit__(self, *_: object) -> None:
        XSched.users -= 1
        if XSched.server and not XSched.users:
            common.end(XSched.server)
            XSched.server = None

    def variables(self, name: str, klass: str | None) -> dict[str, str]:
        return {
            "XSCHED_SCHEDULER": "GLB",
            "XSCHED_AUTO_XQUEUE": "ON",
            "XSCHED_AUTO_XQUEUE_PRIORITY": "1" if klass == "latency" else "0",
            "XSCHED_AUTO_XQUEUE_LEVEL": str(self.level),
            "XSCHED_CUDA_LV3_IMPL": "TSG",
            "XSCHED_AUTO_XQUEUE_THRESHOLD": "4" if klass == "batch" else "16",
            "XSCHED_AUTO_XQUEUE_BATCH_SIZE": "2" if klass == "batch" else "8",
            "XSCHED_CUDA_LIB": self.driver,
            # XSched schedules no work of the default stream.
            "BENCH_STREAM": "1",
            "BENCH_PROGRAM": f"{self.name}/{name}",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(self.root / "lib"), os.environ.get("LD_LIBRARY_PATH", "")])),
        }

    def levels(self) -> dict[str, set[int]]:
        """The levels of the queues that the server has of each program of this mode."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.PORT}/xqueues", timeout=10) as answer:
                queues = json.load(answer)["xqueues"]
        except (OSError, ValueError) as error:
            raise BenchError(f"XSched's server does not answer: {error}: {common.tail(self.logs / 'xserver.log')}") from error
        found = dict[str, set[int]]()
        for queue in queues:
            with contextlib.suppress(OSError):  # a process that has ended
                for setting in Path(f"/proc/{queue['pid']}/environ").read_bytes().split(b"\0"):
                    mode, _, name = setting.decode(errors="replace").removeprefix("BENCH_PROGRAM=").partition("/")
                    if setting.startswith(b"BENCH_PROGRAM=") and mode == self.name:
                        found.setdefault(name, set()).add(queue["level"])
        return found

    def check(self, names: Sequence[str]) -> None:
        def wrong() -> list[str]:
            found = self.levels()
            return [f"{name}: {sorted(found.get(name, ()))}" for name in names if found.get(name) != {self.level}]

        common.until_none(f"no queues of level {self.level} alone in XSched's server", 5, wrong)


class Space(Gpumux):
    """gpumux with the batch programs in one group, or with all."""

    GROUP = ("--trust", "bench", "--sharing", "space")
    CLASSES = ("batch",)

    def flags(self, name: str, klass: str | None) -> list[str]:
        return super().flags(name, klass) + ([*self.GROUP] if klass in self.CLASSES else [])

    def check(self, names: Sequence[str]) -> None:
        super().check(names)

        def wrong() -> list[str]:
            own = {self.tenants[name] for name in names}
            return [
                f"{tenant['name']}: {tenant['placement']}, group {domain.get('group')}"
                for tenant in self.tenants_now()
                for domain in tenant["domains"]
                if tenant["name"] in own and (tenant["class"] in self.CLASSES) != (domain.get("group") is not None)
            ]

        common.until_none("not shared as it should be", 10, wrong)

    def __exit__(self, *_: object) -> None:
        # The logs of the groups' servers, to find out why something failed.
        for log in sorted(self.folder.glob("groups/*/log/*")):
            shutil.copy(log, self.logs / f"{self.name}-{log.name}")
        super().__exit__(*_)


class Group(Space):
    """gpumux with all programs in one group."""

    CLASSES = ("batch", "latency")


class Launches(Gpumux):
    """gpumux without the driver's controls."""

    def check(self, names: Sequence[str]) -> None:
        super().check(names)
        found = {domain["mechanism"] for tenant in self.tenants_now() for domain in tenant["domains"]}
        if found != {"launches"}:
            raise BenchError(f"not scheduled at launch: {', '.join(sorted(found))}")


def mode(stage: str, logs: Path) -> Mode:
    """What puts a stage into force."""
    match stage:
        case "fixed":
            return Fixed(stage, logs)
        case "gpreempt":
            # Two contexts: the policy of fixed timeslices is then what GPreempt sets.
            return Gpumux(stage, logs, policy="fixed")
        case "launches":
            return Launches(stage, logs, mechanism="launches")
        case "space":
            return Space(stage, logs)
        case "group":
            return Group(stage, logs)
        case "apart":
            return Apart(stage, logs)
        case "mps-priority":
            return MpsWith(stage, logs, CUDA_MPS_CLIENT_PRIORITY="1")
        case "mps-30" | "mps-50" | "mps-70":
            return MpsWith(stage, logs, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=stage.removeprefix("mps-"))
        case "slices-short" | "slices-long":
            return DriverSlices(stage, logs, 1 if stage == "slices-short" else 3)
        case "xsched":
            return XSched(stage, logs, int(os.environ.get("XSCHED_LEVEL", "3")))
        case "xsched-1":
            return XSched(stage, logs, 1)
        case "streams" | "green":
            return Mode(stage, logs)
    return common.mode(stage, logs)


def crews(
    stack: ExitStack, stages: Iterable[str], logs: Path, program: Sequence[str] = common.TORCH
) -> tuple[dict[str, Crew], list[str]]:
    """The crews of all stages that can run here, and what is to be said of the others."""
    found, notes = dict[str, Crew](), list[str]()
    for stage in dict.fromkeys(stages):
        try:
            found[stage] = stack.enter_context(Crew(stack.enter_context(mode(stage, logs)), program))
        except BenchError as error:
            notes.append(f"{stage} could not run: {' '.join(str(error).split())[:300]}. Tried: {tried(stage)}.")
            common.say(f"error: {notes[-1]}")
    return found, notes


def settle(crew: Crew, hints: str, objective: str) -> None:
    """Sets these of a crew's latency programs."""
    assert isinstance(crew.mode, Gpumux)
    for name, (_, klass) in crew.started.items():
        if klass == "latency" and name in crew.workers:
            crew.mode.set(name, "--hints", hints, "--latency-objective", objective)


def beside(crew: Crew, mode: str, seconds: float, latency: dict[str, Any], batch: dict[str, Any], lead: float = 0.5) -> dict[str, Any]:
    """What a latency program and batch programs answer: at once, or, where the mode is one of programs alone, it and then the first of the others."""
    if mode in ALONE:
        first = dict([next(iter(batch.items()))])
        return crew.measure(seconds, latency, lead) | crew.measure(seconds / 2, first, lead)
    if mode in TOGETHER:
        return crew.measure(seconds, {"pair": {"op": "pair", **latency, **batch}}, lead)["pair"]
    return crew.measure(seconds, latency | batch, lead)


def warm(crews: Mapping[str, Crew], wanted: Callable[[str], Programs]) -> dict[str, BenchError]:
    """Starts the programs of all crews, at once but for those under daemons; what failed, by crew."""
    failed = dict[str, BenchError]()
    # Daemons do not know of each other: busy batch programs of two would all have the shortest timeslice, and hardly run.
    managed = [stage for stage, crew in crews.items() if isinstance(crew.mode, Gpumux)]
    turns = [[stage] for stage in crews if stage not in managed] + [managed]

    def have(turn: Sequence[str]) -> None:
        for stage in turn:
            try:
                crews[stage].have(wanted(stage))
            except BenchError as error:
                failed[stage] = error

    with ThreadPoolExecutor(len(turns)) as threads:
        list(threads.map(have, turns))
    return failed


def prepare(
    case: str,
    modes: list[str],
    stages: Mapping[str, str],
    crews: Mapping[str, Crew],
    programs: Callable[[str, str], Programs],
    notes: list[str],
) -> None:
    """Starts the programs of a case in all modes at once; takes modes out that cannot run it, and notes why."""
    failed = warm({stages[mode]: crews[stages[mode]] for mode in modes}, lambda stage: programs(case, stage))

    def started(_: str, mode: str) -> None:
        if stages[mode] in failed:
            raise failed[stages[mode]]

    rounds.prepare(case, modes, started, notes)


def compare(
    results: Results,
    cases: Sequence[str],
    stages: Mapping[str, str],
    programs: Callable[[str, str], Programs],
    measure: Callable[[Crew, str, str, int], dict[str, Any]],
    logs: Path,
    budget_s: float,
    most: int,
    least: int | Mapping[str, int] = rounds.LEAST,
    varies: Collection[str] = (),
    program: Sequence[str] = common.TORCH,
    settings: Mapping[str, tuple[str, str]] = SETTINGS,
    placed: bool = True,
) -> int:
    """Measures each case in each mode, in rounds; returns the exit code of `rounds.run`.

    `stages` has the stage of each mode, `programs(case, stage)` are those that run in a case, and `measure(crew, case, mode, round)` gives a cell.
    `least` and `varies` are as of `rounds.Plan`; with `placed` programs have processors of their own."""
    with ExitStack() as stack:
        found, notes = crews(stack, stages.values(), logs, program)
        modes = [name for name, stage in stages.items() if stage in found]

        def have(case: str, mode: str, number: int) -> Crew:
            crew = found[stages[mode]]
            crew.have(programs(case, stages[mode]))
            if placed:
                crew.place(number)
            if (own := ALONE.get(mode, mode)) in settings:
                settle(crew, *settings[own])
            return crew

        plan = rounds.Plan(
            cases,
            modes,
            lambda case, mode, number: measure(have(case, mode, number), case, mode, number),
            lambda case: prepare(case, modes, stages, found, programs, notes),
            dict.fromkeys(cases, least) if isinstance(least, int) else least,
            varies,
        )
        return rounds.run(plan, results, budget_s, most, notes)
