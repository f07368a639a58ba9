"""Turns bench/results/*.json into tables and into one SVG per benchmark with latencies.

What tells most goes into the README, the rest into docs/results.md, the driver-level report into docs/fidelity.md. Tables go between `<!-- results:begin -->` and `<!-- results:end -->`; the pictures beside the results. Reports of
`fidelity.py` go side by side into docs/fidelity.md. Running it again changes nothing. Needs only Python.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import common
import fidelity

ROOT = common.BENCH.parent
FRONT = ["colocation", "space", "swap"]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
COLOURS = {
    "alone": "#8c8c8c",
    "time-slicing": "#d9822b",
    "mps": "#b6535c",
    "fixed": "#7a6fb0",
    "gpumux": "#2b7bba",
}
RATIOS = {"latency_p99_ms": "p99 ÷ alone", "batch_rate": "batch rate ÷ alone"}
UNITS = {"ms": "ms", "us": "µs", "s": "s"}
# Names that end like a unit but are none.
RATES = {"batch_rate": "batch rate (1/s)"}


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
        return " ".join(words[:-1]).replace("p999", "p99.9") + f" ({UNITS[words[-1]]})"
    return " ".join(words)


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


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, with ratios to the mode alone."""
    names = columns(rows)
    relative = [name for name in ("latency_p99_ms", "batch_rate") if name in names]
    relative = [name for name in relative if any(compared(row, rows, name) for row in rows)]
    head = ["case", "mode", *map(title, names), *(RATIOS[name] for name in relative)]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for row in rows:
        ratios = [compared(row, rows, name) for name in relative]
        cells = [
            row["case"],
            row["mode"],
            *(number(row["values"][name]) if name in row["values"] else "" for name in names),
            *(f"{ratio:.2f}" if ratio is not None else "" for ratio in ratios),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(data: dict[str, Any]) -> str:
    """One results file in Markdown."""
    return "\n\n".join(
        [
            f"### {data['bench']}: {data['device']}",
            f"Driver {data['driver']}, {data['date']}, commit `{data['commit'][:12]}`: `{data['command']}`",
            *map(table, groups(data["rows"])),
        ]
    )


def bars(data: dict[str, Any], name: str, x: int, width: int) -> Iterable[str]:
    """One panel: a bar per case and mode."""
    rows = [row for row in data["rows"] if name in row["values"]]
    most = max((row["values"][name] for row in rows), default=0) or 1
    yield f'<text x="{x}" y="44" class="head">{escape(title(name))}</text>'
    y, case = 54, None
    for row in rows:
        if row["case"] != case:
            case, y = row["case"], y + 18
            yield f'<text x="{x}" y="{y}" class="case">{escape(case)}</text>'
            y += 6
        value = row["values"][name]
        length = max(1.0, value / most * (width - 190))
        colour = COLOURS.get(row["mode"], "#555555")
        yield f'<text x="{x + 96}" y="{y + 12}" text-anchor="end">{escape(row["mode"])}</text>'
        yield f'<rect x="{x + 102}" y="{y + 2}" width="{length:.1f}" height="13" fill="{colour}"/>'
        yield f'<text x="{x + 108 + length:.1f}" y="{y + 12}">{number(value)}</text>'
        y += 18


def picture(data: dict[str, Any]) -> str | None:
    """An SVG of the latencies and the batch rate, or nothing where there are none."""
    names = [name for name in ("latency_p99_ms", "batch_rate") if name in columns(data["rows"])]
    if not names:
        return None
    cases = len({row["case"] for row in data["rows"]})
    height, width = 84 + 24 * cases + 18 * len(data["rows"]), 470
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(names)}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        "<style>text{fill:#24292f}.head{font-weight:bold;font-size:13px}.case{font-weight:bold}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15">{escape(data["bench"])}: {escape(data["device"])}</text>',
    ]
    for place, name in enumerate(names):
        lines += bars(data, name, 12 + place * width, width)
    return "\n".join([*lines, "</svg>", ""])


def between(path: Path, begin: str, end: str, new: str) -> str:
    """The file's text with what stands between two marks replaced."""
    text = path.read_text()
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise common.BenchError(f"{path} needs one {begin} and after it one {end}")
    return text[: text.index(begin) + len(begin)] + "\n" + new + text[text.index(end) :]


def outputs(results: Path, readme: Path, rest: Path | None = None, book: Path | None = None) -> dict[Path, str]:
    """All files that this program writes, and their text. Without `rest`, all tables go into the README."""
    files: dict[Path, str] = {}
    sections: dict[Path, list[str]] = {path: [] for path in (readme, rest) if path}
    reports = []
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text())
        common.check_results(data)
        if data["bench"] == "fidelity":
            reports.append(data)
            continue
        page = rest if rest and data["bench"] not in FRONT else readme
        text = section(data)
        if svg := picture(data):
            files[path.with_suffix(".svg")] = svg
            where = os.path.relpath(path.with_suffix(".svg"), page.parent)
            text += f"\n\n![{data['bench']} on {data['device']}]({where})"
        sections[page].append(text)
    for page, texts in sections.items():
        files[page] = between(page, BEGIN, END, "".join(text + "\n\n" for text in texts))
    if book:
        text = fidelity.table(reports, number, title) + "\n"
        files[book] = between(book, fidelity.TABLE_BEGIN, fidelity.TABLE_END, text)
    return files


def main() -> int:
    """Writes the files, or checks that they are up to date."""
    parser = argparse.ArgumentParser(description="Results into tables and SVG pictures.")
    parser.add_argument("--results", type=Path, default=common.BENCH / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--rest", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--book", type=Path, default=ROOT / "docs" / "fidelity.md")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would")
    options = parser.parse_args()
    files = outputs(*(path.resolve() for path in (options.results, options.readme, options.rest, options.book)))
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if options.check:
        for path in stale:
            print(f"{path} does not match bench/results: run python3 bench/plot.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(files[path])
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
