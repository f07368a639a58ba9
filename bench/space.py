"""Programs that share the SMs of one GPU at the same time, beside a latency task that is outside.

Cases are named by the jobs: `train` is ResNet-152 training (batch 128, bf16), `vit` ViT-L training (batch 64, bf16: mostly
matrix products, which need all SMs), `inference` a server of ResNet-50 requests
back to back (one image, launched kernel by kernel: it cannot fill the GPU), `decode` a language model of GPT-2's size that makes token after token
(launched kernel by kernel: a few SMs are enough for it), `latency` a user of a ResNet-50 CUDA graph who
pauses between requests. The jobs are of class batch, the user is of class latency.
Modes: `alone`, `time-slicing` (the driver's default), `mps` (all in one MPS server), `time` (gpumux: each in a context of its own),
`space` (gpumux: the jobs in one group, the user outside), `equal` (the same, with the SMs divided evenly), `utility` (the same, with SM shares by curves that `gpumux profile`
measures first, and that the daemon finds by the jobs' fingerprints).
`throughput_rel` is the sum of each job's rate over its rate alone, the total utility, the user's requests per second among them; alone it is 1 by
definition. `batch_rel` is that sum without the user: what is left for the jobs of the device time that the user has to itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from colocation import SERVER, STEPS, rate, requests
from common import BenchError, Crew, Gpumux, Mode, Results

KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "train": (["train", "--model", "resnet152"], STEPS),
    "vit": (["train", "--model", "vit_l_16", "--batch", "64"], STEPS),
    "inference": (["serve", "--model", "resnet50"], {"op": "repeat", "kind": "eager"}),
    "decode": (["serve", "--model", "decode"], {"op": "repeat", "kind": "eager"}),
}
CASES = {
    "train+train+latency": ["train", "train"],
    "train+train": ["train", "train"],
    "inference+train": ["inference", "train"],
    "decode+train": ["decode", "train"],
    "decode+vit": ["decode", "vit"],
    "inference+inference+inference": ["inference", "inference", "inference"],
}
MODES = ["alone", "time-slicing", "mps", "time", "space", "equal", "utility"]
DEFAULT_MODES = MODES[:-2]  # measuring the curves takes longer than all the rest
PERCENTAGES = (10, 25, 50, 75, 100)
# From a job's first work until it is warm: it builds its network, and lets libraries choose kernels.
WARM_UP_S = 8.0
# A measurement whose quarters differ by more is no steady state.
STEADY = 0.2
DEFAULT_CASES = ["train+train+latency", "inference+inference+inference"]


class Space(Gpumux):
    """gpumux with the jobs in one group."""

    GROUP = ("--trust", "bench", "--sharing", "space")

    def command(
        self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()
    ) -> list[str]:
        group = self.GROUP if klass == "batch" else ()
        return super().command(command, name, klass, [*group, *promise])

    def check(self, names: Sequence[str]) -> None:
        super().check(names)
        deadline = time.monotonic() + 10
        while True:
            own = {self.tenants[name]: name for name in names}
            found = [tenant for tenant in self.tenants_now() if tenant["name"] in own]
            wrong = [
                f"{tenant['name']}: {tenant['placement']}, group {domain.get('group')}"
                for tenant in found
                for domain in tenant["domains"]
                if (tenant["class"] == "batch") != (domain.get("group") is not None)
            ]
            if not wrong:
                return
            if time.monotonic() > deadline:
                raise BenchError(f"not shared as it should be: {'; '.join(wrong)}")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        # What the groups' servers said, for whoever wants to know why something failed.
        for log in sorted(self.folder.glob("groups/*/log/*")):
            shutil.copy(log, self.logs / f"{self.name}-{log.name}")
        super().__exit__(*_)


class Equal(Space):
    """The same with an equal part of the SMs for each job."""

    part = 1.0

    def command(
        self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()
    ) -> list[str]:
        confined = ("--limit", f"{self.part:.3f}") if klass == "batch" else ()
        return super().command(command, name, klass, [*confined, *promise])


class Utility(Space):
    """The same with SM shares by curves that the daemon knows."""

    def command(
        self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()
    ) -> list[str]:
        kind = name.partition("-")[0]
        known = ("--fingerprint", kind) if klass == "batch" else ()
        return super().command(command, name, klass, [*known, *promise])

    def profile_command(self, kind: str, seconds: float) -> list[str]:
        """Measures a kind of job, and has the daemon keep the curve under its name."""
        points = ",".join(str(percent) for percent in PERCENTAGES)
        options = ["--fingerprint", kind, "--points", points, "--seconds", f"{seconds:g}"]
        job = [sys.executable, str(common.WORKER), "--free", *KINDS[kind][0]]
        return [self.binary, "profile", *options, "--warmup", f"{WARM_UP_S:g}", "--json", "--", *job]

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
                timeout=len(PERCENTAGES) * (common.READY_S + WARM_UP_S + seconds + 30),
            )
        if asked.returncode != 0:
            raise BenchError(f"no profile of {kind}: {common.tail(log)}")
        points = json.loads(asked.stdout)["points"]
        if unsteady := [it["percent"] for it in points if it["spread"] > STEADY]:
            common.say(f"{kind} was not steady at {unsteady}% of the SMs")
        curve = {it["percent"]: it["relative"] for it in points}
        common.say(f"{kind}: " + ", ".join(f"{percent}% of the SMs {it:.3f}" for percent, it in curve.items()))
        return curve


def mode(name: str, logs: Path) -> Mode:
    """The mode of this name."""
    match name:
        case "time":
            return Gpumux(name, logs)
        case "space":
            return Space(name, logs)
        case "equal":
            return Equal(name, logs)
        case "utility":
            return Utility(name, logs)
        case _:
            return common.mode(name, logs)


def visits(answer: dict[str, Any]) -> float:
    """The user's requests per second: one who waits longer asks less often."""
    return len(answer["latencies_ms"]) / answer["seconds"]


