"""One driver for benchmarks that compare modes of sharing: cases × modes × seeds, in rounds that can be resumed.

A *round* of a case measures once, with the same arrivals, `alone` and every mode that needs more rounds; its number is the seed, and each round
begins with another mode. A *cell* is a mode of a case. Rounds are kept as they are measured (`NAME.rounds.jsonl`), so a call that ends goes on where it was.

Rules, fixed here before anything is measured:
- *Rejected* is a round on a disturbed host: the pieces of a spinning thread before one of its cells had a slowest percent, relative to their
  median, of more than NOISE times what is usual in the case's rounds (the lower median; two threads of a core alone make 2, in every round), or its `alone` has a
  median that is further than DRIFT from that of the case's rounds, unless each plays another part of a trace. A round with a failed cell is incomplete: it does not count, and tells nothing of what is usual. No other
  value decides. Fewer than LEAST rounds are shown as they are, with the host's noise and without intervals.
- *A cell ends* after LEAST rounds that count, as soon as the 95% interval of its primary value (`width`) is no wider than WIDTH of that value; or after MOST. Each
  row tells which it was: `ended` is `interval`, `rounds` (the most were made), or `budget` (the call's time was over). Where rounds play parts of a trace,
  all cells of a case go on until the last one ends. Rounds that are rejected are made again, until there are twice as many as MOST.
- *Primary* is p99 relative to alone in the same rounds. Where too few requests lie beyond p99 it is the median, relative to alone, and without requests the
  cell's first rate. (Looking again and again makes intervals a little too narrow.)
- *Intervals* are 95% by bootstrap over rounds, not over requests: requests of a round are not independent.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import common
from common import BenchError, Results, say

NOISE, DRIFT = 1.5, 0.15
LEAST, MOST, WIDTH = 5, 40, 0.10
RESAMPLES = 200
PRIMARY = ("latency_p99_rel", "latency_p50_rel", "latency_mean_rel")  # the first of them that a cell has decides when it ends
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
# A quantile is shown when so many requests lie beyond it.
BEYOND = 3

# The exit code of a call whose budget was spent.
UNFINISHED = 75

Round = dict[str, Any]


def cell(latencies_ms: Iterable[float] = (), **rates: float) -> dict[str, Any]:
    """What one mode gave in one round: latencies of all requests, and rates by name (`batch_rate`). `more_ms` may hold further times by
    name, and `series` values by second, of which each round has others."""
    return {"latencies_ms": [float(f"{it:.5g}") for it in latencies_ms], "rates": {k: float(f"{v:.6g}") for k, v in rates.items()}}


# --- statistics ---------------------------------------------------------------------------------


class Pool:
    """The latencies of several rounds, sorted once, of which rounds can be drawn again and again."""

    def __init__(self, rounds: Sequence[Sequence[float]]) -> None:
        self.counts = [len(one) for one in rounds]
        self.sums = [math.fsum(one) for one in rounds]
        self.falling = sorted(((value, at) for at, one in enumerate(rounds) for value in one), reverse=True)

    def quantile(self, times: Sequence[int], q: float) -> float:
        """The smallest value that at least a part `q` of all does not exceed, with each round taken so many times."""
        total = sum(count * weight for count, weight in zip(self.counts, times))
        above = total - max(1, math.ceil(q * total))
        for value, at in self.falling:
            above -= times[at]
            if above < 0:
                return value
        raise BenchError("no values were measured")

    def mean(self, times: Sequence[int]) -> float:
        """Of all values."""
        return sum(map(lambda it, n: it * n, self.sums, times)) / sum(map(lambda it, n: it * n, self.counts, times))


def draws(rounds: int, seed: int = 1) -> list[list[int]]:
    """How often each round is taken in each of the bootstrap's resamples."""
    rng, found = random.Random(seed), []
    for _ in range(RESAMPLES):
        times = [0] * rounds
        for at in rng.choices(range(rounds), k=rounds):
            times[at] += 1
        found.append(times)
    return found


def interval(statistic: Callable[[Sequence[int]], float], rounds: int) -> list[float]:
    """The 95% interval of a statistic of weighted rounds."""
    return between([statistic(times) for times in draws(rounds)])


def between(drawn: Sequence[float]) -> list[float]:
    """The 95% interval of a statistic by its values for all `draws`."""
    found = sorted(drawn)
    return [found[int(0.025 * len(found))], found[int(0.975 * len(found)) - 1]]


