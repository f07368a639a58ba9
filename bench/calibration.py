"""What the simulator predicts beside what the benchmarks measured: the table in docs/simulator.md.

Runs `gpumux sim` on scenarios that have the shape of a benchmark's case, and reads the committed results. Needs no GPU.
Latencies of real programs are compared relative to the same program alone: a simulator does not predict how fast a model is.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import common
import plot

PAGE = common.BENCH.parent / "docs" / "simulator.md"
SCENARIOS = common.BENCH.parent / "scenarios"
BEGIN, END = "<!-- calibration:begin -->", "<!-- calibration:end -->"
# The call of each benchmark on one H100 that held all modes.
CALLS = {"kernels": "6a20827", "hints": "d1a963b", "shares": "06a322d", "colocation": "85f1a9c", "space": "28bb0ff"}
FAR = 0.10  # a difference beyond it is marked, and explained in the page


class Side:
    """One mode of a scenario, or of a benchmark's case."""

    def __init__(self, modes: dict[str, Any]) -> None:
        self.modes = modes

    def latency(self, mode: str, quantile: str) -> float:
        """A quantile of the first tenant's latency in µs."""
        raise NotImplementedError

    def added(self, mode: str, quantile: str) -> float:
        """What a mode adds to it."""
        return self.latency(mode, quantile) - self.latency("alone", quantile)

    def slower(self, mode: str, quantile: str) -> float:
        """How many times as long it takes as alone."""
        return self.latency(mode, quantile) / self.latency("alone", quantile)


class Predicted(Side):
    """A scenario's report."""

    def latency(self, mode: str, quantile: str) -> float:
        return self.modes[mode]["tenants"][0]["latency"][f"{quantile}_ms"] * 1e3

    def rates(self, mode: str, first: int) -> list[float]:
        """Rates from a tenant on, relative to its rate alone on a device."""
        alone = self.modes.get("alone", {}).get("tenants")
        tenants = self.modes[mode]["tenants"][first:]
        return [
            tenant["rate"] / alone[first + at]["rate"] if alone else tenant["received"]
            for at, tenant in enumerate(tenants)
        ]

    def total(self, mode: str, first: int) -> float:
        """Work of all tenants from one on, relative to one alone."""
        return sum(self.rates(mode, first))

    def share(self, mode: str) -> float:
        """The first tenant's part of the work."""
        rates = self.rates(mode, 0)
        return rates[0] / sum(rates)


class Measured(Side):
    """Rows of a results file."""

    def latency(self, mode: str, quantile: str) -> float:
        values = self.modes[mode]
        microseconds = values.get(f"latency_{quantile}_us")
        return values[f"latency_{quantile}_ms"] * 1e3 if microseconds is None else microseconds

    def total(self, mode: str) -> float:
        """Work of all, relative to one alone."""
        values = self.modes[mode]
        for name in ("total_rel", "batch_rel"):
            if name in values:
                return values[name]
        return values["batch_rate"] / self.modes["alone"]["batch_rate"]


class Row(NamedTuple):
    """One line of the table."""

    scenario: str
    bench: str
    case: str
    what: str
    unit: str
    predicted: Callable[[Predicted], float]
    measured: Callable[[Measured], float]


def latencies(scenario: str, bench: str, case: str, modes: dict[str, str], relative: bool = False) -> Iterator[Row]:
    """p50 and p99 in some modes of the simulator (and what the benchmark calls them)."""
    value, label, unit = ("slower", " ÷ alone", "") if relative else ("latency", "", "µs")
    for mode, theirs in modes.items():
        for quantile in ("p50", "p99"):
            yield Row(
                scenario, bench, case, f"{mode}: {quantile}{label}", unit,
                lambda it, m=mode, q=quantile: getattr(it, value)(m, q),
                lambda it, m=theirs, q=quantile: getattr(it, value)(m, q),
            )  # fmt: skip


def total(scenario: str, bench: str, case: str, mode: str, first: int, theirs: str = "") -> Row:
    """Work of all tenants from one on."""
    return Row(
        scenario, bench, case, f"{mode}: work of one alone", "",
        lambda it: it.total(mode, first),
        lambda it: it.total(theirs or mode),
    )  # fmt: skip


def share(scenario: str, case: str) -> Row:
    """The first tenant's share."""
    return Row(
        scenario, "shares", case, "gpumux: share of the first", "",
        lambda it: it.share("gpumux"),
        lambda it: it.modes["gpumux"]["share_1"],
    )  # fmt: skip


