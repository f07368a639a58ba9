"""Puts bench/results/*.json into the documents: tables, pictures, and every measured number of the text.

A document says what it shows; this program fills it in, and running it again changes nothing:

- `<!-- table NAME; cases A,B; modes a,b; values x,y -->` ... `<!-- end -->` is the table of results file NAME (`cases` and `modes` select rows, `values` columns).
- `<!-- not in rounds -->` ... `<!-- end -->` lists, by section, this page's tables that have no intervals, or are of several calls or the best of several.
- `<!-- runs VALUE; MODE÷BASE; NAME NAME ... -->` ... `<!-- end -->` is a table of one ratio: a row per case, a column per call.
- `<!-- figure IMAGE; bars VALUE,VALUE; modes a,b; NAME A,B; NAME C -->` is the picture docs/img/IMAGE.svg of these cases, a panel per value. `lines VALUE,VALUE by X` has a line per
  mode instead, at the number in the case's name (`A@prep50`), or at the seconds of a row's series, with gaps where seconds are missing. Of one value `latency_mean_added_us` is the difference from alone.
- `1.06<!--=NAME;CASE;MODE;VALUE-->` is one number. MODE may be `gpumux÷alone`, a ratio, or `gpumux−none`, a difference; CASE may be `A,B,C` or `*`
  and NAME several names with commas, with `min ` or `max ` before the whole. A `%` after the number makes it a percentage.
- NAME is the file's name without `.json`; `BENCH-COMMIT` is enough where it is unique on the H100.

`--check` fails where a document would change, where a results file has no table, and where a paragraph that claims a
measurement holds a number that comes from nowhere. A number in backticks, or with a unit in backticks, is one like any other, unless it is a setting:
- `` `10 µs`<!--set=SOURCE--> `` is a setting that stands in results file SOURCE (its command, cases, modes or note) or in that file of the repository.
- `<!--cited-->` in a paragraph or table row: its numbers are those of the source that it links.
Needs only Python.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import common
import fidelity

ROOT = common.BENCH.parent
COLOURS = {
    "alone": "#8c8c8c",
    "time-slicing": "#d9822b",
    "mps": "#b6535c",
    "fixed": "#7a6fb0",
    "gpumux": "#2b7bba",
    "space": "#1a9988",
    "unhinted": "#8fb8d8",
    "gpreempt": "#3f8f3f",
    "gpreempt-unhinted": "#a3cfa3",
}
OTHER_COLOURS = ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#57606a"]
RATIOS = {"latency_p99_ms": "p99 ÷ alone", "batch_rate": "batch rate ÷ alone"}
UNITS = {"ms": "ms", "us": "µs", "s": "s"}
# Names that end like a unit but are none.
RATES = {"batch_rate": "batch rate (1/s)"}
BLOCK = re.compile(r"(<!-- (table|runs|not) ([^>]*) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"<!-- figure ([\w-]+);\s*(bars|lines) ([\w,]+)(?: by ([^;]+))?;\s*modes ([^;]+);\s*(.*?) -->", re.DOTALL)
INLINE = re.compile(r"(-?\d+(?:\.\d+)?)(%?)<!--=([^>]*)-->")
# Written by other programs.
GENERATED = {"commands.md", "emulated-functions.md", "SUMMARY.md"}


def number(value: float) -> str:
    """Three to four significant digits, without exponents."""
    if value == int(value) and abs(value) < 1e6 or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3}f}"


def title(name: str) -> str:
    """`latency_p99_ms` becomes `latency p99 (ms)`."""
    if name in RATES:
        return RATES[name]
    words = name.split("_")
    if words[-2:-1] == ["per"]:
        return " ".join(words[:-2]) + "/" + words[-1]
    if words[-1] in UNITS:
        return " ".join(words[:-1] or ["time"]).replace("p999", "p99.9") + f" ({UNITS[words[-1]]})"
    return " ".join(words)


class Store:
    """All results files, by name."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.json")):
            self.files[path.stem] = json.loads(path.read_text())
            common.check_results(self.files[path.stem])

    def named(self, name: str) -> str:
        """The full name of a file."""
        bench, _, rest = name.partition("-")
        found = [name] if name in self.files else [it for it in self.files if re.fullmatch(f"{bench}-h100-[a-z0-9-]*hbm3-{rest}", it)]
        if len(found) != 1:
            raise common.BenchError(f"{name} names {len(found)} results files")
        return found[0]

    def value(self, name: str, case: str, mode: str, what: str) -> float:
        """One value of one row."""
        for row in self.files[name]["rows"]:
            if (row["case"], row["mode"]) == (case, mode) and what in row["values"]:
                return row["values"][what]
        raise common.BenchError(f"{name} has no {what} of {case} / {mode}")

    def ratio(self, name: str, case: str, modes: str, what: str) -> float:
        """A value, or what `gpumux÷alone` or `gpumux−none` make of two."""
        mode, sign, base = next((modes.partition(sign) for sign in "÷−" if sign in modes), (modes, "", ""))
        value = self.value(name, case, mode, what)
        if not sign:
            return value
        other = self.value(name, case, base, what)
        return value / other if sign == "÷" else value - other

    def evaluate(self, text: str) -> float:
        """What stands in the comment after a number."""
        chosen, _, rest = text.partition(" ") if text.startswith(("min ", "max ")) else ("", "", text)
        try:
            names, cases, modes, what = rest.split(";")
        except ValueError:
            raise common.BenchError(f"a number's source is NAME;CASE;MODE;VALUE, not {text}") from None
        found = []
        for name in map(self.named, names.split(",")):
            rows = self.files[name]["rows"]
            every = dict.fromkeys(row["case"] for row in rows if row["mode"] == re.split("[÷−]", modes)[0])
            found += [self.ratio(name, case, modes, what) for case in (every if cases == "*" else cases.split(","))]
        if not chosen and len(found) != 1:
            raise common.BenchError(f"{text} are {len(found)} numbers")
        return (min if chosen == "min" else max)(found)


