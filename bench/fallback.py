"""A latency program beside training where the driver refuses the controls: `launches` beside the controls and what the driver offers, in rounds.

Cases and programs are those of `colocation.py`: `graph+train` (a request is one CUDA graph of ResNet-50) and `decode+train` (eager tokens of a
language model of GPT-2's size), beside ResNet-152 in bf16; `decode` also has clients that pause. Modes: `alone`, `time-slicing`, `mps`, `gpumux` (controls),
`launches` (the same daemon with `--mechanism launches`, which uses no control), and `xsched` (level 1, if XSCHED names its folder).

`held` is how often a launch of the training waited in a second, to show that the mechanism was in force.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import colocation
import common
import peers
import rounds
from common import Crew, Results

CASES = ["graph+train", "decode+train"]
MODES = ["alone", "time-slicing", "mps", "xsched", "gpumux", "launches"]
DEFAULT_MODES = ["alone", "time-slicing", "mps", "gpumux", "launches"]


def held(crew: Crew) -> int:
    """Launches of all tenants that waited so far."""
    if not isinstance(crew.mode, common.Gpumux):
        return 0
    return sum(domain["held_launches"] for tenant in crew.mode.tenants_now() for domain in tenant["domains"])


def measure(crew: Crew, case: str, mode: str, number: int, seconds: float) -> dict[str, Any]:
    """One mode in one round."""
    before = held(crew)
    cell = colocation.measure(crew, case, mode, number, seconds)
    cell["rates"]["held"] = (held(crew) - before) / seconds
    return cell


def main() -> int:
    """Runs all rounds that were asked for, or as many as the budget allows."""
    parser = common.parser(
        "PyTorch inference beside training, scheduled at launch instead of by the driver's controls: latency and training rate by mode.",
        "  GPUMUX=target/release/gpumux python3 bench/fallback.py --quick\n"
        "  GPUMUX=target/release/gpumux python3 bench/fallback.py --cases graph+train --budget 500\n"
        "The exit code is 75 when the budget was spent: the same command goes on.",
    )
    rounds.arguments(parser, seconds=6.0)
    parser.add_argument("--batch", type=int, default=32, help="images in a training step [%(default)s]")
    parser.add_argument("--cases", type=common.listed(CASES), default=CASES)
    parser.add_argument("--modes", type=common.listed(MODES), default=DEFAULT_MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds, most, least = rounds.quick(options)
    training = (["train", "--model", "resnet152", "--batch", str(options.batch)], "batch")
    results = Results("fallback", options.out, CASES, MODES)
    # Alone is time slicing with no other program at work.
    stages = {name: "time-slicing" if name == "alone" else name for name in MODES if name in options.modes}

    def programs(case: str, _stage: str) -> peers.Programs:
        return {"server": colocation.server(case), "training-1": training}

    cell = functools.partial(measure, seconds=seconds)
    return peers.compare(results, options.cases, stages, programs, cell, logs, options.budget, most, least)


if __name__ == "__main__":
    sys.exit(main())
