"""Elastic memory (`gpumux.kv`): what it costs, and whether guaranteed memory is there whatever its borrower does.

`granules`: memory of so many granules of one size is had and given back, at once and one by one. Cases: sizes of a granule. Values, of one
granule: `commit_us`, `decommit_us` (64 at once), `one_commit_us`, `one_decommit_us`.

`ranks`: the same of one process, and of two on two GPUs, that get memory together or not at all, as an engine's ranks do (`gpumux._ranks`). Modes: how many.

`guarantee`: a borrower has all of the device that it can get, and a tenant with a guarantee of `--guarantee` wants that. Cases: the borrower's pages
are `free`, `cached` or `in-use` (in the first two, 1 GiB is in use). Modes, what the borrower does: `cooperates` (waits for requests), `locked` (a thread
holds Python's lock), `frozen` (both work without a pause, the borrower in class batch, the other in class latency), `dead` (killed; from then on). Values:
`ms` (until the guarantee is there; median of the rounds), `max_ms`, `first_ms` (of the first round; a borrower's first move to the host also makes host memory; in results up to commit e179d3db, of a case's first row in all), `holder_gib`,
`verified_gib` (bytes in use of the borrower that were compared afterwards), `wrong` pages of both, `taken` granules, `moves`.

`random`: two pools at which pages are taken into use, freed, made a cache and looked for again at random, while each gets what the other has. Values: `takes` (granules
that the daemon took), `moves` to the host, `changes`, `wrong`, `lost` (cached pages), `refused` requests.

Every page in use is compared word by word with what was written; a wrong one fails the cell.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
from common import BenchError, Gpumux, Mode, Results, Worker, until
from memory import Api, Nvml, cell, each, holding, started

WORKER = Path(__file__).resolve().parent / "kv_worker.py"
GIB, MIB = 1 << 30, 1 << 20
PATIENCE_S = 180.0
STATES, CONDITIONS = ["free", "cached", "in-use"], ["cooperates", "locked", "frozen", "dead"]
PARTS = {
    "granules": (["2MiB", "16MiB", "64MiB"], ["gpumux"]),
    "ranks": (["2MiB", "16MiB", "64MiB"], ["1", "2"]),
    "guarantee": (STATES, CONDITIONS),
    "random": (["two-pools"], ["gpumux"]),
}


def bytes_of(text: str) -> int:
    """`20GiB` or `64MiB`."""
    return int(float(text[:-3]) * {"GiB": GIB, "MiB": MIB}[text[-3:]])


def worker(size: int, options: argparse.Namespace, *arguments: str) -> list[str]:
    """The command of a process with a pool."""
    plain = ["--no-torch"] if options.no_torch else []
    return [sys.executable, str(WORKER), "--bytes", str(size), "--page", str(options.page), *plain, *arguments]


@contextlib.contextmanager
def pool(mode: Gpumux, name: str, command: Sequence[str], *promise: str) -> Iterator[Worker]:
    """Such a process, which has its pool."""
    with started(mode, name, command, promise) as process:
        process.reply(common.READY_S)
        yield process


def order(process: Worker, do: str, **arguments: Any) -> dict[str, Any]:
    """Its answer."""
    process.send(do=do, **arguments)
    return process.reply(PATIENCE_S)


@contextlib.contextmanager
def left(mode: Gpumux, size: int, logs: Path) -> Iterator[int]:
    """About so many bytes are free for tenants, and how many: a program that is none has the rest. An idle tenant's would be lent to others."""
    device = Api(mode).device()
    free = lambda: Api(mode).memory()["free"]  # noqa: E731
    before = free()
    rest = (before - size - device["context_bytes"]) // MIB
    with holding(Mode("alone", logs), "rest", f"{rest}MiB"):
        until("the daemon's look at the device", 10, lambda: free() < before - rest * MIB // 2)
        yield free()


def tenant(mode: Gpumux, name: str) -> dict[str, Any]:
    """What the API tells of a program's tenant."""
    return next(it for it in Api(mode).ask("GET", "/v1/tenants") if it["name"] == mode.tenants[name])


def moves(mode: Gpumux, name: str) -> int:
    """How often a tenant's memory went to the host."""
    return tenant(mode, name)["moves"]["outs"]


def granules(case: str, name: str, logs: Path, options: argparse.Namespace) -> dict[str, float]:
    """What a granule costs, of one process, or of so many ranks."""
    size = bytes_of(case)
    ranks = ["--ranks", name] if name.isdigit() else []
    with Gpumux("gpumux", logs) as mode, pool(mode, f"granules-{case}", worker(options.granules * size, options, "--granule", str(size), *ranks)) as process:
        return order(process, "granules", count=options.granules, tries=options.tries)


def guarantee(results: Results, cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """How long a guarantee takes."""
    for case in cases:
        what = f"guarantee {case}"
        with cell(results, what, logs), Gpumux("gpumux", logs) as mode, contextlib.ExitStack() as stack:
            size, total = bytes_of(options.guarantee), Nvml().memory().total
            promise = ["--class", "latency", "--memory-guaranteed", str(size + size // 16 + 64 * MIB)]
            owner = stack.enter_context(pool(mode, "owner", worker(size, options, "--salt", "3"), *promise))
            borrower = stack.enter_context(pool(mode, "borrower", worker(total // 100 * 95, options, "--salt", "5"), "--class", "batch"))
            for condition in modes:
                with cell(results, f"{what}, {condition}", logs):
                    results.add(case, condition, one(mode, owner, borrower, case, condition, options))


def one(mode: Gpumux, owner: Worker, borrower: Worker, case: str, condition: str, options: argparse.Namespace) -> dict[str, float]:
    """One condition of the borrower, in rounds."""
    took, wrong, found = [], 0, {}
    for _ in range(1 if condition == "dead" else options.rounds):
        order(owner, "release")
        order(borrower, "release")
        borrowed = order(borrower, "fill", state=case, keep=bytes_of(options.keep))["holder_gib"]
        # Others borrow a guarantee once its owner was idle for a while, and reports are at most 50 ms old.
        time.sleep(0.2)
        before = moves(mode, "borrower")
        if condition == "locked":
            order(borrower, "lock", seconds=options.lock_s)
        elif condition == "frozen":
            order(borrower, "work", on=True)
            order(owner, "work", on=True)
            time.sleep(0.5)
        elif condition == "dead":
            killed = time.monotonic()
            borrower.process.send_signal(signal.SIGKILL)
        answer = order(owner, "get", size=bytes_of(options.guarantee), wait_s=PATIENCE_S / 2)
        took.append(answer["ms"] if condition != "dead" else answer["ms"] + max(0.0, answer["at"] - killed - answer["ms"] / 1000))
        wrong += answer["wrong"]
        if condition == "dead":
            found = {"verified_gib": 0.0, "taken": 0, "moves": 0}
            break
        if condition == "frozen":
            order(owner, "work", on=False)
        count = moves(mode, "borrower") - before
        order(owner, "release")
        if condition == "locked":
            borrower.reply(PATIENCE_S)
        if condition == "frozen":
            order(borrower, "work", on=False)
        verified = order(borrower, "verify")
        wrong += verified["wrong"]
        found = {"verified_gib": verified["verified_gib"], "taken": verified["taken"], "moves": count}
    if wrong:
        raise BenchError(f"{wrong} pages have other contents than were written")
    return {"ms": statistics.median(took), "max_ms": max(took), "first_ms": took[0], "holder_gib": borrowed, "wrong": wrong, **found}


def random_takes(results: Results, _cases: Sequence[str], _modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """Two pools on what a third tenant leaves."""
    with cell(results, "random", logs), Gpumux("gpumux", logs) as mode, contextlib.ExitStack() as stack:
        room, rng = bytes_of(options.room), random.Random(7)
        # Of a guarantee, what others have as a cache or in use comes, too.
        promise = ["--memory-guaranteed", str(room // 3)]
        pools = [stack.enter_context(pool(mode, f"pool-{n}", worker(room * 2, options, "--salt", str(n + 3)), *promise)) for n in range(2)]
        stack.enter_context(left(mode, 2 * room, logs))
        begin, changes, sums = time.monotonic(), 0, {"wrong": 0, "lost": 0, "refused": 0}
        taken = 0
        while taken < options.takes and time.monotonic() < begin + options.seconds:
            for process in pools:
                size = rng.randrange(room // 4, room * 3 // 2)
                answer = order(process, "shuffle", size=size)
                changes += 1
                for name in sums:
                    sums[name] += answer[name]
            verified = [order(process, "verify") for process in pools]
            sums["wrong"] += sum(it["wrong"] for it in verified)
            taken = sum(it["taken"] for it in verified)
        if sums["wrong"]:
            raise BenchError(f"{sums['wrong']} pages have other contents than were written")
        count = sum(moves(mode, f"pool-{n}") for n in range(2))
        results.add("two-pools", "gpumux", {"takes": taken, "moves": count, "changes": changes, **sums})


RUN = {"granules": each(granules), "ranks": each(granules), "guarantee": guarantee, "random": random_takes}


def usual(part: str) -> tuple[list[str], list[str]]:
    """The cases and modes of a part on this machine: no more ranks than GPUs."""
    cases, modes = PARTS[part]
    return cases, [it for it in modes if part != "ranks" or int(it) <= Nvml().count()]


def main() -> int:
    """Runs one part, or all."""
    parser = common.parser(
        "Elastic memory: its cost, and guarantees whatever a borrower does.",
        "  GPUMUX=.bundle/bin/gpumux python3 bench/kv.py all --quick\n"
        "  GPUMUX=.bundle/bin/gpumux python3 bench/kv.py guarantee --cases in-use --rounds 5\n"
        "  gpumux emu --profile FILE -- python3 bench/kv.py all --no-torch --guarantee 64MiB --keep 16MiB --room 64MiB --page 1048576 --granules 4",
    )
    common.parts(parser, PARTS)
    parser.add_argument("--rounds", type=int, help="of `guarantee` [5; 2 with --quick]")
    parser.add_argument("--guarantee", default="20GiB", help="[%(default)s]")
    parser.add_argument("--keep", default="1GiB", help="in use by the borrower of `free` and `cached` [%(default)s]")
    parser.add_argument("--lock-s", type=float, default=12.0, help="for how long Python's lock is held [%(default)s]")
    parser.add_argument("--granules", type=int, default=64, help="at once [%(default)s]")
    parser.add_argument("--tries", type=int, default=30, help="[%(default)s]")
    parser.add_argument("--page", type=int, default=2 * MIB, help="bytes [%(default)s]")
    parser.add_argument("--room", default="6GiB", help="of a pool of `random` [%(default)s]")
    parser.add_argument("--takes", type=int, help="of `random` [1000; 200 with --quick]")
    parser.add_argument("--seconds", type=float, help="of `random`, at most [300; 30 with --quick]")
    parser.add_argument("--no-torch", action="store_true", help="contents by the driver's copies, as on the emulated device")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.takes = options.takes or (200 if options.quick else 1000)
    options.seconds = options.seconds or (30.0 if options.quick else 300.0)
    logs = common.begin(options)
    return common.run_parts(parser, options, PARTS, lambda part, *chosen: RUN[part](*chosen, logs, options), "kv-", usual)


if __name__ == "__main__":
    sys.exit(main())