# --- tables -------------------------------------------------------------------------------------


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """All value names, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row["values"]))


def compared(row: dict[str, Any], rows: list[dict[str, Any]], name: str) -> float | None:
    """The row's value over that of the same case alone."""
    for other in rows:
        if (other["case"], other["mode"]) == (row["case"], "alone") and other["values"].get(name):
            return row["values"][name] / other["values"][name] if name in row["values"] else None
    return None


def groups(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of cases that have the same values, in order: one table each."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        found.setdefault(tuple(columns(of_case)), []).extend(of_case)
    return list(found.values())


def shown(row: dict[str, Any], name: str) -> str:
    """A value, with its interval where the row has one."""
    if name not in row["values"]:
        return ""
    low_high = row.get("interval", {}).get(name)
    return number(row["values"][name]) + (f" ({number(low_high[0])}–{number(low_high[1])})" if low_high else "")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, with ratios to the mode alone."""
    names = columns(rows)
    relative = [name for name in RATIOS if name in names and f"{name.rpartition('_')[0]}_rel" not in names]
    relative = [name for name in relative if any(compared(row, rows, name) for row in rows)]
    counted = [name for name in common.COUNTS if any(name in row for row in rows)]
    head = ["case", "mode", *map(title, names), *(RATIOS[name] for name in relative), *counted]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        ratios = [compared(row, rows, name) for name in relative]
        cells = [
            row["case"],
            row["mode"],
            *(shown(row, name) for name in names),
            *(f"{ratio:.2f}" if ratio is not None else "" for ratio in ratios),
            *(str(row.get(name, "")) for name in counted),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def call(data: dict[str, Any]) -> str:
    """Where and how it was measured, in one line of Markdown."""
    text = f"{data['device']}, driver {data['driver']}, {data['date']}, commit `{data['commit'][:12]}`: `{data['command']}`."
    return " ".join(filter(None, [text, data.get("note", ""), data.get("host", "")]))


def selected(data: dict[str, Any], options: Iterable[str]) -> list[dict[str, Any]]:
    """The rows that `cases A,B` and `modes a,b` choose, with the values that `values x,y` does."""
    rows = data["rows"]
    for option in options:
        key, _, chosen = option.strip().partition(" ")
        if key == "values":
            rows = [row | {"values": {name: row["values"][name] for name in chosen.split(",") if name in row["values"]}} for row in rows]
            rows = [row for row in rows if row["values"]]
            continue
        if key not in ("cases", "modes"):
            raise common.BenchError(f"a table is selected by cases, modes and values, not by {option}")
        rows = [row for row in rows if row[key[:-1]] in chosen.split(",")]
    if not rows:
        raise common.BenchError(f"no rows of {data['bench']} are selected by {'; '.join(options)}")
    return rows


def runs(store: Store, text: str) -> str:
    """One ratio by case and call, with the calls' commits in the head."""
    what, modes, names = (part.strip() for part in text.split(";"))
    every = [store.named(name) for name in names.split()]
    mode = modes.partition("÷")[0]
    cases = dict.fromkeys(row["case"] for name in every for row in store.files[name]["rows"] if row["mode"] == mode)
    head = [f"{title(what)}, {modes}", *(f"`{store.files[name]['commit'][:7]}`" for name in every)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * len(every)]
    for case in sorted(cases):
        cells = []
        for name in every:
            try:
                cells.append(f"{store.ratio(name, case, modes, what):.2f}")
            except common.BenchError:
                cells.append("")
        lines.append("| " + " | ".join([case, *cells]) + " |")
    return "\n".join(lines)


# A results file's note that tells of more than one measurement of a value, or call.
BEST, SEVERAL = re.compile(r"\bbest of\b"), re.compile(r"\b[Tt]wo calls\b|\bcall of its own\b")


def not_in_rounds(store: Store, text: str) -> str:
    """This page's tables whose rows are not means of rounds, by section."""
    found, section = dict[str, list[str]](), ""
    for match in re.finditer(rf"^#+ ([^\n]+)$|{BLOCK.pattern}", text, re.DOTALL | re.MULTILINE):
        if match[1]:
            section = match[1]
            continue
        kind, what = match[3], match[4]
        if kind == "not":
            continue
        if kind == "runs":
            found.setdefault(section, []).append(f"calls side by side, of {title(what.partition(';')[0])}")
            continue
        name, *options = what.split(";")
        name = store.named(name.strip())
        rows, note = selected(store.files[name], options), store.files[name].get("note", "")
        cases = dict.fromkeys(row["case"] for row in rows)
        without = [case for case in cases if not all(row.get("interval") for row in rows if row["case"] == case)]
        few = ", ".join(without) if len(without) < 4 else f"{len(without)} of {len(cases)} cases"
        told = [few] if 0 < len(without) < len(cases) else []
        told += ["best of several"] if BEST.search(note) else []
        told += ["two calls"] if SEVERAL.search(note) else []
        if without or told:
            found.setdefault(section, []).append(f"`{name}`" + (f" ({'; '.join(told)})" if told else ""))
    anchor = lambda head: re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")  # noqa: E731
    return "\n".join(f"- [{head}](#{anchor(head)}): {', '.join(dict.fromkeys(of))}" for head, of in found.items())


# --- pictures -----------------------------------------------------------------------------------


def svg(head: str, width: int, height: int, panels: Iterable[str]) -> str:
    """A picture of panels that stand side by side."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
            "<style>text{fill:#24292f}.head{font-weight:bold;font-size:13px}.case{font-weight:bold}</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="12" y="22" font-size="15">{escape(head)}</text>',
            *panels,
            "</svg>",
            "",
        ]
    )


def origin(data: dict[str, Any]) -> str:
    """Device and commit, short."""
    return f"{data['device'].removeprefix('none: ')}, {data['commit'][:7]}"


# A longer bar of a relative value is cut, and shown so.
LIMIT = 10


def bars(rows: list[dict[str, Any]], name: str, x: int, width: int) -> Iterable[str]:
    """One panel: a bar per case and mode, with its interval."""
    rows = [row for row in rows if name in row["values"]]
    limit = LIMIT if name.endswith("_rel") else math.inf
    top = lambda row: min(limit, row.get("interval", {}).get(name, [0, row["values"][name]])[1])  # noqa: E731
    # The cases of a latency share a scale; fleets differ in size.
    scale_of = lambda case: (width - 190) / (max(top(row) for row in rows if name != "gpus" or row["case"] == case) or 1)  # noqa: E731
    yield f'<text x="{x}" y="44" class="head">{escape(title(name).replace(" rel", " ÷ alone"))}</text>'
    y, case, scale = 54, None, 1.0
    for row in rows:
        if row["case"] != case:
            case, y, scale = row["case"], y + 18, scale_of(row["case"])
            yield f'<text x="{x}" y="{y}" class="case">{escape(case)}</text>'
            y += 6
        value = row["values"][name]
        length = end = max(1.0, min(limit, value) * scale)
        colour = COLOURS.get(row["mode"], "#555555")
        yield f'<text x="{x + 96}" y="{y + 12}" text-anchor="end">{escape(row["mode"])}</text>'
        yield f'<rect x="{x + 102}" y="{y + 2}" width="{length:.1f}" height="13" fill="{colour}"/>'
        if value > limit:
            yield f'<path d="M{x + 102 + end - 14:.1f} {y}l-5 17h5l5 -17z" fill="#ffffff"/>'
        elif between := row.get("interval", {}).get(name):
            low, end = (x + 102 + max(0.0, min(limit, it) * scale) for it in between)
            yield f'<path d="M{low:.1f} {y + 8}H{end:.1f}" stroke="#24292f" stroke-width="2"/>'
            end -= x + 102
        yield f'<text x="{x + 108 + end:.1f}" y="{y + 12}">{number(value)}</text>'
        y += 18


def bar_panels(head: str, rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    """A picture with bars of these values."""
    cases, width = len({row["case"] for row in rows}), 470
    left = max(12, 7 * max(len(row["mode"]) for row in rows) - 90)
    panels = [line for at, name in enumerate(names) for line in bars(rows, name, left + at * width, width)]
    return svg(head, width * len(names), 84 + 24 * cases + 18 * len(rows), panels)


def picture(data: dict[str, Any]) -> str | None:
    """An SVG of the latencies and the batch rate, of the GPUs that are needed and of what is attained, or of curves; nothing where there are none."""
    head = f"{data['bench']}: {origin(data)}"
    if data["bench"] == "curves":
        found = dict[str, list[Point]]()
        for row in data["rows"]:
            found.setdefault(row["case"], []).append(Point(float(row["mode"].rstrip("%")), row["values"]["relative"]))
        return line_panels(head, [("", found)], "percent of the SMs; throughput relative to all of them")
    names = [name for name in ("latency_p99_ms", "batch_rate", "gpus", "attained") if name in columns(data["rows"])]
    return bar_panels(head, data["rows"], names) if names else None


class Point(NamedTuple):
    """A point of a line, and its interval; or a second of a series, of which others may be missing."""

    x: float
    y: float
    interval: Sequence[float] = ()
    second: bool = False


SIDE = 300


def ticks(low: float, high: float) -> list[float]:
    """Round numbers of an axis."""
    step = next(step for power in range(-4, 9) for step in (10.0**power, 2 * 10.0**power, 2.5 * 10.0**power, 5 * 10.0**power) if (high - low) / step <= 5)
    return [step * at for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def lines(left: int, head: str, found: dict[str, list[Point]], x_title: str) -> Iterable[str]:
    """One panel: a line per name, with intervals, from zero."""
    top, points = 44, [point for of in found.values() for point in of]
    last = max(point.x for point in points) or 1
    heights = [it for point in points for it in (point.y, *point.interval)]
    least, most = min(0.0, *heights), 1.1 * max(heights)
    at = lambda x, y: (left + x / last * SIDE, top + (most - y) / (most - least) * SIDE)  # noqa: E731
    yield f'<text x="{left}" y="38" class="head">{escape(head)}</text>'
    for value in ticks(0, last):
        x, _ = at(value, 0)
        yield f'<path d="M{x:.1f} {top}V{top + SIDE}" stroke="#d0d7de"/><text x="{x:.1f}" y="{top + SIDE + 16}" text-anchor="middle">{value:g}</text>'
    for value in ticks(least, most):
        _, y = at(0, value)
        yield f'<path d="M{left} {y:.1f}H{left + SIDE}" stroke="#d0d7de"/><text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    yield f'<text x="{left + SIDE / 2}" y="{top + SIDE + 36}" text-anchor="middle">{escape(x_title)}</text>'
    for place, (name, of) in enumerate(found.items()):
        colour = COLOURS.get(name, OTHER_COLOURS[place % len(OTHER_COLOURS)])
        joined = [it is not of[0] and not (it.second and it.x > before.x + 1) for before, it in zip([of[0], *of], of)]
        path = " ".join("{}{:.1f} {:.1f}".format("ML"[on], *at(it.x, it.y)) for on, it in zip(joined, of))
        yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for point in (it for it in of if not it.second):
            x, y = at(point.x, point.y)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            if point.interval:
                (_, low), (_, high) = (at(0, it) for it in point.interval)
                yield f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>'
        yield f'<text x="{left + SIDE + 14}" y="{top + 14 + 18 * place}" style="fill:{colour}">{escape(name)}</text>'


def line_panels(head: str, panels: Sequence[tuple[str, dict[str, list[Point]]]], x_title: str) -> str:
    """A picture with lines, a panel for each group of them."""
    width = 52 + SIDE + 150
    drawn = [line for at, (name, found) in enumerate(panels) for line in lines(52 + at * width, name, found, x_title)]
    return svg(head, width * len(panels), 44 + SIDE + 46, drawn)


def with_differences(row: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any]:
    """A row that also has what its latencies add to those alone, and relative ones of the row alone."""
    if alone is None:
        return row
    values, around = dict(row["values"]), dict(row.get("interval", {}))
    for name, base in alone["values"].items():
        kind = name.removesuffix("_ms")
        if kind == name or name not in values:
            continue
        if row is alone:
            values[f"{kind}_rel"] = 1.0
        else:
            values[f"{kind}_added_us"] = (values[name] - base) * 1e3
            if between := around.get(f"{kind}_rel"):
                around[f"{kind}_added_us"] = [(it - 1) * base * 1e3 for it in between]
    return row | {"values": values, "interval": around}


def figure(store: Store, match: re.Match[str]) -> str:
    """The picture that a document describes."""
    _, kind, values, x_title, modes, sources = match.groups()
    rows, heads, wanted = list[dict[str, Any]](), list[str](), [it.strip() for it in modes.split(",")]
    for source in sources.split(";"):
        name, cases = source.split()
        data = store.files[store.named(name)]
        for case in cases.split(","):
            of = {row["mode"]: row for row in data["rows"] if row["case"] == case}
            if not of:
                raise common.BenchError(f"{name} has no case {case}")
            shown_as = f"{case} ({origin(data).removeprefix('NVIDIA ')})" if ";" in sources else case
            rows += [with_differences(of[mode], of.get("alone")) | {"case": shown_as} for mode in wanted if mode in of]
        heads.append(origin(data))
    head = f"{match[1]}: {', '.join(dict.fromkeys(heads))}" if len(set(heads)) == 1 else match[1]
    names = values.split(",")
    if kind == "bars":
        return bar_panels(head, rows, names)
    panels = []
    for name in names:
        found = dict[str, list[Point]]()
        for row in rows:
            if over := row.get("series", {}).get(name):
                found.setdefault(row["mode"], []).extend(sorted(Point(float(at), value, second=True) for at, value in over.items()))
            elif name in row["values"]:
                found.setdefault(row["mode"], []).append(Point(float(re.findall(r"\d+", row["case"])[-1]), row["values"][name], row.get("interval", {}).get(name, ())))
        panels.append((title(name), found))
    return line_panels(head, panels, x_title or "")


# What the README's chart shows: its panels, their measures, and the modes.
CHART = ROOT / "docs/img/sharing.svg"
CHART_OF = "colocation-h200-f71b980"
PANELS = [("graph+train", "Requests as CUDA graphs"), ("eager+train", "Requests kernel by kernel (eager)")]
MEASURES = [("latency_p99_ms", "p99 latency ÷ alone", "lower is better", 6.2), ("batch_rate", "training rate ÷ alone", "higher is better", 1.1)]
SHOWN = {"alone": "alone", "time-slicing": "time slicing", "mps": "MPS", "gpumux": "gpumux"}


def chart(store: Store) -> str:
    """The README's chart: latency and training rate relative to alone, in the colours of the reader's light or dark mode."""
    name = store.named(CHART_OF)
    data = store.files[name]
    width, height = 860, 312
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui,sans-serif" font-size="13" role="img">',
        "<title>p99 latency and training rate relative to alone, by way of sharing</title>",
        "<style>.back{fill:#ffffff}text{fill:#24292f}.dim{fill:#57606a}.axis{stroke:#8c959f}.head{font-weight:600;font-size:15px}.own{font-weight:600}.value{paint-order:stroke;stroke:#ffffff;stroke-width:4px}"
        "@media (prefers-color-scheme:dark){.back{fill:#0d1117}text{fill:#e6edf3}.dim{fill:#9198a1}.axis{stroke:#6e7681}.value{stroke:#0d1117}}</style>",
        f'<rect class="back" width="{width}" height="{height}" rx="6"/>',
    ]
    for place, (case, head) in enumerate(PANELS):
        left = 20 + place * 425
        lines.append(f'<text x="{left}" y="28" class="head">{escape(head)}</text>')
        y = 40
        for what, label, better, most in MEASURES:
            y += 18
            lines.append(f'<text x="{left}" y="{y}">{escape(label)} <tspan class="dim">({better})</tspan></text>')
            y += 8
            zero, scale = left + 92, 255 / most
            lines.append(f'<path class="axis" d="M{zero + scale:.1f} {y}v{4 * 21 - 3}" stroke-dasharray="3 3"/>')
            for mode, shown_as in SHOWN.items():
                value = store.ratio(name, case, f"{mode}÷alone", what)
                style = ' class="own"' if mode == "gpumux" else ""
                lines += [
                    f'<text x="{zero - 8}" y="{y + 14}" text-anchor="end"{style}>{escape(shown_as)}</text>',
                    f'<rect x="{zero}" y="{y + 2}" width="{value * scale:.1f}" height="15" rx="2" fill="{COLOURS[mode]}"/>',
                    f'<text x="{zero + value * scale + 6:.1f}" y="{y + 14}" class="value{" own" * (mode == "gpumux")}">{value:.2f}</text>',
                ]
                y += 21
    source = f"ResNet-50 requests beside ResNet-152 training. {data['device']}, driver {data['driver']}, {data['date'][:10]}, commit {data['commit'][:7]}"
    lines += [f'<text x="20" y="{height - 12}" font-size="12" class="dim">{escape(source)}</text>', "</svg>", ""]
    return "\n".join(lines)


# --- documents ----------------------------------------------------------------------------------


def filled(store: Store, page: Path, text: str, shown_tables: set[str]) -> str:
    """A document's text with its tables and numbers as the results have them."""

    def block(match: re.Match[str]) -> str:
        head, kind, what, end = match[1], match[2], match[3], match[5]
        if kind == "not":
            return f"{head}{not_in_rounds(store, text)}\n{end}"
        if kind == "runs":
            return f"{head}{runs(store, what)}\n{end}"
        name, *options = what.split(";")
        data = store.files[store.named(name.strip())]
        shown_tables.add(store.named(name.strip()))
        tables = "\n\n".join(map(table, groups(selected(data, options))))
        return f"{head}{call(data)}\n\n{tables}\n{end}"

    def value(match: re.Match[str]) -> str:
        found = store.evaluate(match[3]) * (100 if match[2] else 1)
        decimals = len(match[1].partition(".")[2])
        return f"{found:.{decimals}f}{match[2]}<!--={match[3]}-->"

    try:
        return INLINE.sub(value, BLOCK.sub(block, text))
    except common.BenchError as error:
        raise common.BenchError(f"{page.name}: {error}") from None


def between(path: Path, text: str, begin: str, end: str, new: str) -> str:
    """Text with what stands between two marks replaced."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise common.BenchError(f"{path} needs one {begin} and after it one {end}")
    return text[: text.index(begin) + len(begin)] + "\n" + new + text[text.index(end) :]


def outputs(results: Path, pages: Iterable[Path]) -> tuple[dict[Path, str], list[str]]:
    """All files that this program writes and their text, and the results that no table shows."""
    store, files, tables = Store(results), {}, set[str]()
    for page in pages:
        text = filled(store, page, page.read_text(), tables)
        if fidelity.TABLE_BEGIN in text:
            reports = {name: data for name, data in store.files.items() if data["bench"] == "fidelity"}
            tables |= reports.keys()
            report = fidelity.table(list(reports.values()), number, title) + "\n"
            text = between(page, text, fidelity.TABLE_BEGIN, fidelity.TABLE_END, report)
        files[page] = text
        for folder, name in re.findall(r"!\[[^\]]*\]\(([^)]*/)([\w.-]+)\.svg\)", text):
            if name not in store.files:
                continue
            svg = picture(store.files[name])
            if svg is None:
                raise common.BenchError(f"{page.name}: nothing can be drawn of {name}")
            files[page.parent / folder / f"{name}.svg"] = svg
        for match in FIGURE.finditer(text):
            path = f"img/{match[1]}.svg"
            if f"]({path})" not in text:
                raise common.BenchError(f"{page.name} does not show {path}")
            files[page.parent / path] = figure(store, match)
        if "docs/img/sharing.svg)" in text or 'docs/img/sharing.svg"' in text:
            files[CHART] = chart(store)
    return files, sorted(store.files.keys() - tables)


# --- numbers ------------------------------------------------------------------------------------

# A paragraph that holds one of these claims a measurement.
CLAIM = re.compile(
    r"\b[HAV][12]00s?\b|\b[Mm]easured\b|\btimes alone\b|\bp(50|90|99)\b|\bEPYC\b|results\.md|fidelity\.md|README\.md#measured|`bench/|commit `"
)
UNIT = r"(?:[µumn]?s|min|h|%|percent|[x×]|times|[KMGTk]i?B|[kMG]Hz|W|[\w-]+/s)(?![\w/])"
SETTING = re.compile(r"`([^`]*)`<!--set=([^>]*)-->")
# What is no result: settings, comments that name a source, links' targets, dates, versions, drivers, products, sections.
NO_RESULT = re.compile(
    r"-?\d[\d.,]*%?<!--=[^>]*-->|`[^`]*`<!--set=[^>]*-->|<!--.*?-->|\]\([^)]*\)|https?://\S+|\d{4}-\d\d-\d\d|\d+\.\d+\.\d+|"
    r"\b(driver|drivers|branch|branches|PCIe|CUDA|PyTorch|vLLM|MPS v|r|version|case|shape)s? ?\d[\d.]*(( to| and) \d[\d.]*)*|'\d\d|§ ?\d+",
    re.DOTALL,
)
# Code that may be a result: numbers alone, or with a unit and not with flags.
VALUE = re.compile(rf"[~≈<>≤≥±+−-]?\d[\d.,]*(?:\s?(?:to|and|–|±)\s?\d[\d.,]*)*|(?!.*(?:--|=)).*?(?<![\w.=/-])\d[\d.,]*\s?{UNIT}.*", re.DOTALL)
# A number in the text, also right before a unit: not a part of a name such as H100, ResNet-50 or 2x60%.
NUMBER = re.compile(rf"(?<![\w.,/#×-])-?\d++(?:[.,]\d++)*+(?:(?={UNIT})|(?![\w-]*[A-Za-z_]\w*-|[A-Za-z×]))")
# A list item or a table row.
PART = re.compile(r"\s*([-*](?=\s)|\||\d+\.(?=\s))")
LINK = re.compile(r"\]\([^)]+\)")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The text's paragraphs, list items and table rows with the numbers of their first lines; no code, nothing generated."""
    hidden = lambda match: "\n" * match[0].count("\n")  # noqa: E731
    text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", hidden, text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", hidden, BLOCK.sub(hidden, text), flags=re.DOTALL | re.MULTILINE)
    first, lines = 1, list[str]()
    for at, line in enumerate([*text.splitlines(), ""], 1):
        if lines and (not line.strip() or PART.match(line)):
            yield first, "\n".join(lines)
            lines = []
        if line.strip():
            first = first if lines else at
            lines.append(line)


