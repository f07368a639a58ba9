"""Two programs on one GPU: ResNet-50 inference (batch 1, fp16) beside ResNet-152 training (batch 128, bf16).

Cases: `graph+train` (requests as one CUDA graph), `eager+train`, `graph+2train` (two training jobs): a user who pauses for 5 to
20 ms; `graph30+train`: one who pauses for 20 to 40. Each request takes the GPU from training for its own time and two switches.
Modes: `alone`, `time-slicing` (the driver's default), `mps`, `gpumux` (the server's class is latency, the jobs' batch).
In mode alone, batch_rate is that of one job alone; elsewhere it is the sum over the jobs.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import common
from common import Crew, Results

CASES = {"graph+train": 1, "eager+train": 1, "graph+2train": 2, "graph30+train": 1}
MODES = ["alone", "time-slicing", "mps", "gpumux"]
SERVER = (["serve", "--model", "resnet50"], "latency")
TRAINING = (["train", "--model", "resnet152"], "batch")
STEPS = {"op": "steps"}
# Time alone is measured before and between the other modes, so that drift shows up in it as well.
ALONE_PARTS = 4
PAUSES_S = {"graph": (0.005, 0.020), "eager": (0.005, 0.020), "graph30": (0.020, 0.040)}


def requests(case: str, seconds: float, seed: int = 1) -> dict[str, Any]:
    """The order for a server: one user of an interactive service, who pauses between requests."""
    user = case.partition("+")[0]
    pauses = common.pauses(*PAUSES_S[user], seconds, seed)
    return {"op": "visits", "kind": user.rstrip("0123456789"), "pauses": pauses}


def rate(answer: dict[str, Any]) -> float:
    """Steps per second."""
    return answer["calls"] / answer["seconds"]


class Alone:
    """The server alone, measured in parts over the whole run by a process that is idle in between."""

    def __init__(self, seconds: float, cases: list[str], crew: Crew) -> None:
        self.seconds, self.crew, self.parts = seconds / ALONE_PARTS, crew, 0
        self.ms: dict[str, list[float]] = {case.partition("+")[0]: [] for case in cases}
        self.rates: list[float] = []

    def measure(self) -> None:
        """One part, while nothing else has work."""
        self.parts += 1
        if self.parts in (1, ALONE_PARTS):  # in between the job would hold memory that others need
            self.crew.have({"training-1": TRAINING, "server": SERVER})
            self.rates.append(rate(self.crew.measure(2 * self.seconds, {"training-1": STEPS})["training-1"]))
        self.crew.have({"server": SERVER})
        for kind, ms in self.ms.items():
            order = requests(kind, self.seconds, seed=100 + self.parts)
            ms += self.crew.measure(self.seconds, {"server": order})["server"]["latencies_ms"]

    def rows(self, results: Results, cases: list[str]) -> None:
        """Writes the rows of mode alone with all that was measured so far."""
        for case in cases:
            if ms := self.ms[case.partition("+")[0]]:
                rates = {"batch_rate": statistics.fmean(self.rates), "requests_per_s": len(ms) / self.seconds / self.parts}
                results.add(case, "alone", common.latency_values(ms) | rates)


def measure(case: str, crew: Crew, seconds: float) -> dict[str, float]:
    """One cell."""
    jobs = [f"training-{number + 1}" for number in range(CASES[case])]
    crew.have({"server": SERVER} | dict.fromkeys(jobs, TRAINING))
    answers = crew.measure(seconds, {"server": requests(case, seconds)} | dict.fromkeys(jobs, STEPS))
    rates = [rate(answers[job]) for job in jobs]
    for job in jobs:
        steps = answers[job]["steps_ms"]
        median, longest = statistics.median(steps), max(steps)
        common.say(f"{job}: {rate(answers[job]):.3f} steps/s, of {median:.1f} ms in the middle and {longest:.1f} ms at most")
    latencies = answers["server"]["latencies_ms"]
    both = {"batch_rate": sum(rates), "requests_per_s": len(latencies) / seconds}
    return common.latency_values(latencies) | both


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "PyTorch inference beside PyTorch training: latency and training rate by mode of sharing.",
        "  GPUMUX=target/release/gpumux python3 bench/colocation.py\n"
        "  python3 bench/colocation.py --modes alone,gpumux --cases graph+train --seconds 20",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one cell [%(default)s]")
    parser.add_argument("--cases", type=common.listed(list(CASES)), default=list(CASES))
    parser.add_argument("--modes", type=common.listed(MODES), default=MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    # Most jobs first: they start together, and the others leave.
    cases = sorted(options.cases, key=lambda case: -CASES[case])
    results = Results("colocation", options.out, list(CASES), MODES)

    with Crew(common.Mode("alone", logs)) as idle:
        alone = Alone(seconds, options.cases, idle)

        def measure_alone() -> None:
            if "alone" in options.modes:
                with results.cell("alone"):
                    alone.measure()
                    alone.rows(results, options.cases)

        measure_alone()
        for name in [mode for mode in MODES if mode in options.modes and mode != "alone"]:
            with results.cell(name), common.mode(name, logs) as mode, Crew(mode) as crew:
                for case in cases:
                    with results.cell(f"{case} / {name}"):
                        results.add(case, name, measure(case, crew, seconds))
            measure_alone()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
