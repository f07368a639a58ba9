"""Two or three programs on one GPU: an inference server beside PyTorch training, in rounds (rounds.py), by mode of sharing (peers.py).

Cases: `graph+train` (ResNet-50, one image, fp16, a request is one CUDA graph), `eager+train` (launched kernel by kernel), `decode+train`
(eager tokens of a language model of GPT-2's size), `graph+2train` (two training jobs): a client that pauses for 5 to 20 ms; `graph30+train`: one that
pauses for 20 to 40. Training is ResNet-152 in bf16; all modes' jobs are on the GPU at once, so `--batch` is what fits.
Each request takes the GPU from training for its own time and two switches.

The server's class is latency, the jobs' batch. `batch_rate` is the sum over the jobs; alone, that of one job with nothing else at work. In `streams` and `green` server
and job are threads of one process. `gpreempt` is the arrangement of two contexts with fixed timeslices, without hints. In `launches` `held` is how often a
launch of a job waited in a second, to show that the mechanism was in force.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import common
import peers
import rounds
from common import BenchError, Crew, Results

CASES = {"graph+train": 1, "eager+train": 1, "decode+train": 1, "graph+2train": 2, "graph30+train": 1}
MODES = [it for it in peers.MODES if it != "gpumux-alone"]
DEFAULT_MODES = ["alone", "time-slicing", "mps", "mps-priority", "mps-50", "gpumux", "no-hints", "objective"]
SERVER = (["serve", "--model", "resnet50"], "latency")
STEPS = {"op": "steps"}
PAUSES_S = {"graph30": (0.020, 0.040)}


def jobs_of(case: str) -> list[str]:
    """The names of a case's training jobs."""
    return ["training", "training-2"][: CASES[case]]


def programs_of(case: str, stage: str, batch: int) -> peers.Programs:
    """The programs of a case: both in one process where a mode is one of streams."""
    server = ["serve", "--model", "decode"] if case.startswith("decode") else SERVER[0]
    training = ["--model", "resnet152", "--batch", str(batch)]
    if stage not in peers.TOGETHER:
        return {"server": (server, "latency")} | {job: (["train", *training], "batch") for job in jobs_of(case)}
    if CASES[case] > 1:
        raise BenchError("one process has one training job")
    return {"pair": (["pair", "--server", server[-1], *training, *peers.TOGETHER[stage]], "latency")}


def requests(case: str, seconds: float, seed: int = 1) -> dict[str, Any]:
    """The order for a server: one client of an interactive service, with pauses between requests."""
    user = case.partition("+")[0]
    pauses = common.pauses(*PAUSES_S.get(user, (0.005, 0.020)), seconds, seed)
    return {"op": "visits", "kind": "graph" if user.startswith("graph") else "eager", "pauses": pauses}


def rate(answer: dict[str, Any]) -> float:
    """Steps per second."""
    return answer["calls"] / answer["seconds"]


def held(crew: Crew) -> int:
    """Launches of all tenants that waited so far."""
    assert isinstance(crew.mode, common.Gpumux)
    return sum(domain["held_launches"] for tenant in crew.mode.tenants_now() for domain in tenant["domains"])


def measure(crew: Crew, case: str, mode: str, number: int, seconds: float) -> dict[str, Any]:
    """One mode in one round."""
    before = held(crew) if mode == "launches" else 0
    answers = peers.beside(crew, mode, seconds, {"server": requests(case, seconds, seed=number)}, dict.fromkeys(jobs_of(case), STEPS))
    ms = answers.pop("server")["latencies_ms"]
    others = {"held": (held(crew) - before) / seconds} if mode == "launches" else {}
    return rounds.cell(ms, latency_rate=len(ms) / seconds, batch_rate=sum(map(rate, answers.values())), **others)


def main() -> int:
    """Runs all rounds that were asked for, or as many as the budget allows."""
    parser = common.parser(
        "PyTorch inference beside PyTorch training: latency and training rate by mode of sharing.",
        "  GPUMUX=target/release/gpumux python3 bench/colocation.py --cases graph+train --budget 500\n"
        "  python3 bench/colocation.py --modes alone,gpumux --cases graph+train --rounds 5\n"
        "The exit code is 75 when the budget was spent: the same command goes on.",
    )
    rounds.arguments(parser, seconds=4.0)
    parser.add_argument("--batch", type=int, default=32, help="images in a training step [%(default)s]")
    common.selections(parser, list(CASES), MODES, peers.BY_NAME, cases=list(CASES)[:3], modes=DEFAULT_MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    results = Results("colocation", options.out, list(CASES), MODES)
    stages = peers.stages(MODES, options.modes)
    programs = functools.partial(programs_of, batch=options.batch)
    cell = functools.partial(measure, seconds=seconds)
    return peers.compare(results, options.cases, stages, programs, cell, logs, options.budget, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
