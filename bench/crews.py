"""What gpumux adds to something short that a program does: programs that live at the same time and alternate.

A *crew* is three processes of one program, two without gpumux and one with, on two cores of their own unless
they have more threads. In a round each of a crew measures many short
batches, in an order that the next round reverses. Of a turn's batches, counts the time that a tenth is below: what the host disturbs is
longer. Of a crew counts the median of its rounds, since two equal processes may differ for as long as they live.

- The value of a mode is the median over the crews, its interval from the least to the most.
- *Added* is the time with gpumux less the mean of the two without, by crew.
- *Noise* is the difference between the two without, the most of all crews: what is added is known no better than that.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import common
from common import Mode, Results, Worker

UNDISTURBED = 0.1
CALLS = 64  # of a batch
PLAIN, AGAIN, MANAGED = "alone", "again", "gpumux"
# Between the modes of a crew nothing else changes.
CREW = (PLAIN, MANAGED, AGAIN)

Batches = dict[str, list[float]]


class Found(NamedTuple):
    """One quantity, by crew."""

    plain: list[float]
    managed: list[float]
    added: list[float]
    noise: list[float]


def orders(rounds: int) -> list[tuple[str, ...]]:
    """The order in which a crew is measured, by round."""
    return [CREW if number % 2 == 0 else CREW[::-1] for number in range(rounds)]


def median_turn(turns: Sequence[Sequence[float]]) -> float:
    """Of a process's turns, each with its batches."""
    return statistics.median(common.quantile(batches, UNDISTURBED) for batches in turns)


def of_crews(crews: Sequence[dict[str, list[Batches]]]) -> dict[str, Found]:
    """Every quantity that the crews measured, from the answers of each by round."""
    found = {}
    for name in crews[0][PLAIN][0]:
        plain, again, managed = ([median_turn([it[name] for it in crew[member]]) for crew in crews] for member in (PLAIN, AGAIN, MANAGED))
        both = [(a + b) / 2 for a, b in zip(plain, again, strict=True)]
        added = [a - b for a, b in zip(managed, both, strict=True)]
        found[name] = Found(both, managed, added, [abs(a - b) for a, b in zip(plain, again, strict=True)])
    return found


def tell(**values: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(values), flush=True)


def answer(name: str, call: Callable[[], object], settle: Callable[[], object] = lambda: None) -> None:
    """For a crew's program: warms up, says so, and answers orders with the µs of one call, by batch. A batch is far shorter than the driver's queue."""

    def batches(count: int) -> list[float]:
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append((time.perf_counter() - begin) / CALLS * 1e6)
            settle()
        return found

    batches(50)
    gc.disable()
    tell(ready=True)
    for line in sys.stdin:
        tell(batches={name: batches(json.loads(line)["batches"])})


def cores(number: int) -> str:
    """Two cores of a crew, which no other one has if there are enough."""
    every = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, sorted({every[(2 * number + n) % len(every)] for n in range(2)})))


def measure(
    plain: Mode, managed: Mode, name: str, command: Sequence[str], crews: int, rounds: int, batches: int, pinned: bool = True
) -> dict[str, Found]:
    """Starts all crews of programs that answer orders of so many batches, and has each member answer in turn."""

    def ask(worker: Worker) -> Batches:
        worker.send(batches=batches)
        return worker.reply(common.REPLY_S)["batches"]

    with contextlib.ExitStack() as stack:
        started: list[dict[str, Worker]] = []
        for number in range(crews):
            crew = {}
            for member in CREW:
                mode = managed if member == MANAGED else plain
                worker = Worker(f"{name}-{number}-{member}", [], mode, program=[*(["taskset", "-c", cores(number)] if pinned else []), *command])
                stack.callback(worker.close, 2.0)
                crew[member] = worker
            started.append(crew)
        for crew in started:
            for worker in crew.values():
                worker.reply(common.READY_S)
        answers: list[dict[str, list[Batches]]] = [{member: [] for member in CREW} for _ in started]
        for order in orders(rounds):
            for crew, theirs in zip(started, answers, strict=True):
                for member in order:
                    theirs[member].append(ask(crew[member]))
    return of_crews(answers)


def add(results: Results, case: str, found: dict[str, Found], unit: str) -> None:
    """The rows of both modes: `NAME_UNIT`, of `alone` also its noise, and of `gpumux` what it adds."""
    rows: dict[str, tuple[dict[str, float], dict[str, list[float]]]] = {PLAIN: ({}, {}), MANAGED: ({}, {})}

    def put(mode: str, key: str, values: Sequence[float]) -> None:
        rows[mode][0][key] = statistics.median(values)
        rows[mode][1][key] = [min(values), max(values)]

    for name, it in found.items():
        put(PLAIN, f"{name}_{unit}", it.plain)
        put(MANAGED, f"{name}_{unit}", it.managed)
        put(MANAGED, f"{name}_added_{unit}", it.added)
        rows[PLAIN][0][f"{name}_noise_{unit}"] = max(it.noise)
    for mode, (values, around) in rows.items():
        results.add(case, mode, values, around)
