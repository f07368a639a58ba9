"""Several jobs that run collectives on the same GPUs, and programs that need memory bandwidth.

`matrix`: two jobs with a rank on each GPU. Cases are the patterns of both: `ddp` (each layer's gradients are summed while the next is computed), `fsdp` (weights
gathered before each layer, gradients scattered after it), `tensor` (a sum after each layer), `pipeline` (micro-batches sent from rank to rank), `all-to-all`.
Modes: `time-slicing` (the driver's), `mps` (one server), `gangs` (gpumux: a job's processes run and freeze together), `group` (gpumux: both jobs in one MPS group),
`group-ctas` (the same, the second job with NCCL_MAX_CTAS=4). Values, relative to the job alone: `throughput_rel` (sum), `least_rel`, `one_rel`, `two_rel`. In rounds
(rounds.py), each beside `alone` (steps per second).

`pacing`: two equal jobs in mode `gangs` with guarantees of 0.7 and 0.3, then one of them. Values: `share_one`, `share_two` (of the work of both, each relative to
alone), `total_rel`, and `left_rel` (the second, while the first is idle). In rounds as well.

`storm`: two jobs that only sum, and compare every word. In each round something happens to them while a sum is in progress: sleep and wake, a limit, a class, the daemon stopped
for 2 s (SIGSTOP), killed and started again, a rank killed. Then both must go on. Cases: what happens, and `all`. Values: `rounds`, `in_collective` (a rank was inside a sum at that moment),
`hangs` (a job did not go on within the bound), `refused` (the command failed), `wrong` words, `compared` words, `worst_s` until both went on.

`logical`: more ranks than GPUs, by NCCL's own support (`--nccl`: a libnccl.so.2 of 2.30.3 or newer). Cases: `2-on-2`, `2-on-1`, `4-on-2`. Modes `time-slicing`, `group`,
`ranks-per-gpu` (a group that `gpumux run --ranks-per-gpu 2` sets up, with nothing set by hand; ranks use the GPU of their `LOCAL_RANK`),
`stock` (PyTorch's own NCCL; `refused`: 1 if it refuses two ranks on one GPU). Values: steps per second, `of_ideal` (against 2-on-2 with the work of each GPU),
`loss_off` (largest relative difference of a loss from 2-on-2).

`bandwidth`: on the first GPU, tokens that read 1.5 GiB each (like decoding), with pauses, beside a triad that needs all bandwidth. Cases: `decode+triad`, and `knee`, the triad alone by SMs.
Modes of the first: `alone`, `time-slicing`, `mps`, `mps-30`, `mps-50`, `gpumux` (a latency tenant beside a batch tenant), `duty-30` (both batch, the triad with a limit of 0.3 of the time),
`group`, `group-30`, `group-15` (one group, the triad with that part of the SMs). Values: `latency_p50_ms`, `latency_p99_ms`, `batch_gbs`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import peers
import rounds
from collectives_worker import GRANTED, INSIDE, PID, STEPS, WRONG, CHECKED, Board
from common import BenchError, Crew, Gpumux, Mode, Results, say
from peers import Space

WORKER = Path(__file__).resolve().parent / "collectives_worker.py"
PROGRAM = (sys.executable, str(WORKER))
PAIRS = [
    "ddp+ddp",
    "tensor+tensor",
    "fsdp+fsdp",
    "ddp+tensor",
    "all-to-all+all-to-all",
    "pipeline+pipeline",
    "fsdp+pipeline",
    "tensor+all-to-all",
]
SHARED = ["time-slicing", "mps", "gangs", "group", "group-ctas"]
HEAVY = ["alone", "time-slicing", "mps", "mps-30", "mps-50", "gpumux", "duty-30", "group", "group-30", "group-15"]
# What happens in a storm, and how often in a hundred rounds.
ACTIONS = {"sleep": 32, "doze": 12, "limit": 29, "class": 12, "stop": 3, "restart": 10, "rank": 2}
PARTS: dict[str, tuple[list[str], list[str]]] = {
    "storm": (["all", *ACTIONS], ["gangs"]),
    "matrix": (PAIRS, SHARED),
    "pacing": (["ddp+ddp", "tensor+tensor"], ["gangs", "group-ctas"]),
    "logical": (["2-on-2", "2-on-1", "4-on-2"], ["time-slicing", "group", "ranks-per-gpu", "stock"]),
    "bandwidth": (["decode+triad", "knee"], HEAVY),
}
JOBS = ("one", "two")
SMS = [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 132]
# A job goes on within this after anything but a restart of its ranks, which loads PyTorch and makes communicators.
GOES_ON_S, STARTS_S = 30.0, 120.0
HANGS = 3


class FewBlocks(Space):
    """All in one group, and the second job with less of NCCL's thread blocks."""

    def variables(self, name: str, klass: str | None) -> dict[str, str]:
        return {"NCCL_MAX_CTAS": "4"} if name == "two" else {}


