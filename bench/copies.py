"""Copies between host and device by two programs: what shares do to bytes per second.

Each program copies pinned memory all the time, with a few copies queued ahead. Cases are a division and a way: `70/30` (guarantees of 0.7 and 0.3), `equal`
(none), `idle` (the first, guaranteed 0.7, is idle); `in` (to the device), `out` (to the host), `both` (both at the same time).
Modes: `alone` (the second program without gpumux, the first idle), `time-slicing` (both without gpumux), `gpumux`.

Values: `one_gbps`, `two_gbps`, `total_gbps` (of all ways), `share_one`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import common
import peers
import rounds
from common import BenchError, Crew, Gpumux, Results

WORKER = Path(__file__).resolve().parent / "copies_worker.py"
GUARANTEES = {"70/30": (0.7, 0.3), "equal": (0.0, 0.0), "idle": (0.7, 0.0)}
WAYS = ("in", "out", "both")
CASES = [f"{division} {way}" for division in GUARANTEES for way in WAYS]
MODES = ["alone", "time-slicing", "gpumux"]
NAMES = ("one", "two")
# Copies before the time that counts: limits need some seconds.
LEAD_S = 5.0


def guarantee(mode: Gpumux, division: str) -> None:
    """Gives the tenants that run their guarantees; none first, since both may not exceed the device."""
    for values in ((0.0, 0.0), GUARANTEES[division]):
        for name, value in zip(NAMES, values, strict=True):
            mode.set(name, "--guaranteed", str(value))


def orders(case: str, mode: str) -> dict[str, dict[str, Any]]:
    """Which programs copy, and which way."""
    division, way = case.split()
    copying = NAMES[1:] if mode == "alone" or division == "idle" else NAMES
    return {name: {"way": way} for name in copying}


def values(answers: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of one cell, in GB/s."""
    rates = {name: answers[name]["bytes"] / answers[name]["seconds"] / 1e9 if name in answers else 0.0 for name in NAMES}
    total = sum(rates.values())
    if not total:
        raise BenchError("nothing was copied")
    return {f"{name}_gbps": rate for name, rate in rates.items()} | {"total_gbps": total, "share_one": rates["one"] / total}


def main() -> int:
    """Measures rounds of all cases that were asked for."""
    parser = common.parser(
        "Two programs that copy between host and device: bytes per second by shares.",
        "  GPUMUX=.bundle/bin/gpumux python3 bench/copies.py --rounds 5 --budget 240\n"
        "  gpumux emu --profile FILE -- python3 bench/copies.py --piece 1048576 --cases '70/30 in' --rounds 1",
    )
    common.selections(parser, CASES, MODES)
    parser.add_argument("--piece", type=int, default=64 << 20, help="bytes of a copy [%(default)s]")
    rounds.arguments(parser, seconds=3.0)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds, most, least = rounds.quick(options)
    results = Results("copies", options.out, CASES, MODES)
    programs: peers.Programs = {name: ([str(options.piece)], "standard") for name in NAMES}

    def measure(crew: Crew, case: str, mode: str, _round: int) -> dict[str, Any]:
        if isinstance(crew.mode, Gpumux):
            guarantee(crew.mode, case.split()[0])
        return rounds.cell(**values(crew.measure(seconds, orders(case, mode), LEAD_S)))

    stages = peers.stages(options.modes, options.modes)
    worker = (sys.executable, str(WORKER))
    return peers.compare(results, options.cases, stages, lambda *_: programs, measure, logs, options.budget, most, least, program=worker, placed=False)


if __name__ == "__main__":
    sys.exit(main())