def unsourced(text: str) -> list[tuple[int, str]]:
    """Numbers in claims of measurements that name no source, with their lines.

    What a table's head or the line before a list claims, their rows and items claim too.
    """
    found, above, last = [], False, -1
    for line, paragraph in paragraphs(text):
        part = PART.match(paragraph)
        claims = bool(CLAIM.search(paragraph))
        if not part:
            above = claims and paragraph.rstrip().endswith(":")
        elif part[1] == "|" and line != last + 1:
            above |= claims
        last = line
        if (claims or part and above) and not ("<!--cited-->" in paragraph and LINK.search(paragraph)):
            blank = lambda match: " " + "\n" * match[0].count("\n")  # noqa: E731
            code = lambda match: f" {match[1]} " if VALUE.fullmatch(match[1]) else blank(match)  # noqa: E731, B023
            cleaned = re.sub(r"`([^`]*)`", code, NO_RESULT.sub(blank, paragraph))
            found += [(line + cleaned[: it.start()].count("\n"), it[0]) for it in NUMBER.finditer(cleaned)]
    return found


# A file may have a setting in a smaller unit, or by a shift.
MULTIPLES = (1, 1e3, 1e6, 1e9, 1 << 10, 1 << 20, 1 << 30)


def not_set(store: Store, root: Path, text: str) -> list[str]:
    """Settings that do not stand where they are said to."""
    found = []
    for what, where in SETTING.findall(text):
        if where in store.files or not (root / where).is_file():
            try:
                data = store.files[store.named(where)]
            except common.BenchError:
                found.append(f"{what} is set in {where}, which is neither a file nor results")
                continue
            told = " ".join([data["command"], data.get("note", ""), *(f"{row['case']} {row['mode']}" for row in data["rows"])])
        else:
            told = (root / where).read_text()
        there = {float(it) for it in re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d)[,_](?=\d)", "", told))}
        numbers = map(float, re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d)", "", what)))
        if not all(there & {it * unit for unit in MULTIPLES} for it in numbers):
            found.append(f"{what} does not stand in {where}")
    return found