def mode(name: str, logs: Path) -> Mode:
    """The mode of this name."""
    match name:
        case "stock":
            return Mode(name, logs)
        case "gangs":
            return Gpumux(name, logs)
        case "group":
            return Space(name, logs)
        case "group-ctas":
            return FewBlocks(name, logs)
        case "ranks-per-gpu":
            return Space(name, logs, one=("--ranks-per-gpu", "2"))
        case "group-30" | "group-15":
            return Space(name, logs, triad=("--limit", f"0.{name.removeprefix('group-')}"))
        case "duty-30":
            return Gpumux(name, logs, triad=("--limit", "0.3"))
    return peers.mode(name, logs)


class Jobs(Crew):
    """Jobs of ranks, and their boards."""

    def __init__(self, mode: Mode, folder: Path, ranks: int = 2, extra: Sequence[str] = ()) -> None:
        super().__init__(mode, PROGRAM)
        self.folder, self.ranks, self.extra = folder, ranks, extra
        self.boards: dict[str, Board] = {}

    def start(self, *names: str) -> None:
        """Makes these jobs run, and no others."""
        wanted: dict[str, tuple[Sequence[str], str]] = {}
        for name in names:
            board = self.folder / f"{self.mode.name}-{name}.board"
            self.boards.setdefault(name, Board(board))
            wanted[name] = (["job", "--board", str(board), "--ranks", str(self.ranks), *self.extra], "batch")
        self.have(wanted)

    def rates(self, seconds: float, patterns: dict[str, str], lead: float = 0.2) -> dict[str, float]:
        """Steps per second of jobs that work together. A wrong sum fails the cell."""
        answers = self.measure(seconds, {name: {"op": "steps", "pattern": pattern} for name, pattern in patterns.items()}, lead)
        if wrong := {name: it["wrong"] for name, it in answers.items() if it["wrong"]}:
            raise BenchError(f"wrong words in sums: {wrong}")
        return {name: it["calls"] / it["seconds"] for name, it in answers.items()}


