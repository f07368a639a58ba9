"""Programs that share GPUs one at a time and at the same time, beside a latency client that is outside.

Cases are named by the jobs: `train` is ResNet-152 training (batch 128, bf16), `vit` ViT-L training (batch 64, bf16: mostly
matrix products, which need all SMs), `inference` a server of ResNet-50 requests
back to back (one image, launched kernel by kernel: it cannot fill the GPU), `decode` a language model of GPT-2's size that makes token after token
(launched kernel by kernel: a few SMs are enough for it), `triad` and `gemv` kernels that need all of the memory's bandwidth, `gemm` matrix products,
`parallel` a job on all GPUs, matrix products whose results are summed over them after each
layer, `left` and `right` training as `train` on the first and the second GPU, `latency` a client of a ResNet-50 CUDA graph that
pauses between requests. The jobs are of class batch, the client is of class latency.
Modes: `alone`, `time-slicing` (the driver's default), `mps` (all in one MPS server), `time` (gpumux: each in a context of its own),
`space` (gpumux: the jobs in one MPS group, the client outside), `equal` (the same, with the SMs divided evenly), `utility` (the same, with SM shares by scaling profiles that `gpumux profile`
measures first, and that the daemon finds by the jobs' fingerprints; here in space also where the daemon predicts no gain).
`throughput_rel` is the sum of each job's rate over its rate alone, the total utility, the client's requests per second among them; alone it is 1 by
definition. `batch_rel` is that sum without the client, `spread_rel` its range over the rounds. `predicted_rel` of `utility` is what the daemon predicts for `batch_rel` in the
group, `predicted_time_rel` what it predicts for contexts of their own, which is `batch_rel` of `time`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import peers
from colocation import SERVER, STEPS, requests
from common import BenchError, Crew, Mode, Results
from memory import cell
from peers import Space

KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "train": (["train", "--model", "resnet152"], STEPS),
    "vit": (["train", "--model", "vit_l_16", "--batch", "64"], STEPS),
    "inference": (["serve", "--model", "resnet50"], {"op": "repeat", "kind": "eager"}),
    "graph": (["serve", "--model", "resnet50", "--kind", "graph"], {"op": "repeat", "kind": "graph"}),
    "tokens": (["generate", "--kinds", "graph"], {"op": "tokens", "kind": "graph", "seed": 1}),
    "triad": (["triad"], STEPS),
    "gemv": (["gemv"], STEPS),
    "gemm": (["gemm"], STEPS),
    "parallel": (["parallel"], STEPS),
    "left": (["train"], STEPS),
    "right": (["train", "--device", "1"], STEPS),
    "decode": (["serve", "--model", "decode"], {"op": "repeat", "kind": "eager"}),
}
# The jobs of a case are in its name.
CASES = [
    "train+train+latency", "train+train", "inference+train", "decode+train", "decode+vit", "decode+triad", "gemv+triad", "gemm+triad", "gemm+train", "train+triad",
    "inference+inference+inference", "parallel+parallel", "parallel+left+right",
]  # fmt: skip
MODES = ["alone", "time-slicing", "mps", "time", "space", "equal", "utility"]
DEFAULT_MODES = MODES[:-2]  # measuring the curves takes longer than all the rest
PERCENTAGES = [10, 25, 50, 75, 100]
# From a job's first work until it is warm: it builds its network, and lets libraries choose kernels.
WARM_UP_S = 8.0
ROUND_S = 2.0
# A measurement whose quarters differ by more is no steady state.
STEADY = 0.2
DEFAULT_CASES = ["train+train+latency", "inference+inference+inference"]


def jobs_of(case: str) -> list[str]:
    """The kinds of its jobs."""
    return case.removesuffix("+latency").split("+")


class Equal(Space):
    """The same with an equal part of the SMs for each job."""

    part = 1.0

    def flags(self, name: str, klass: str | None) -> list[str]:
        return super().flags(name, klass) + (["--limit", f"{self.part:.3f}"] if klass == "batch" else [])


class Utility(Space):
    """The same with SM shares by scaling profiles that the daemon has."""

    points: Sequence[int] = PERCENTAGES
    warm_up: float = WARM_UP_S

    def flags(self, name: str, klass: str | None) -> list[str]:
        return super().flags(name, klass) + (["--fingerprint", name.partition("-")[0]] if klass == "batch" else [])

    def profile_command(self, kind: str, seconds: float) -> list[str]:
        """Measures a kind of job, and has the daemon keep the curve under its name."""
        points = ",".join(str(percent) for percent in self.points)
        options = ["--fingerprint", kind, "--points", points, "--seconds", f"{seconds:g}"]
        job = [sys.executable, str(common.WORKER), "--free", *KINDS[kind][0]]
        return [self.binary, "profile", *options, "--warmup", f"{self.warm_up:g}", "--json", "--", *job]

    def profile(self, kind: str, seconds: float) -> dict[int, float]:
        """What a kind of job makes of percentages of the SMs, relative to all of them."""
        log = self.logs / f"{self.name}-profile-{kind}.log"
        with open(log, "w") as err:
            asked = subprocess.run(
                self.profile_command(kind, seconds),
                env=os.environ | self.environment(),
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                timeout=(len(self.points) + 1) * (common.READY_S + self.warm_up + 3 * seconds + 30),
            )
        if asked.returncode != 0:
            raise BenchError(f"no profile of {kind}: {common.tail(log)}")
        found = json.loads(asked.stdout)
        points = found["points"]
        if unsteady := [it["percent"] for it in points if it["spread"] > STEADY]:
            common.say(f"{kind} was not steady at {unsteady}% of the SMs")
        curve = {it["percent"]: it["relative"] for it in points}
        common.say(f"{kind}: " + ", ".join(f"{percent}% of the SMs {it:.3f}" for percent, it in curve.items()))
        common.say(f"{kind}: bandwidth {found['bandwidth']}")
        return curve

    def predicted(self, names: Iterable[str]) -> dict[str, float]:
        """What the daemon predicted of these programs in a group and in time when the last of them started; BenchError if it knows too little."""
        placements = {tenant["name"]: tenant["placement"] for tenant in self.tenants_now()}
        mine = {name: placements[self.tenants[name]] for name in names}
        common.say(f"percentages of the SMs: { {name: it.get('sm_percent') for name, it in mine.items()} }")
        last = list(mine.values())[-1].get("prediction")
        if last is None:
            raise BenchError(f"the daemon predicts nothing of {', '.join(mine)}")
        return {"predicted_rel": last["in_group"], "predicted_time_rel": last["in_time"]}


def mode(name: str, logs: Path) -> Mode:
    """The mode of this name."""
    match name:
        case "time":
            return common.mode("gpumux", logs)
        case "equal":
            return Equal(name, logs)
        case "utility":
            return Utility(name, logs)
        case _:
            return peers.mode(name, logs)


class Cell:
    """One case in one mode, measured in rounds."""

    def __init__(self, case: str, name: str) -> None:
        kinds = jobs_of(case)
        # Alone, one of each kind runs after the other.
        self.jobs = {kind: kind for kind in kinds} if name == "alone" else {f"{it}-{n + 1}": it for n, it in enumerate(kinds)}
        self.user = case.endswith("+latency")
        self.case, self.name = case, name
        self.answers: list[dict[str, dict[str, Any]]] = []
        self.predicted: dict[str, float] = {}

    def have(self, crew: Crew) -> None:
        """Makes its programs run."""
        wanted = {name: (KINDS[kind][0], "batch") for name, kind in self.jobs.items()}
        if self.user:
            wanted["server"] = SERVER
        if isinstance(crew.mode, Equal):
            crew.close(*self.jobs)
            crew.mode.part = 1 / len(self.jobs)
        crew.have(wanted)
        if isinstance(crew.mode, Utility):
            # Shares are set when a process starts: now all are known.
            for name in self.jobs:
                crew.close(name)
                crew.have(wanted)
            self.predicted = crew.mode.predicted(self.jobs)

    def measure(self, crew: Crew, seconds: float) -> None:
        """One more round."""
        orders = {name: KINDS[kind][1] for name, kind in self.jobs.items()}
        if self.user:
            orders["server"] = requests("graph", seconds, seed=len(self.answers))
        together = [{name: order} for name, order in orders.items()] if self.name == "alone" else [orders]
        self.answers.append({name: it for part in together for name, it in crew.measure(seconds, part).items()})

    def rates(self, rounds: slice = slice(None)) -> dict[str, float]:
        """Of each program, per second, over all rounds or some: steps or requests. A client that waits longer asks less often."""
        found = {}
        for name in self.answers[0]:
            mine = [answers[name] for answers in self.answers[rounds]]
            done = sum(len(it["latencies_ms"]) if name == "server" else it["calls"] for it in mine)
            found[name] = done / sum(it["seconds"] for it in mine)
        return found

    def values(self, alone: dict[str, float]) -> dict[str, float]:
        """Of all rounds, with the rates of the same programs alone."""
        if self.name == "alone":
            values = {"throughput_rel": 1.0}
        else:
            rates = self.rates()

            def parts(rates: dict[str, float]) -> list[float]:
                return [rates[name] / alone[kind] for name, kind in self.jobs.items()]

            shares = parts(rates)
            sums = [sum(parts(self.rates(slice(n, n + 1)))) for n in range(len(self.answers))]
            common.say("rate of each job over its rate alone: " + ", ".join(f"{it:.3f}" for it in shares))
            total = sum(shares) + (rates["server"] / alone["server"] if self.user else 0)
            values = {"throughput_rel": total, "batch_rel": sum(shares), "least_rel": min(shares)}
            values |= self.predicted | {"spread_rel": max(sums) - min(sums)}
        if self.user:
            values |= common.latency_values([ms for it in self.answers for ms in it["server"]["latencies_ms"]])
        return values


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "PyTorch jobs that share one GPU in time and in space: total throughput and the latency of a user outside.",
        "  GPUMUX=target/release/gpumux python3 bench/space.py\n"
        "  python3 bench/space.py --cases train+train+latency --modes alone,mps,space --seconds 8     (about 150 s)\n"
        "  python3 bench/space.py --cases inference+train --modes alone,mps,space,utility --seconds 8     (about 7 min)\n"
        "  python3 bench/space.py --cases train+train,gemm+triad --modes time,utility --points 25,50,100 --warmup 4 --seconds 6     (about 8 min)\n"
        "  python3 bench/space.py --cases decode+vit --modes alone,mps,space --seconds 12 --together     (about 3 min)",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one cell [%(default)s]")
    common.selections(parser, CASES, MODES, cases=DEFAULT_CASES, modes=DEFAULT_MODES)
    parser.add_argument("--points", type=lambda text: [int(it) for it in text.split(",")], default=PERCENTAGES, help="percentages of the SMs of a profile")
    parser.add_argument("--warmup", type=float, default=WARM_UP_S, help="seconds from a job's first work until its profile is measured [%(default)s]")
    parser.add_argument(
        "--together",
        action="store_true",
        help="keep the programs of all modes, if the GPU can hold them, and measure in rounds, one mode after the other",
    )
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    rounds = max(1, round(seconds / ROUND_S))
    results = Results("space", options.out, CASES, MODES)
    kinds = list(dict.fromkeys(kind for case in options.cases for kind in jobs_of(case)))
    # Everything is relative to the rates alone, so they are measured in any case.
    modes = [name for name in MODES if name == "alone" or name in options.modes]
    alone: dict[str, dict[str, float]] = {}

    def start(name: str, stack: ExitStack) -> Crew | None:
        with cell(results, name, logs):
            crew = stack.enter_context(Crew(stack.enter_context(mode(name, logs))))
            if isinstance(crew.mode, Utility):
                crew.mode.points, crew.mode.warm_up = options.points, options.warmup
                for kind in kinds:
                    crew.mode.profile(kind, min(seconds, 4.0))
            return crew
        return None

    def measure(case: str, crews: dict[str, Crew]) -> None:
        cells = {name: Cell(case, name) for name in crews}
        for step in range(-1, rounds):
            for name, one in list(cells.items()):
                with cell(results, f"{case} / {name}", logs):
                    if step < 0:
                        one.have(crews[name])
                    else:
                        one.measure(crews[name], seconds / rounds)
                    continue
                del cells[name]
        for name, one in cells.items():
            if name == "alone":
                alone[case] = one.rates()
            if case in alone and name in options.modes:
                results.add(case, name, one.values(alone[case]))

    for names in [modes] if options.together else [[name] for name in modes]:
        with ExitStack() as stack:
            crews = {name: crew for name in names if (crew := start(name, stack))}
            for case in options.cases:
                measure(case, crews)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
