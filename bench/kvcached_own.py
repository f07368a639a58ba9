"""kvcached's own benchmarks of its allocator, from a tree of its source (`--tree`): with its native module (`kvcached`), and with gpumux's memory in its place
(`kvcached-gpumux`), which take turns in rounds.

Cases: `alloc` (`bench_alloc.py`: µs to allocate and free so many blocks), `map` (`kvcached_map_parallel_benchmark.py`: ms until one process has mapped all pages, and
until four have on the same GPU; each contiguous page has 128 MiB), `frag` (`bench_frag.py`: GB that a cache holds whose blocks are so far apart), `evict` (`bench_evict.py`: GB that it
gives back when it keeps an eighth of them). The native module must be built: `python3 setup.py build_ext --inplace` in the tree. Where a benchmark names an argument as
kvcached 0.1.5 did and this one does not, it is renamed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import common
import engines
import rounds
from common import BenchError, Mode, Results

PAGES = "kvcached_map_parallel_benchmark.py"
SCRIPTS: dict[str, tuple[str, Sequence[str]]] = {
    "alloc": ("bench_alloc/bench_alloc.py", ()),
    "map": (f"bench_map_parallelism/{PAGES}", ("--pages-total", "64", "--procs", "4", "--iters", "3", "--device-mode", "same")),
    "frag": ("bench_frag/bench_frag.py", ()),
    "evict": ("bench_frag/bench_evict.py", ()),
}
# By the first column of their table: how a value is called, and its column.
COLUMNS = {"alloc": ("alloc_free_{}_us", 2), "frag": ("held_{}_gb", 3), "evict": ("freed_{}_gb", 5)}
MODES = ["kvcached", "kvcached-gpumux"]
LONGEST_S = 120.0


def found(case: str, text: str) -> dict[str, float]:
    """The values that a benchmark has printed."""
    if case == "map":
        tables = re.findall(r"=+ (Serial|Parallel) case.*?mean wall\s*\|\s*([\d.]+)", text, re.S)
        values = {f"{name.lower()}_ms": float(ms) for name, ms in tables}
    else:
        name, column = COLUMNS[case]
        rows = [line.split() for line in text.splitlines() if re.fullmatch(r"\s*(\d[\d.]*x?\s*)+", line)]
        values = {name.format(row[0]): float(row[column].rstrip("x")) for row in rows if len(row) > column}
    if not values:
        raise BenchError(f"kvcached's benchmark `{case}` printed no table: {text[-300:]}")
    return values


def adapted(tree: Path, case: str, folder: Path) -> Path:
    """The benchmark, as this kvcached can run it."""
    script = tree / "benchmarks" / SCRIPTS[case][0]
    interfaces = tree / "kvcached/integration/vllm/interfaces.py"
    try:
        text, names = script.read_text(encoding="utf-8"), interfaces.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{tree} is no tree of kvcached's with its benchmarks: {error}") from error
    if "tp_size: int" not in names:
        text = text.replace("tp_size=", "world_size=")
    made = folder / script.name
    made.write_text(text, encoding="utf-8")
    return made


def measure(mode: Mode, case: str, script: Path, logs: Path, number: int) -> dict[str, float]:
    """One run of a benchmark."""
    module = ["-m", "gpumux.compat.kvcached"] if mode.name == "kvcached-gpumux" else []
    command = mode.command([sys.executable, *module, str(script), *SCRIPTS[case][1]], f"{case}-{number}", None)
    log = logs / f"{mode.name}-{case}-{number}.log"
    process = mode.start(command, log)
    try:
        code = process.wait(LONGEST_S)
    finally:
        common.end(process)
    if code:
        raise BenchError(f"`{case}` ended with {code}: {common.tail(log, 3)}")
    return found(case, log.read_text(errors="replace"))


def main() -> int:
    """Runs cases in modes, in rounds."""
    parser = common.parser(
        "kvcached's own benchmarks on gpumux's memory.", "  GPUMUX=.bundle/bin/gpumux python3 bench/kvcached_own.py --tree kvcached-0.1.6 --rounds 5\n"
    )  # fmt: skip
    parser.add_argument("--tree", type=Path, required=True, help="kvcached's source with its benchmarks, and its native module built there")
    parser.add_argument("--rounds", type=int, default=5, help="of each case [%(default)s; 1 with --quick]")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for all [%(default)s]")
    common.selections(parser, list(SCRIPTS), MODES)
    options = parser.parse_args()
    logs, left = common.begin(options), engines.Budget(options.budget)
    package, tree = common.BENCH.parent / "python", options.tree.resolve()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(package), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    results = Results("kvcached-own", options.out, list(SCRIPTS), MODES)
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            with results.cell(case):
                compare(results, case, adapted(tree, case, Path(folder)), logs, left, options)
    return results.finish()


def compare(results: Results, case: str, script: Path, logs: Path, left: engines.Budget, options: argparse.Namespace) -> None:
    """One case in all modes, each round beginning with another. One that fails is left out from then on."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in options.modes}
    for number in range(1 if options.quick else options.rounds):
        turn = number % len(options.modes)
        for name in [*options.modes[turn:], *options.modes[:turn]]:
            if name in seen:
                left.check(10)
                with results.cell(f"{case}, {name}"), engines.mode_of(name, logs) as mode:
                    seen[name].append(measure(mode, case, script, logs, number))
        seen = {name: values for name, values in seen.items() if len(values) > number}
        for name, values in seen.items():
            means = engines.means(values, values)
            around = {key: rounds.interval(mean, len(values)) for key, mean in means.items()} if len(values) >= rounds.LEAST else None
            results.add(case, name, {key: mean([1] * len(values)) for key, mean in means.items()} | {"rounds": len(values)}, around)


if __name__ == "__main__":
    sys.exit(main())
