"""Two or three programs on one GPU: an inference server beside PyTorch training, in rounds (rounds.py), by mode of sharing (peers.py).

Cases: `graph+train` (ResNet-50, one image, fp16, a request is one CUDA graph), `eager+train` (launched kernel by kernel), `decode+train`
(eager tokens of a language model of GPT-2's size), `graph+2train` (two training jobs): a client that pauses for 5 to 20 ms; `graph30+train`: one that
pauses for 20 to 40. Training is ResNet-152 in bf16; all modes' jobs are on the GPU at once, so `--batch` is what fits.
Each request takes the GPU from training for its own time and two switches.

The server's class is latency, the jobs' batch. `batch_rate` is the sum over the jobs; alone, that of one job with nothing else at work.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import common
import peers
import rounds
from common import Crew, Results

CASES = {"graph+train": 1, "eager+train": 1, "decode+train": 1, "graph+2train": 2, "graph30+train": 1}
MODES = [
    "alone", "time-slicing", "slices-short", "slices-long", "mps", "mps-priority", "mps-30", "mps-50", "mps-70", "xsched",
    "gpumux", "no-hints", "objective",
]  # fmt: skip
DEFAULT_MODES = ["alone", "time-slicing", "mps", "mps-priority", "mps-50", "gpumux", "no-hints", "objective"]
SERVER = (["serve", "--model", "resnet50"], "latency")
STEPS = {"op": "steps"}
PAUSES_S = {"graph30": (0.020, 0.040)}


def server(case: str) -> tuple[list[str], str]:
    """Arguments and class of a case's server."""
    return (["serve", "--model", "decode"], "latency") if case.startswith("decode") else SERVER


def requests(case: str, seconds: float, seed: int = 1) -> dict[str, Any]:
    """The order for a server: one client of an interactive service, with pauses between requests."""
    user = case.partition("+")[0]
    pauses = common.pauses(*PAUSES_S.get(user, (0.005, 0.020)), seconds, seed)
    return {"op": "visits", "kind": "graph" if user.startswith("graph") else "eager", "pauses": pauses}


def rate(answer: dict[str, Any]) -> float:
    """Steps per second."""
    return answer["calls"] / answer["seconds"]


def measure(crew: Crew, case: str, mode: str, number: int, seconds: float) -> dict[str, Any]:
    """One mode in one round."""
    jobs = [f"training-{at + 1}" for at in range(CASES[case])]
    visit = {"server": requests(case, seconds, seed=number)}
    if mode == "alone":
        answers = crew.measure(seconds, visit) | crew.measure(seconds / 2, {jobs[0]: STEPS})
        jobs = jobs[:1]
    else:
        answers = crew.measure(seconds, visit | dict.fromkeys(jobs, STEPS))
    ms = answers["server"]["latencies_ms"]
    return rounds.cell(ms, latency_rate=len(ms) / seconds, batch_rate=sum(rate(answers[job]) for job in jobs))


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
    parser.add_argument("--cases", type=common.listed(list(CASES)), default=list(CASES)[:3])
    parser.add_argument("--modes", type=common.listed(MODES), default=DEFAULT_MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    training = (["train", "--model", "resnet152", "--batch", str(options.batch)], "batch")
    results = Results("colocation", options.out, list(CASES), MODES)
    # Alone is time slicing with no other program at work.
    stages = {name: "time-slicing" if name == "alone" else name for name in MODES if name in options.modes}

    def programs(case: str, _stage: str) -> peers.Programs:
        return {"server": server(case)} | {f"training-{at + 1}": training for at in range(CASES[case])}

    cell = functools.partial(measure, seconds=seconds)
    return peers.compare(results, options.cases, stages, programs, cell, logs, options.budget, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