def alone(kinds: Sequence[str], latency: bool, seconds: float, logs: Path) -> tuple[dict[str, float], list[float]]:
    """The rate of each kind of job and of the user (`server`), and the user's latencies, each with the GPU for itself."""
    rates: dict[str, float] = {}
    with Crew(Mode("alone", logs)) as crew:
        for kind in kinds:
            arguments, order = KINDS[kind]
            crew.have({kind: (arguments, "batch")})
            rates[kind] = rate(crew.measure(seconds, {kind: order})[kind])
            common.say(f"{kind} alone: {rates[kind]:.3f}/s")
        if not latency:
            return rates, []
        crew.have({"server": SERVER})
        answer = crew.measure(seconds, {"server": requests("graph", seconds)})["server"]
        return rates | {"server": visits(answer)}, answer["latencies_ms"]


def measure(case: str, crew: Crew, seconds: float, rates: dict[str, float]) -> dict[str, float]:
    """One cell."""
    jobs = {f"{kind}-{number + 1}": kind for number, kind in enumerate(CASES[case])}
    wanted = {name: (KINDS[kind][0], "batch") for name, kind in jobs.items()}
    orders = {name: KINDS[kind][1] for name, kind in jobs.items()}
    if case.endswith("+latency"):
        wanted["server"] = SERVER
        orders["server"] = requests("graph", seconds)
    if isinstance(crew.mode, Equal):
        crew.close(*jobs)
        crew.mode.part = 1 / len(jobs)
    crew.have(wanted)
    if isinstance(crew.mode, Utility):
        # Shares are set when a process starts: now everybody is known.
        for name in jobs:
            crew.close(name)
            crew.have(wanted)
        placements = {tenant["name"]: tenant["placement"] for tenant in crew.mode.tenants_now()}
        percents = {name: it.get("sm_percent") for name, it in placements.items()}
        common.say(f"percentages of the SMs: {percents}")
        unknown = [name for name in jobs if placements[crew.mode.tenants[name]].get("curve") != "measured"]
        if unknown:
            raise BenchError(f"the daemon has no curve of {', '.join(unknown)}")
    answers = crew.measure(seconds, orders)
    shares = {name: rate(answers[name]) / rates[kind] for name, kind in jobs.items()}
    common.say("rate of each job over its rate alone: " + ", ".join(f"{it:.3f}" for it in shares.values()))
    total = sum(shares.values())
    values = {"throughput_rel": total, "batch_rel": total, "least_rel": min(shares.values())}
    if user := answers.get("server"):
        values["throughput_rel"] += visits(user) / rates["server"]
        values |= common.latency_values(user["latencies_ms"])
    return values


def explain_failure(name: str, logs: Path) -> None:
    """Shows the ends of the logs of a mode, on stderr."""
    for log in sorted(logs.glob(f"*{name}*")):
        if text := common.tail(log, lines=6):
            common.say(f"{log.name}:\n    {text}")


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "PyTorch jobs that share one GPU in time and in space: total throughput and the latency of a user outside.",
        "  GPUMUX=target/release/gpumux python3 bench/space.py\n"
        "  python3 bench/space.py --cases train+train+latency --modes alone,mps,space --seconds 8     (about 150 s)\n"
        "  python3 bench/space.py --cases inference+train --modes alone,mps,space,utility --seconds 8     (about 7 min)",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one cell [%(default)s]")
    parser.add_argument("--cases", type=common.listed(list(CASES)), default=DEFAULT_CASES)
    parser.add_argument("--modes", type=common.listed(MODES), default=DEFAULT_MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    results = Results("space", options.out, list(CASES), MODES)

    # Everything is relative to the rates alone, so they are measured in any case.
    kinds = list(dict.fromkeys(kind for case in options.cases for kind in CASES[case]))
    latency = any(case.endswith("+latency") for case in options.cases)
    rates, latencies = alone(kinds, latency, seconds, logs)
    for case in options.cases:
        if "alone" in options.modes:
            values = {"throughput_rel": 1.0}
            if case.endswith("+latency"):
                values |= common.latency_values(latencies)
            results.add(case, "alone", values)
    for name in [it for it in MODES if it in options.modes and it != "alone"]:
        before = len(results.failed)
        with results.cell(name), mode(name, logs) as entered, Crew(entered) as crew:
            if isinstance(entered, Utility):
                for kind in kinds:
                    entered.profile(kind, min(seconds, 4.0))
            for case in options.cases:
                with results.cell(f"{case} / {name}"):
                    results.add(case, name, measure(case, crew, seconds, rates))
        if len(results.failed) > before:
            explain_failure(name, logs)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
