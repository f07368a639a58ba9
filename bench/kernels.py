"""Preemption by length of the kernel that has to give way: 10 µs to 100 ms, and a captured graph (XSched's test).

A periodic latency task (10 kernels of 10 µs every 5 ms) beside a batch task that fills the GPU. Case `graph` is a batch
task that replays graphs of 100 kernels of 100 µs. Values: `latency_p50_us`, `latency_p99_us`, `latency_p999_us`,
`batch_rate` (kernels or graphs per second).
"""

from __future__ import annotations

import sys

import common
import shares
from common import Results
from shares import Program

MODES = ["alone", "time-slicing", "mps", "fixed", "gpumux"]
KERNELS_US = {"10us": 10, "100us": 100, "1ms": 1_000, "10ms": 10_000, "100ms": 100_000}
CASES = [*KERNELS_US, "graph"]
GRAPH = ["latency", "--graph", "--kernels", "100", "--kernel-us", "100", "--period-us", "1"]


def batch(case: str) -> list[str]:
    """The batch task of a case."""
    return GRAPH if case == "graph" else ["batch", "--kernel-us", str(KERNELS_US[case]), "--in-flight", "4"]


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "Latency of a small task beside batch kernels of 10 µs to 100 ms, by mode of sharing.",
        "  GPUMUX=target/release/gpumux python3 bench/kernels.py\n"
        "  python3 bench/kernels.py --cases 10ms --modes alone,gpumux",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one cell [%(default)s]")
    common.selections(parser, CASES, MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    results = Results("kernels", options.out, CASES, MODES)
    for name in options.modes:
        with results.cell(name), common.mode(name, logs) as mode:
            for case in options.cases:
                with results.cell(f"{case} / {name}"):
                    loops = [(Program("latency"), shares.PERIODIC, seconds), (Program("batch"), batch(case), seconds)]
                    reports, _ = shares.at_once(mode, loops[:1] if name == "alone" else loops)
                    quantiles = ("p50", "p99", "p999")
                    values = {f"latency_{it}_us": reports[0][f"{it}_us"] for it in quantiles}
                    if name != "alone":
                        values["batch_rate"] = reports[1]["rate"]
                    results.add(case, name, values)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
