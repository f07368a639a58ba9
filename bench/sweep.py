"""How long a neighbour's timeslice may be: latency programs of every shape (shapes.py) beside PyTorch training, in rounds (rounds.py).

Modes: `alone`, `time-slicing`, `gpumux` (its own choice), `no-hints` (the same without hints), and fixed timeslices of the neighbour, `1us` to `2ms`; where asked for
also `mps`, `mps-priority` and `group` (peers.py). A fixed one is what `--latency-objective` gives, at ten times its length; it is set between the cells, so that all have the same processes.

Values: `latency_*` of the program's requests, also relative to alone; `batch_rate` of training, steps per second; `latency_rate`, requests per second. In case
`changing` also by kind.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import common
import peers
import rounds
from colocation import STEPS, rate
from common import Crew, Results

CASES = ["graph", "eager", "short", "batching", "pipeline", "callback", "poller", "gpu-bound", "changing"]
TIMESLICES_US = {"1us": 1, "50us": 50, "100us": 100, "200us": 200, "500us": 500, "1ms": 1000, "2ms": 2000}
OTHERS = ["mps", "mps-priority", "group"]  # of peers.py, where asked for
MODES = ["alone", "time-slicing", *OTHERS, "gpumux", "no-hints", *TIMESLICES_US]
# A request waits for a tenth of its objective at most.
OBJECTIVE = 10
SETTINGS = peers.SETTINGS | {name: ("auto", f"{us * OBJECTIVE / 1e3:g}ms") for name, us in TIMESLICES_US.items()}
LEAD_S = 0.25


def measure(crew: Crew, case: str, mode: str, number: int, seconds: float) -> dict[str, Any]:
    """One mode in one round."""
    program = {"program": {"op": "shape", "shape": case, "seed": number}}
    answers = peers.beside(crew, mode, seconds, program, {"training": STEPS}, LEAD_S)
    found = answers["program"]
    cell = rounds.cell(found["latencies_ms"], latency_rate=len(found["latencies_ms"]) / seconds, batch_rate=rate(answers["training"]))
    return cell | ({"more_ms": found["more_ms"]} if found["more_ms"] else {})


def main() -> int:
    """Runs all rounds that were asked for, or as many as the budget allows."""
    parser = common.parser(
        "Latency programs of every shape beside training, by the timeslice that training has.",
        "  GPUMUX=target/release/gpumux python3 bench/sweep.py --quick\n"
        "  python3 bench/sweep.py --cases eager,graph --budget 500\n"
        "With --quick, one round. The exit code is 75 when the budget was spent: the same command goes on.",
    )
    rounds.arguments(parser, seconds=3.6)
    parser.add_argument("--batch", type=int, default=32, help="images in a training step [%(default)s]")
    common.selections(parser, CASES, MODES, OTHERS, modes=[it for it in MODES if it not in OTHERS])
    options = parser.parse_args()
    logs = common.begin(options)
    seconds, most, least = rounds.quick(options)
    training = (["train", "--model", "resnet152", "--batch", str(options.batch)], "batch")
    programs: peers.Programs = {"program": (["shapes"], "latency"), "training": training}
    results = Results("sweep", options.out, CASES, MODES)
    stages = peers.stages(MODES, options.modes) | {name: "gpumux" for name in TIMESLICES_US if name in options.modes}
    cell = functools.partial(measure, seconds=seconds)
    return peers.compare(results, options.cases, stages, lambda *_: programs, cell, logs, options.budget, most, least, settings=SETTINGS)


if __name__ == "__main__":
    sys.exit(main())
