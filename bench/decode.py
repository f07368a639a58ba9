"""Language models that make tokens beside PyTorch training, in rounds (rounds.py), without a setting: by mode of sharing (peers.py).

Cases (generate.py): `eager` (Hugging Face's `generate`, launched kernel by kernel), `batching` (its continuous batching, eight clients), `graph` (a CUDA graph a token).
All make tokens without a pause. Modes are those of peers.py. In `streams` and `green` both programs are threads of one process (they share Python's lock, too), for `eager`
only: the other ways make their streams themselves. `gpumux-alone` is as `alone`, with the programs of `gpumux`. `gpreempt` is the arrangement of two contexts with fixed timeslices, without hints. All modes' programs
are on the GPU at once: about 9 GiB a mode with `--batch 32`, 6.5 with 16.

Values: `latency_*` (time per token: from one token of a sequence to its next), `token_rate` (tokens per second, of all sequences), `batch_rate` (training steps per
second).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import common
import peers
import rounds
from colocation import STEPS, rate
from common import BenchError, Crew, Results

CASES = ["eager", "batching", "graph"]
MODES = peers.MODES
DEFAULT_MODES = ["alone", "time-slicing", "mps", "gpumux", "gpumux-alone"]
# An engine for batches is made by the first order.
LEAD_S = {"batching": 4.0}


def measure(crew: Crew, case: str, mode: str, number: int, seconds: float) -> dict[str, Any]:
    """One mode in one round."""
    tokens = {"server": {"op": "tokens", "kind": case, "seed": number}}
    answers = peers.beside(crew, mode, seconds, tokens, {"training": STEPS}, LEAD_S.get(case, 0.5))
    server, training = answers["server"], answers["training"]
    return rounds.cell(server["latencies_ms"], token_rate=server["calls"] / seconds, batch_rate=rate(training))


def programs_of(case: str, stage: str, kinds: Sequence[str], batch: int) -> peers.Programs:
    """The programs of a case: both in one process where a mode is one of streams."""
    training = ["--model", "resnet152", "--batch", str(batch)]
    if stage not in peers.TOGETHER:
        return {"server": (["generate", "--kinds", ",".join(kinds)], "latency"), "training": (["train", *training], "batch")}
    if case != "eager":
        raise BenchError(f"{case} makes its streams itself: none of them has a priority")
    return {"pair": (["pair", *training, *peers.TOGETHER[stage]], "latency")}


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
    common.selections(parser, CASES, MODES, peers.BY_NAME, modes=DEFAULT_MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds, most, least = rounds.quick(options)
    results = Results("decode", options.out, CASES, MODES)
    stages = peers.stages(MODES, options.modes)
    cell = functools.partial(measure, seconds=seconds)
    programs = functools.partial(programs_of, kinds=options.cases, batch=options.batch)
    return peers.compare(results, options.cases, stages, programs, cell, logs, options.budget, most, least)


if __name__ == "__main__":
    sys.exit(main())