def unexplained(data: dict[str, Any]) -> list[str]:
    """Cases and modes that a committed call was to measure, and of which neither a row nor the note tells."""
    words, found = shlex.split(data.get("command", "")), list[str]()
    for flag, key in (("--cases", "case"), ("--modes", "mode")):
        asked = words[words.index(flag) + 1].split(",") if flag in words[:-1] else []
        there = {row.get(key) for row in data["rows"]}
        told = lambda it: re.search(rf"(?<![\w-]){re.escape(it)}(?![\w-])", data.get("note", ""), re.IGNORECASE if len(it) > 1 else 0)  # noqa: E731
        found += [it for it in asked if it not in there and not told(it)]
    return found


def documents(root: Path) -> list[Path]:
    """The README and the pages of the book that people write."""
    pages = [*(root / "docs").glob("*.md"), *(root / "docs/adr").glob("*.md")]
    return [root / "README.md", *sorted(path for path in pages if path.name not in GENERATED)]


def main() -> int:
    """Writes the files, or checks that they are up to date and that every measured number has a source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=common.BENCH / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would")
    options = parser.parse_args()
    pages = documents(options.root.resolve())
    try:
        files, untold = outputs(options.results.resolve(), pages)
    except common.BenchError as error:
        sys.exit(f"error: {error}")
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if not options.check:
        for path in stale:
            path.write_text(files[path])
            print(path)
        return 0
    wrong = [f"{path} does not match bench/results: run python3 bench/plot.py" for path in stale]
    wrong += [f"bench/results/{name}.json has no table in any document" for name in untold]
    for path in sorted(options.results.glob("*.json")):
        wrong += [f"{path}: {it} was asked for, and has no row and no word in the note" for it in unexplained(json.loads(path.read_text()))]
    # Decisions are records: what they say of a day may have its source in them.
    for page in (it for it in pages if it.parent.name != "adr"):
        name = os.path.relpath(page, options.root)
        wrong += [f"{name}:{line}: {found} has no source in bench/results" for line, found in unsourced(files[page])]
        wrong += [f"{name}: {found}" for found in not_set(Store(options.results), options.root, files[page])]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