class Budget:
    """What is left of the time of a call."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def spent(self, what: str, needs: float) -> bool:
        """Whether there is no time for something any more."""
        if time.monotonic() + needs <= self.end:
            return False
        say(f"left out for want of time: {what}")
        return True


def begun(
    names: Sequence[str],
    logs: Path,
    make: Callable[[Mode], Any],
    start: Callable[[Any], None],
    results: Results,
    stack: ExitStack,
) -> dict[str, Any]:
    """The crews of these modes, whose programs all start at the same time; those that do not are left out."""
    crews = dict[str, Any]()
    for name in names:
        with results.cell(name):
            crews[name] = stack.enter_context(make(stack.enter_context(mode(name, logs))))
    with ThreadPoolExecutor() as threads:
        starts = {name: threads.submit(start, crew) for name, crew in crews.items()}
        for name, it in starts.items():
            with results.cell(name):
                it.result()
                continue
            del crews[name]
    return crews


def relative(rates: dict[str, float], alone: dict[str, float], patterns: dict[str, str]) -> dict[str, float]:
    """The values of a pair."""
    each = {name: rates[name] / alone[pattern] for name, pattern in patterns.items()}
    return {"throughput_rel": sum(each.values()), "least_rel": min(each.values())} | {f"{name}_rel": it for name, it in each.items()}


def pair(case: str) -> dict[str, str]:
    """The pattern of each job."""
    return dict(zip(JOBS, case.split("+")))


def in_rounds(
    options: argparse.Namespace,
    results: Results,
    logs: Path,
    folder: Path,
    together: Callable[[Jobs, dict[str, str], dict[str, float]], dict[str, float]],
    own: bool = False,
) -> int:
    """Measures pairs in all modes, in rounds; `together` gives the values of both jobs, by each pattern's rate alone in the same round or the one before.

    `own`: alone is the first mode's first job while the other is idle. The use of programs without gpumux could not be guaranteed to others.
    """
    alone, notes = dict[str, float](), list[str]()
    names = lambda kind: JOBS[:1] if kind == "alone" else JOBS  # noqa: E731
    with ExitStack() as stack:
        start = lambda crew: crew.start(*names(crew.mode.name))  # noqa: E731
        crews = begun([*([] if own else ["alone"]), *options.modes], logs, lambda kind: Jobs(kind, folder), start, results, stack)
        modes = ["alone", *(name for name in crews if name != "alone")]

        def of(name: str) -> Jobs:
            return crews[modes[1] if own and name == "alone" else name]

        def have(case: str, name: str) -> None:
            of(name).start(*names(name))
            for pattern in dict.fromkeys(pair(case).values()):
                of(name).rates(0.3, dict.fromkeys(names(name), pattern), 0.1)  # buffers and connections are made

        def measure(case: str, name: str, _: int) -> dict[str, Any]:
            jobs, patterns = of(name), pair(case)
            jobs.start(*names(name))
            if name != "alone":
                return rounds.cell(**together(jobs, patterns, alone))
            for pattern in dict.fromkeys(patterns.values()):
                alone[pattern] = jobs.rates(options.seconds, {"one": pattern})["one"]
            return rounds.cell(**{f"{job}_per_s": alone[pattern] for job, pattern in patterns.items()})

        def prepare(case: str) -> None:
            rounds.prepare(case, modes, have, notes)
            measure(case, "alone", 0)

        least = min(options.rounds, rounds.LEAST)
        plan = rounds.Plan(options.cases, modes, measure, prepare, dict.fromkeys(options.cases, least))
        return max(rounds.run(plan, results, options.budget, options.rounds, notes), int(bool(results.failed)))


def matrix(options: argparse.Namespace, results: Results, logs: Path, folder: Path) -> int:
    """All pairs in all modes, beside each pattern alone."""
    return in_rounds(
        options, results, logs, folder, lambda jobs, patterns, alone: relative(jobs.rates(options.seconds, patterns), alone, patterns)
    )


def pacing(options: argparse.Namespace, results: Results, logs: Path, folder: Path) -> int:
    """Two equal jobs with unequal guarantees, and one of them."""

    def together(jobs: Jobs, patterns: dict[str, str], alone: dict[str, float]) -> dict[str, float]:
        kind = jobs.mode
        assert isinstance(kind, Gpumux)
        if kind.name == "gangs":
            for job, share in zip(JOBS, ("0.7", "0.3")):
                if error := ordered(kind, "set", kind.tenants[job], "--guaranteed", share):
                    raise BenchError(error)
        jobs.rates(1.0, patterns)
        rates = jobs.rates(2 * options.seconds, patterns)
        one, two = (rates[job] / alone[patterns[job]] for job in JOBS)
        left = jobs.rates(options.seconds / 2, {"two": patterns["two"]})["two"] / alone[patterns["two"]]
        if kind.name == "gangs":
            for job in reversed(JOBS):
                ordered(kind, "set", kind.tenants[job], "--guaranteed", "0")
        return {"share_one": one / (one + two), "share_two": two / (one + two), "total_rel": one + two, "left_rel": left}

    return in_rounds(options, results, logs, folder, together, own=True)


# --- the storm ----------------------------------------------------------------------------------


def deck(rounds: int, seed: int) -> list[str]:
    """What happens in each round: each action in its part, and at least once where there is room, in an order that the seed gives."""
    total = sum(ACTIONS.values())
    found = [name for name, part in ACTIONS.items() for _ in range(max(1, round(rounds * part / total)))]
    rng = random.Random(seed)
    rng.shuffle(found)
    return found[:rounds] + rng.choices(list(ACTIONS)[:4], k=max(0, rounds - len(found)))


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The values of rounds."""
    values = {"rounds": len(rounds)}
    for name in ("in_collective", "hangs", "refused"):
        values[name] = sum(it[name] for it in rounds)
    return values | {"worst_s": max(it["seconds"] for it in rounds), "median_s": common.quantile([it["seconds"] for it in rounds], 0.5)}


def ordered(kind: Gpumux, *command: str, patience: float = 60.0) -> str:
    """Runs a command of gpumux; returns its error, if it failed."""
    try:
        done = kind.ask(*command, timeout=patience)
    except subprocess.TimeoutExpired:
        return f"gpumux {' '.join(command)}: no answer within {patience:g} s"
    return "" if done.returncode == 0 else f"gpumux {' '.join(command)}: {done.stderr.strip()}"