def statistics_of(cells: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> dict[str, Callable[[Sequence[int]], float]]:
    """The values of a row, as functions of how often each round is taken; `_rel` ones are relative to alone in the same rounds."""
    found: dict[str, Callable[[Sequence[int]], float]] = {}
    times_of = lambda it: {"latency": it["latencies_ms"], **it.get("more_ms", {})}  # noqa: E731
    for kind in times_of(cells[0]):
        mine, theirs = ([times_of(it).get(kind) for it in side] for side in (cells, alone))
        if not all(mine) or not all(theirs):
            continue
        pool, base = Pool(mine), Pool(theirs)
        for name, q in QUANTILES.items():
            if min(sum(pool.counts), sum(base.counts)) * (1 - q) >= BEYOND:
                found[f"{kind}_{name}_ms"] = lambda times, q=q, pool=pool: pool.quantile(times, q)
                if cells is not alone:
                    found[f"{kind}_{name}_rel"] = lambda times, q=q, pool=pool, base=base: pool.quantile(times, q) / base.quantile(times, q)
        found[f"{kind}_mean_ms"] = pool.mean
        if cells is not alone:
            found[f"{kind}_mean_rel"] = lambda times, pool=pool, base=base: pool.mean(times) / base.mean(times)
    for name in dict.fromkeys(name for it in cells for name in it["rates"]):
        found[name] = functools.partial(mean_of, [it["rates"].get(name) for it in cells])
    return found


def mean_of(values: Sequence[float | None], times: Sequence[int]) -> float:
    """The mean over the drawn rounds that have a value, or over all rounds that have one."""
    drawn = [(value, n) for value, n in zip(values, times, strict=True) if value is not None]
    if not any(n for _value, n in drawn):
        drawn = [(value, 1) for value, _n in drawn]
    return sum(value * n for value, n in drawn) / sum(n for _value, n in drawn)


# --- rules --------------------------------------------------------------------------------------


def rejected(rounds: Sequence[Round]) -> dict[int, str]:
    """Which of a case's rounds do not count, and why."""
    # Of an even number of rounds, on a host that is now fast and now slow, the mean of the middle two is like neither.
    whole = [it for it in rounds if not it["failed"]]
    medians = [statistics.median(it["cells"]["alone"]["latencies_ms"]) for it in whole if it["cells"].get("alone", {}).get("latencies_ms")]
    middle = statistics.median_low(medians) if medians else 0.0
    usual = statistics.median_low(it["noise"] for it in whole) if whole else 0.0
    found = {}
    for one in rounds:
        alone = one["cells"].get("alone", {}).get("latencies_ms")
        if one["failed"]:
            found[one["round"]] = "incomplete"
        elif len(rounds) < LEAST:
            continue
        elif one["noise"] > NOISE * usual:
            found[one["round"]] = f"host noise {one['noise']:.2f}, {usual:.2f} is usual"
        elif alone and not one.get("varies") and abs(statistics.median(alone) / middle - 1) > DRIFT:
            found[one["round"]] = f"alone at {statistics.median(alone) / middle:.2f} of its median"
    return found


def kept(rounds: Sequence[Round]) -> list[Round]:
    """The rounds that count."""
    out = rejected(rounds)
    return [one for one in rounds if one["round"] not in out]


def of_mode(good: Sequence[Round], mode: str) -> list[Round]:
    """Those rounds that measured this mode."""
    return [one for one in good if mode in one["cells"]]


def width(good: Sequence[Round], mode: str) -> float:
    """How wide the interval of a cell's primary value is, as a part of that value: by the bootstrap, or by what its rounds differ by, whichever is wider.
    The slowest percent of all requests may lie in one round. The bootstrap then has that round's value again and again, and looks narrow."""
    cells, alone = ([one["cells"][name] for one in good] for name in (mode, "alone"))
    every, count = statistics_of(cells, alone), len(good)
    of = every[next(name for name in (*PRIMARY, *every) if name in every and not name.endswith("_ms"))]
    low, high = interval(of, count)
    each = [of([int(at == one) for at in range(count)]) for one in range(count)]
    widest = max(high - low, 2 * student(count - 1) * statistics.stdev(each) / math.sqrt(count))
    return widest and widest / abs(of([1] * count) or math.inf)


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution, to 2% from 4 degrees of freedom on."""
    return 1.96 + 2.37 / freedom + 2.82 / freedom**2


def ended(good: Sequence[Round], mode: str, most: int) -> str:
    """Why a cell with these rounds needs no more: `interval` or `rounds`; `budget`: it does need more."""
    if len(good) >= LEAST and (mode == "alone" or width(good, mode) <= WIDTH):
        return "interval"
    return "rounds" if len(good) >= most else "budget"


def unfinished(rounds: Sequence[Round], modes: Sequence[str], least: int, most: int, together: bool = False) -> list[str]:
    """The modes of a case that need more rounds; with `together` all of them, if one does."""
    if len(rounds) >= 2 * max(most, least):
        return []
    good = kept(rounds)
    # Alone is in every round: others decide how many it has.
    others = [name for name in modes if name != "alone"] or ["alone"]
    counts = {name: of_mode(good, name) for name in others}
    found = [name for name, of in counts.items() if len(of) < least or ended(of, name, max(most, least)) == "budget"]
    return list(modes) if found and together else [name for name in modes if name == "alone" or name in found] if found else []


def row(case: str, mode: str, good: Sequence[Round], most: int = MOST) -> dict[str, Any]:
    """One row of the results, of the rounds that measured its mode."""
    cells, alone = ([one["cells"][name] for one in good] for name in (mode, "alone"))
    every = statistics_of(cells if mode != "alone" else alone, alone)
    digits = lambda value: float(f"{value:.6g}")  # noqa: E731
    made: dict[str, Any] = {
        "case": case,
        "mode": mode,
        "values": {name: digits(of([1] * len(good))) for name, of in every.items()},
        "samples": sum(len(it["latencies_ms"]) for it in cells),
        "rounds": len(good),
    }
    for name in {name: 0 for it in cells for name in it.get("series", {})}:
        made.setdefault("series", {})[name] = {at: value for it in cells for at, value in it.get("series", {}).get(name, {}).items()}
    if mode != "alone":
        made["ended"] = ended(good, mode, most)
    if len(good) >= LEAST:
        made["interval"] = {name: list(map(digits, interval(of, len(good)))) for name, of in every.items()}
    return made


def noise(seconds: float = 0.1) -> float:
    """How even the host is: the slowest percent of equal pieces of work of a spinning thread, of about 0.1 ms, relative to their median."""
    pieces, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        for _ in range(5000):
            pass
        pieces.append(time.perf_counter() - begin)
    return common.quantile(pieces, 0.99) / common.quantile(pieces, 0.5)


# --- the driver ---------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What is to be measured: `measure(case, mode, round)` gives a cell; `prepare(case)` makes the programs of a case run.

    `least` has cases that need more rounds than LEAST, `varies` those of which each round plays another part of a trace. `modes` become fewer where programs cannot be prepared, or a mode fails twice in a row."""

    cases: Sequence[str]
    modes: list[str]
    measure: Callable[[str, str, int], dict[str, Any]]
    prepare: Callable[[str], None] = lambda case: None
    least: Mapping[str, int] = {}
    varies: Collection[str] = ()


class Record:
    """The rounds so far, on disk after each."""

    def __init__(self, results: Results, modes: Sequence[str], most: Mapping[str, int]) -> None:
        self.results, self.modes, self.most, self.cases = results, modes, most, dict[str, list[Round]]()
        self.path = results.path.with_suffix(".rounds.jsonl")
        self.head = {key: results.data[key] for key in ("bench", "device", "driver", "commit")} | {"modes": list(modes)}
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        if lines and json.loads(lines[0]) != self.head:
            raise BenchError(f"{self.path} is of another device, commit or set of modes: use another --out, or remove it")
        for line in lines[1:]:
            one = json.loads(line)
            self.cases.setdefault(one["case"], []).append(one)

    def add(self, one: Round) -> None:
        """One more round."""
        self.cases.setdefault(one["case"], []).append(one)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begun = self.path.exists()
        with self.path.open("a") as file:
            for line in ([] if begun else [self.head]) + [one]:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def leave_out(self, mode: str) -> None:
        """Makes rounds count that only lack this mode."""
        for one in itertools.chain(*self.cases.values()):
            one["failed"].pop(mode, None)
            one["cells"].pop(mode, None)

    def write(self, notes: Sequence[str] = ()) -> None:
        """The results of all rounds that count."""
        data, rows, lost, good_rounds = self.results.data, [], [], []
        for case, rounds in self.cases.items():
            good = kept(rounds)
            lost += [f"{case} {number}: {why}" for number, why in rejected(rounds).items()]
            good_rounds += good
            most = self.most.get(case, MOST)
            rows += [row(case, mode, of, most) for mode in self.modes if (of := of_mode(good, mode))]
        if not rows:
            return
        worst, counts = max(one["noise"] for one in good_rounds), [it["rounds"] for it in rows]
        others = [it for it in rows if "ended" in it]
        narrow = sum(it["ended"] == "interval" for it in others)
        data["host"] = (
            f"{min(counts)} to {max(counts)} rounds a cell, {narrow} of {len(others)} cells ended by their interval; host noise at most {worst:.2f}"
            f" (limit {NOISE:g} times the usual); {len(lost)} rounds rejected{': ' + '; '.join(lost) if lost else ''}."
        )
        if notes:
            data["note"] = " ".join(notes)
        data["rows"] = sorted(rows, key=lambda it: self.results.order[it["case"], it["mode"]])
        self.results.write()


def arguments(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Flags of every benchmark in rounds."""
    parser.add_argument("--seconds", type=float, default=seconds, help="length of one mode in a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=MOST, help="rounds that count, at most; fewer where intervals are narrow before [%(default)s]")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="seconds for this call [%(default)s]")


def quick(options: argparse.Namespace) -> tuple[float, int, int]:
    """Seconds of a mode, the most rounds and the fewest: with `--quick` one round of a third of the time."""
    return (options.seconds / 3, 1, 1) if options.quick else (options.seconds, options.rounds, min(options.rounds, LEAST))


def prepare(case: str, modes: list[str], have: Callable[[str, str], Any], notes: list[str]) -> None:
    """Makes the programs of a case run in every mode; takes modes out that cannot, and notes why."""
    for name in list(modes):
        try:
            have(case, name)
        except BenchError as error:
            modes.remove(name)
            notes.append(f"{name} could not run {case}: {' '.join(str(error).split())[:300]}.")
            say(f"error: {notes[-1]}")


def run(plan: Plan, results: Results, budget_s: float, most: int = MOST, notes: list[str] | None = None) -> int:
    """Measures rounds, case after case, until all have enough (exit code 0, or 1 if the results are not whole) or the budget is
    spent (UNFINISHED). A mode that fails twice in a row is left out, and named in `notes` with its error."""
    notes = [] if notes is None else notes
    if "alone" not in plan.modes:
        raise BenchError("every round has the mode alone")
    least = {case: plan.least.get(case, LEAST) for case in plan.cases}
    record = Record(results, plan.modes, {case: max(most, of) for case, of in least.items()})
    end = time.monotonic() + budget_s
    longest = preparation = 0.0
    for case in plan.cases:
        prepared = False
        while True:
            rounds = record.cases.get(case, [])
            modes = unfinished(rounds, plan.modes, least[case], most, case in plan.varies)
            if not modes:
                break
            if time.monotonic() + longest + (0.0 if prepared else preparation) > end:
                say(f"the budget is spent: call again to go on with {case}")
                record.write(notes)
                return UNFINISHED
            if not prepared:
                begin = time.monotonic()
                plan.prepare(case)
                modes = [name for name in modes if name in plan.modes]
                if "alone" not in plan.modes:
                    raise BenchError(f"{case}: {' '.join(notes)}")
                prepared, preparation = True, max(preparation, time.monotonic() - begin)
            begin, number = time.monotonic(), len(rounds)
            one: Round = {"case": case, "round": number, "noise": 0.0, "varies": case in plan.varies, "failed": {}, "cells": {}}
            for name in [*modes[number % len(modes) :], *modes[: number % len(modes)]]:
                one["noise"] = max(one["noise"], float(f"{noise():.4g}"))
                try:
                    one["cells"][name] = measured = plan.measure(case, name, number)
                    ms = measured["latencies_ms"]
                    median = f"p50 {statistics.median(ms):.4g} ms of {len(ms)}, " if ms else ""
                    say(f"{case} / {name}, round {number}: {median}" + ", ".join(f"{k} {v:.5g}" for k, v in measured["rates"].items()))
                except BenchError as error:
                    one["failed"][name] = str(error)
                    say(f"error: {case} / {name}, round {number}: {error}")
            record.add(one)
            for name in [name for name in plan.modes if number and all(name in it["failed"] for it in record.cases[case][-2:])]:
                if name == "alone":
                    raise BenchError(f"{case}: alone failed twice in a row: {one['failed'][name]}")
                notes.append(f"{name} failed twice in a row in {case} and is left out: {' '.join(one['failed'][name].split())[:300]}.")
                say(f"error: {notes[-1]}")
                plan.modes.remove(name)
                record.leave_out(name)
            record.write(notes)
            longest = max(longest, time.monotonic() - begin)
    record.write(notes)
    for case, rounds in record.cases.items():
        for number, why in rejected(rounds).items():
            say(f"{case}, round {number} does not count: {why}")
    return max(results.finish(), 1 if notes or not results.data["rows"] else 0)