ROWS = [
    *latencies("preempt", "kernels", "10ms", {"time-slicing": "time-slicing", "fixed": "fixed", "gpumux": "gpumux"}),
    Row(
        "preempt-hint", "hints", "10ms/prep200", "gpumux: added p50", "µs",
        lambda it: it.added("gpumux", "p50"), lambda it: it.modes["manual"]["added_p50_us"],
    ),
    total("shares-70-30", "shares", "2batch", "time-slicing", 0),
    total("shares-70-30", "shares", "70/30", "gpumux", 0),
    share("shares-70-30", "70/30"),
    total("shares-50-25-25", "shares", "50/25/25", "gpumux", 0),
    share("shares-50-25-25", "50/25/25"),
    total("rotation-2", "shares", "2batch", "gpumux", 1),
    total("rotation-3", "shares", "3batch", "gpumux", 1),
    total("rotation-4", "shares", "4batch", "gpumux", 1),
    *latencies("latency+4batch", "shares", "latency+4batch", {"gpumux": "gpumux"}),
    total("latency+4batch", "shares", "latency+4batch", "gpumux", 1),
    total("saturating", "shares", "saturating", "gpumux", 0),
    share("saturating", "saturating"),
    *latencies("graph+train", "colocation", "graph+train", {"time-slicing": "time-slicing", "gpumux": "gpumux"}, True),
    total("graph+train", "colocation", "graph+train", "time-slicing", 1),
    total("graph+train", "colocation", "graph+train", "gpumux", 1),
    *latencies("graph+2train", "colocation", "graph+2train", {"time-slicing": "time-slicing", "gpumux": "gpumux"}, True),
    total("graph+2train", "colocation", "graph+2train", "gpumux", 1),
    *latencies("graph+2train-group", "space", "train+train+latency", {"space": "space"}, True),
    total("graph+2train-group", "space", "train+train+latency", "space", 1),
]  # fmt: skip


@functools.cache
def predictions(scenario: str) -> Predicted:
    """Runs a scenario."""
    command = [common.gpumux(), "sim", str(SCENARIOS / f"{scenario}.toml"), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
    return Predicted({mode["mode"]: mode for mode in report["modes"]})


def measurements(results: dict[str, Any], case: str) -> Measured:
    """The rows of a case."""
    return Measured({row["mode"]: row["values"] for row in results["rows"] if row["case"] == case})


@functools.cache
def results(folder: Path, bench: str) -> dict[str, Any]:
    """The results file of a benchmark."""
    return json.loads((folder / f"{bench}-h100-80gb-hbm3-{CALLS[bench]}.json").read_text())


def shown(value: float, unit: str) -> str:
    """A value as the table shows it."""
    return f"{round(value) + 0} {unit}" if unit else f"{value:.3f}"


def table(folder: Path) -> tuple[str, int, int]:
    """The table, how many of its lines are far off, and how many there are."""
    lines = ["| scenario | benchmark | value | measured | predicted | difference |", "|---|---|---|---|---|---|"]
    far = 0
    for row in ROWS:
        found = row.measured(measurements(results(folder, row.bench), row.case))
        guess = row.predicted(predictions(row.scenario))
        # Of something near nothing, a part says nothing: 10 µs are a twentieth of a switch.
        close = row.unit == "µs" and abs(guess - found) <= 10
        off = round(guess / found - 1, 2) if not close else 0.0
        mark = f"{off:+.0%}" if not close else "within 10 µs"
        if abs(off) > FAR:
            far += 1
            mark = f"**{mark}**"
        lines.append(
            f"| `{row.scenario}` | `{row.bench}` {row.case} | {row.what} | {shown(found, row.unit)}"
            f" | {shown(guess, row.unit)} | {mark} |"
        )
    files = {row.bench: results(folder, row.bench) for row in ROWS}
    sources = ", ".join(f"`{name}` {file['commit']}" for name, file in files.items())
    device = files[ROWS[0].bench]
    lines.append(f"\nMeasured on one {device['device']}, driver {device['driver']}, at the commits {sources}.")
    return "\n".join(lines), far, len(ROWS)


def main() -> int:
    """Writes the table."""
    parser = argparse.ArgumentParser(
        description="Predictions of `gpumux sim` beside measurements, into docs/simulator.md.",
        epilog="examples:\n  GPUMUX=target/release/gpumux python3 bench/calibration.py\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, default=common.BENCH / "results", help="folder of the results files")
    parser.add_argument("--print", action="store_true", help="print the table, change nothing")
    options = parser.parse_args()
    text, far, rows = table(options.results)
    if options.print:
        print(text)
    else:
        PAGE.write_text(plot.between(PAGE, PAGE.read_text(), BEGIN, END, text + "\n"))
    print(f"{rows - far} of {rows} within {FAR:.0%}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