class Storm:
    """Two jobs, and what happens to them."""

    def __init__(self, kind: Gpumux, jobs: Jobs, logs: Path) -> None:
        self.kind, self.jobs, self.logs = kind, jobs, logs
        self.rng = random.Random(7)
        self.flip = 0

    def begin(self, *names: str) -> None:
        """Both work from now on, without an end."""
        now = time.monotonic()
        for name in names:
            self.jobs.workers[name].send(op="begin", pattern="storm", start=now, stop=now + 1e6)
            self.jobs.workers[name].reply(common.REPLY_S)

    def inside(self, name: str) -> bool:
        """Whether a rank of the job is in a sum."""
        return self.jobs.boards[name].sum(self.jobs.ranks, INSIDE) > 0

    def await_inside(self, name: str) -> bool:
        """Waits until one is, and then for a while that is different each time; whether one still is."""
        end = time.monotonic() + 5
        while not self.inside(name) and time.monotonic() < end:
            time.sleep(0.0001)
        time.sleep(self.rng.uniform(0, 0.004))
        return self.inside(name)

    def act(self, action: str, name: str) -> str:
        """Does it to a job; returns what was refused."""
        tenant, kind = self.kind.tenants[name], self.kind
        self.flip += 1
        match action:
            case "sleep" | "doze":
                error = ordered(kind, "sleep", tenant)
                if action == "doze":
                    time.sleep(0.3)
                return error or ordered(kind, "wake", tenant)
            case "limit":
                return ordered(kind, "set", tenant, "--limit", ("0.3", "0.9", "1")[self.flip % 3], "--weight", ("1", "3")[self.flip % 2])
            case "class":
                # Not for long: a latency tenant that always has work leaves a batch tenant nothing.
                error = ordered(kind, "set", tenant, "--class", ("latency", "standard")[self.flip % 2])
                time.sleep(0.3)
                return error or ordered(kind, "set", tenant, "--class", "batch")
            case "stop":
                os.kill(kind.daemon.pid, signal.SIGSTOP)
                time.sleep(2)
                os.kill(kind.daemon.pid, signal.SIGCONT)
            case "restart":
                kind.kill_daemon()
                time.sleep(self.rng.choice((0.0, 0.2, 1.0)))
                kind.start_daemon()
            case "rank":
                os.kill(self.jobs.boards[name].rank(self.rng.randrange(self.jobs.ranks), PID), signal.SIGKILL)
        return ""

    def round(self, number: int, action: str) -> dict[str, Any]:
        """Does it to one of the jobs, and sees both go on."""
        name, boards, ranks = JOBS[number % 2], self.jobs.boards, self.jobs.ranks
        hit = self.await_inside(name)
        begin = time.monotonic()
        error = self.act(action, name)
        acted = time.monotonic()
        at = {job: boards[job].sum(ranks, STEPS) for job in JOBS}
        # Both must make whole steps that began after it.
        stuck, end = list(JOBS), acted + (STARTS_S if action == "rank" else GOES_ON_S)
        while stuck and time.monotonic() < end:
            stuck = [job for job in stuck if boards[job].sum(ranks, STEPS) < at[job] + 3 * ranks]
            time.sleep(0.001)
        one = {
            "round": number,
            "action": action,
            "job": name,
            "in_collective": hit,
            "act_s": acted - begin,
            "seconds": time.monotonic() - acted,
            "refused": bool(error),
            "error": error,
            "hangs": len(stuck),
            "wrong": sum(boards[job].sum(ranks, WRONG) for job in JOBS),
        }
        for job in stuck:
            self.explain(job, number)
        return one

    def explain(self, job: str, number: int) -> None:
        """Keeps what may say why a job does not go on."""
        board, found = self.jobs.boards[job], []
        for rank in range(self.jobs.ranks):
            pid = board.rank(rank, PID)
            found.append(f"== rank {rank}, pid {pid}, steps {board.rank(rank, STEPS)}, inside {board.rank(rank, INSIDE)}, granted {board.words[GRANTED]}")
            for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
                with contextlib.suppress(OSError):
                    state = (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    found.append(f"{(thread / 'comm').read_text().strip()} {state} {(thread / 'wchan').read_text()} {(thread / 'syscall').read_text().strip()[:60]}")
        for command in (["ps", "--json"], ["explain", self.kind.tenants[job]]):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                asked = self.kind.ask(*command, timeout=10)
                found.append(f"== gpumux {' '.join(command)}\n{asked.stdout}{asked.stderr}")
        with contextlib.suppress(OSError, subprocess.SubprocessError, BenchError):
            self.kind.trace(self.logs / f"hang-{number}-{job}.trace.json", 20)
        (self.logs / f"hang-{number}-{job}.txt").write_text("\n".join(found) + "\n")
        say(f"{job} does not go on: hang-{number}-{job}.txt in {self.logs}")


def storm(options: argparse.Namespace, results: Results, logs: Path, folder: Path) -> None:
    """Rounds, with their summary after each ten."""
    budget, done, wrong, hangs = Budget(options.budget), list[dict[str, Any]](), 0, 0
    with results.cell("storm"), mode("gangs", logs) as kind, Jobs(kind, folder) as jobs:
        assert isinstance(kind, Gpumux)
        it = Storm(kind, jobs, logs)

        def report() -> None:
            compared = sum(board.sum(jobs.ranks, CHECKED) for board in jobs.boards.values())
            results.add("all", "gangs", summary(done) | {"wrong": wrong, "compared": compared})
            for action in ACTIONS:
                if mine := [one for one in done if one["action"] == action]:
                    results.add(action, "gangs", summary(mine))

        jobs.start(*JOBS)
        it.begin(*JOBS)
        with (logs / "storm.jsonl").open("a") as record:
            for number, action in enumerate(deck(options.rounds, options.seed)):
                if budget.spent(f"rounds from {number} on", 5):
                    break
                done.append(one := it.round(number, action))
                record.write(json.dumps(one) + "\n")
                record.flush()
                say(f"round {number}, {action} on {one['job']}: {one['act_s']:.3f} + {one['seconds']:.3f} s {one['error']}")
                wrong = max(wrong, one["wrong"])
                hangs += one["hangs"]
                if one["hangs"]:
                    if hangs >= HANGS:
                        say("error: too many hangs")
                        break
                    jobs.close(*JOBS)
                    jobs.start(*JOBS)
                    it.begin(*JOBS)
                if number % 10 == 9:
                    report()
        report()
        if wrong or hangs:
            raise BenchError(f"{hangs} hangs, {wrong} wrong words")


# --- logical GPUs -------------------------------------------------------------------------------


def refuses(jobs: Jobs, log: Path) -> bool:
    """Whether NCCL says that two ranks may not have one GPU."""
    try:
        jobs.start("one")
    except BenchError:
        if "Duplicate GPU detected" in log.read_text():
            return True
        raise
    return False


def logical(options: argparse.Namespace, results: Results, logs: Path, folder: Path) -> None:
    """Training by as many ranks as GPUs, and by more."""
    budget, base = Budget(options.budget), dict[str, Any]()
    nccl = ["--nccl", str(Path(options.nccl).resolve())] if options.nccl else []
    seen = common.visible(max(int(case[-1]) for case in options.cases)).split(",")
    cells = [("2-on-2", "time-slicing"), ("2-on-1", "group"), ("4-on-2", "group"), ("2-on-1", "stock"), ("2-on-1", "time-slicing")]
    cells += [("2-on-1", "ranks-per-gpu"), ("4-on-2", "ranks-per-gpu")]
    for case, name in cells:
        if case not in options.cases or name not in options.modes or budget.spent(f"{case} / {name}", 15):
            continue
        if not nccl and (case, name) not in (cells[0], cells[3]):
            say(f"{case} / {name}: needs --nccl with NCCL 2.30.3 or newer")
            continue
        with results.cell(f"{case} / {name}"):
            ranks, gpus = int(case[0]), int(case[-1])
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[:gpus])
            by_hand = name != "ranks-per-gpu"
            os.environ.pop("NCCL_MAX_CTAS", None)
            if by_hand:
                os.environ["NCCL_MAX_CTAS"] = "8"  # kernels of all ranks must fit on a GPU at the same time
            extra = [] if name == "stock" else nccl if by_hand else [*nccl, "--local-rank"]
            common.READY_S = 60.0
            with mode(name, logs) as kind, Jobs(kind, folder, ranks, extra) as jobs:
                jobs.mode.name = f"{name}-{case}"
                if name == "stock":
                    results.add(case, name, {"refused": float(refuses(jobs, logs / f"{name}-{case}-one.log"))})
                    continue
                jobs.start("one")
                answer = jobs.measure(options.seconds, {"one": {"op": "losses"}})["one"]
            if answer["wrong"]:
                raise BenchError(f"{answer['wrong']} wrong words in sums")
            rate, losses = answer["calls"] / answer["seconds"], answer["losses"]
            values = {"rate": rate, "last_loss": losses[-1], "losses": len(losses)}
            if case == "2-on-2":
                base = {"rate": rate, "losses": losses}
            elif base:
                pairs = list(zip(losses, base["losses"]))
                # Each GPU has the work of all ranks on it: on one of two GPUs twice the work.
                values |= {"of_ideal": rate / base["rate"] * 2 / gpus, "loss_off": max(abs(a - b) / abs(b) for a, b in pairs), "compared": len(pairs)}
            results.add(case, name, values)


