"""Language models that make tokens beside PyTorch training, in rounds (rounds.py), without a setting: by mode of sharing (peers.py).

Cases (generate.py): `eager` (Hugging Face's `generate`, launched kernel by kernel), `batching` (its continuous batching, eight clients), `graph` (a CUDA graph a token).
All make tokens without a pause. Modes: `alone`, `time-slicing`, `mps`, `gpumux`; `objective`, with `--latency-objective 100`, for comparison.

Values: `latency_*` (time per token: from one token of a sequence to its next), `token_rate` (tokens per second, of all sequences), `batch_rate` (training steps per
second).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import common
import peers
import rounds
from common import Crew, Results

CASES = ["eager", "batching", "graph"]
MODES = ["alone", "time-slicing", "mps", "gpumux", "objective"]
STEPS = {"op": "steps"}
# An engine for batches is made by the first order.
LEAD_S = {"batching": 4.0}


def measure(crew: Crew, case: str, mode: str, number: int, seconds: float) -> dict[str, Any]:
    """One mode in one round."""
    tokens = {"server": {"op": "tokens", "kind": case, "seed": number}}
    lead = LEAD_S.get(case, 0.5)
    if mode == "alone":
        answers = crew.measure(seconds, tokens, lead) | crew.measure(seconds / 2, {"training": STEPS})
    else:
        answers = crew.measure(seconds, tokens | {"training": STEPS}, lead)
    server, training = answers["server"], answers["training"]
    return rounds.cell(server["latencies_ms"], token_rate=server["calls"] / seconds, batch_rate=training["calls"] / training["seconds"])


def main() -> int:
    """Runs all rounds that were asked for, or as many as the budget allows."""
    parser = common.parser(
        "Decoding with Hugging Face transformers beside PyTorch training, by mode of sharing.",
        "  GPUMUX=target/release/gpumux python3 bench/decode.py --quick\n"
        "  python3 bench/decode.py --cases eager --modes alone,gpumux --budget 300\n"
        "With --quick, one round. The exit code is 75 when the budget was spent: the same command goes on.",
    )
    rounds.arguments(parser, seconds=8.0)
    parser.add_argument("--batch", type=int, default=32, help="images in a training step [%(default)s]")
    parser.add_argument("--cases", type=common.listed(CASES), default=CASES)
    parser.add_argument("--modes", type=common.listed(MODES), default=MODES[:4])
    options = parser.parse_args()
    logs = common.begin(options)
    seconds, most, least = rounds.quick(options)
    training = (["train", "--model", "resnet152", "--batch", str(options.batch)], "batch")
    programs: peers.Programs = {"server": (["generate"], "latency"), "training": training}
    results = Results("decode", options.out, CASES, MODES)
    stages = {name: "time-slicing" if name == "alone" else name for name in MODES if name in options.modes}
    cell = functools.partial(measure, seconds=seconds)
    return peers.compare(results, options.cases, stages, lambda _: programs, cell, logs, options.budget, most, least)


if __name__ == "__main__":
    sys.exit(main())
