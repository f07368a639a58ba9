"""Utility curves: what programs make of a part of the SMs, each alone in a group (the vision paper's Fig. 2).

Cases are programs: `train` (ResNet-152), `vit` (ViT-L training), `inference` (ResNet-50, requests back to back, kernel by
kernel), `graph` (the same by CUDA graphs), `decode` and `tokens` (a language model's tokens, kernel by kernel and by CUDA graphs).
Modes are percentages of the SMs. Value: `relative`, the throughput relative to that with all SMs, as `gpumux profile` measures it.
"""

from __future__ import annotations

import sys

import common
import space
from common import Results

CASES = ["train", "vit", "inference", "graph", "decode", "tokens"]
MODES = [f"{percent}%" for percent in space.PERCENTAGES]


def main() -> int:
    """Measures the curves that were asked for."""
    parser = common.parser("Utility curves of programs.", "  GPUMUX=target/release/gpumux python3 bench/curves.py --cases train,decode")
    parser.add_argument("--cases", type=common.listed(CASES), default=CASES)
    parser.add_argument("--seconds", type=float, default=4.0, help="of measurement at a point [%(default)s]")
    options = parser.parse_args()
    logs = common.begin(options)
    results = Results("curves", options.out, CASES, MODES)
    with space.Utility("curves", logs) as mode:
        for case in options.cases:
            with results.cell(case):
                for percent, relative in mode.profile(case, options.seconds / (4 if options.quick else 1)).items():
                    results.add(case, f"{percent}%", {"relative": relative})
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