# --- memory bandwidth ---------------------------------------------------------------------------


def bandwidth(options: argparse.Namespace, results: Results, logs: Path, _folder: Path) -> None:
    """Decoding beside a triad."""
    budget = Budget(options.budget)
    os.environ["CUDA_VISIBLE_DEVICES"] = common.visible()
    order = {"decode": {"op": "tokens"}, "triad": {"op": "triads"}}

    def have(crew: Crew) -> None:
        # In groups and by duties both are batch; what MPS confines are batch programs.
        first = "batch" if isinstance(crew.mode, Gpumux) and crew.mode.name != "gpumux" else "latency"
        crew.have({"decode": (["gemv"], first), "triad": (["triad"], "batch")})

    with ExitStack() as stack:
        for name, crew in begun(options.modes, logs, lambda kind: Crew(kind, PROGRAM), have, results, stack).items():
            if budget.spent(name, 2 * options.seconds):
                continue
            with results.cell(f"decode+triad / {name}"):
                if "decode+triad" not in options.cases:
                    continue
                rounds = [{job: it} for job, it in order.items()] if name == "alone" else [order]
                answers = {job: it for part in rounds for job, it in crew.measure(options.seconds, part).items()}
                values = common.latency_values(answers["decode"]["latencies_ms"]) | {"batch_gbs": answers["triad"]["gbs"]}
                results.add("decode+triad", name, values | {"tokens": len(answers["decode"]["latencies_ms"])})
        if "alone" in options.modes and "knee" in options.cases:
            with results.cell("knee"), Crew(mode("alone", logs), PROGRAM) as crew:
                crew.have({"triad": (["triad"], "batch")})
                found = crew.measure(1.0, {"triad": {"op": "knee", "sms": SMS}})["triad"]
                results.add("knee", "alone", {f"gbs_{sms}": it for sms, it in found["gbs"].items()} | {"sms": found["every"]})


RUN = {"storm": storm, "matrix": matrix, "pacing": pacing, "logical": logical, "bandwidth": bandwidth}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one part."""
    parser = common.parser(
        "Several jobs' collectives on shared GPUs: what each receives, whether all go on whatever happens, and memory bandwidth.",
        "  GPUMUX=target/release/gpumux python3 bench/collectives.py storm\n"
        "  python3 bench/collectives.py matrix --cases ddp+ddp,tensor+tensor --modes gangs,group --seconds 4\n"
        "  python3 bench/collectives.py logical --nccl libnccl.so.2",
    )
    parser.add_argument("part", choices=PARTS)
    every = [list(dict.fromkeys(it for part in PARTS.values() for it in part[at])) for at in (0, 1)]
    parser.add_argument("--cases", type=common.listed(every[0]), help="[all of the part]")
    parser.add_argument("--modes", type=common.listed(every[1]), help="[all of the part]")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one cell [%(default)s]")
    parser.add_argument("--rounds", type=int, help=f"of the storm [200]; most of matrix and pacing [{rounds.LEAST}]")
    parser.add_argument("--seed", type=int, default=1, help="of the storm [%(default)s]")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="begin nothing after so many seconds [%(default)s]")
    parser.add_argument("--nccl", help="a libnccl.so.2 of 2.30.3 or newer, for `logical`")
    options = parser.parse_args(arguments)
    cases, modes = PARTS[options.part]
    options.cases, options.modes = options.cases or cases, options.modes or modes
    options.rounds = options.rounds or (200 if options.part == "storm" else rounds.LEAST)
    if options.quick:
        options.seconds, options.rounds = options.seconds / 4, (options.rounds + 1) // 2
    logs = common.begin(options)
    results = Results(f"collectives-{options.part}", options.out, cases, list(dict.fromkeys(["alone", *modes])))
    with tempfile.TemporaryDirectory(prefix="collectives-") as folder:
        code = RUN[options.part](options, results, logs, Path(folder))
    return results.finish() if code is None else code


if __name__ == "__main__":
    sys.exit(main())
