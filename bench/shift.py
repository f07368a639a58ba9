"""Engines that share the memory of one GPU while their loads change: real vLLM with random weights, each mode with the same memory for all KV caches.

`--engines` engines have `--room` of memory for their KV caches together. The run has as many phases of `--phase` seconds as there are engines. In each phase
another engine receives `--high` requests a second, and the others `--low`. Arrivals are random, and the same in each mode. In the modes without a fixed
split another program has the rest of the device but for 64 MiB an engine, by which leases may be larger than what is in them.

With `--storm N` all engines have N requests each at the same moment instead; a round lasts as long as its phases would at most. Choose N so
that the caches of all need more than the room.

Modes: `stock` (vLLM as it is, an equal part for each), `gpumux` (the same under `gpumux run`), `elastic` (`gpumux.vllm`), `kvcached` (kvcached with its
native module, without gpumux), `kvcached-gpumux` (its Python code on `gpumux.compat.kvcached`). `stock` and `gpumux` come first: from them follows what the other program has.

Values: `ttft_mean_ms`, `ttft_p50_ms`, `ttft_p99_ms` (times to the first token; of a request without one, the time that it waited until the end); `high_ttft_mean_ms` of
requests in their engine's phase of high load; `tpot_p50_ms`, `tpot_p99_ms` (times of each further token); `requests_per_s` (finished ones, until the last token);
`finished`, the part of all requests; `aborts`, engines that ended meanwhile; `taken` and `refused` granules of `elastic`. All rounds are pooled, with intervals
from five rounds on.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import engines
import kv
import rounds
import serve
from common import BenchError, Gpumux, Mode, Results
from memory import Nvml, cell, holding

SPLIT = {"stock", "gpumux"}
SETTLED_S = 1.0  # Reports to the daemon are up to 50 ms old.
WARM, WARM_S = 6, 30.0  # requests that fill vLLM's largest step
# A lease may be so much larger than what is in it; what the driver keeps for one process.
LEASE, CONTEXT = 64 << 20, 600 << 20


class Request(NamedTuple):
    """When it comes (seconds from the start), tokens given, tokens made, and whether its engine has a high load then."""

    at: float
    prompt: int
    output: int
    high: bool


def load(number: int, count: int, options: argparse.Namespace, seed: int) -> list[Request]:
    """The requests of one of `count` engines."""
    if options.storm:
        return [Request(0.0, options.prompt, options.output, True)] * options.storm
    rng, found = random.Random(seed * 1000 + number), list[Request]()
    for phase in range(count):
        high = phase == number
        rate, begin = (options.high if high else options.low), phase * options.phase
        arrivals = common.poisson(rng, rate, begin, begin + options.phase)
        found += [Request(at, options.prompt, options.output, high) for at in arrivals]
    return found


def values(came: Sequence[Sequence[Request]], answers: Sequence[dict[str, Any]], stop_s: float) -> dict[str, list[float]]:
    """Of all engines together: `ttft`, `high` and `tpot` in ms; `finished` ones, 1 or 0; and when the last token came."""
    found: dict[str, list[float]] = {"ttft": [], "high": [], "tpot": [], "finished": [], "end": [0.0]}
    for requests, answer in zip(came, answers, strict=True):
        for it in serve.served(requests, answer):
            found["ttft"].append(it.waited_ms(stop_s))
            found["high"] += found["ttft"][-1:] if it.asked.high else []
            found["tpot"] += [it.tpot_ms] if it.tpot_ms is not None else []
            found["finished"].append(float(it.tokens >= it.asked.output))
            found["end"][0] = max(found["end"][0], it.last_s)
    return found


def row(found: Sequence[dict[str, list[float]]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Values of all rounds, and their intervals."""
    if not any(sum(one["finished"]) for one in found):
        raise BenchError("no request was finished")

    def of(times: Sequence[int]) -> dict[str, float]:
        pooled = {name: [it for one, n in zip(found, times, strict=True) for it in one[name] * n] for name in found[0]}
        made = {"ttft_mean_ms": statistics.fmean(pooled["ttft"]), "high_ttft_mean_ms": statistics.fmean(pooled["high"])}
        made |= common.quantiles("ttft", pooled["ttft"]) | common.quantiles("tpot", pooled["tpot"])
        return made | {"requests_per_s": sum(pooled["finished"]) / max(sum(pooled["end"]), 1e-9), "finished": statistics.fmean(pooled["finished"])}

    values = of([1] * len(found))
    if len(found) < rounds.LEAST:
        return values, {}
    drawn = [of(times) for times in rounds.draws(len(found))]
    return values, {name: rounds.between([one[name] for one in drawn]) for name in values if all(name in one for one in drawn)}


def served(workers: Sequence[engines.Worker], requests: Sequence[Sequence[Request]], stop_s: float) -> list[dict[str, Any]]:
    """What the engines did with their requests; one that has ended did nothing."""
    nothing = lambda own: {"first_s": [None] * len(own), "last_s": [None] * len(own), "tokens": [0] * len(own), "ended": True}  # noqa: E731
    alive = [it for it in workers if it.process.poll() is None]
    engines.send(alive, [[it[:3] for it in own] for own, worker in zip(requests, workers, strict=True) if worker in alive], stop_s, ends=True)
    answers = []
    for worker, own in zip(workers, requests, strict=True):
        try:
            answers.append(worker.reply(stop_s + common.REPLY_S) if worker in alive else nothing(own))
        except BenchError as error:
            if worker.process.poll() is None:
                raise
            common.say(f"error: {worker.name} has ended: {error}")
            answers.append(nothing(own))
    return answers


def rest(usable: int, used: int, room: int, mode: str, count: int) -> int:
    """Bytes that the other program has, where `used` are those of all `count` engines that have served requests, without KV caches."""
    # kvcached leaves 1% of the device free.
    size = usable - used - room - count * LEASE - (usable // 99 if mode.startswith("kvcached") else 0)
    if size < 0:
        raise BenchError(f"the engines have {used / engines.GIB:.1f} GiB without KV caches: with {room / engines.GIB:.1f} GiB more, too much for the device")
    return size


def device(mode: Mode, count: int) -> tuple[int, int]:
    """Bytes for `count` programs, without their contexts where gpumux counts; and the bytes that these programs have now."""
    if not isinstance(mode, Gpumux):
        memory = Nvml().memory()
        return memory.total - CONTEXT, memory.used
    api = kv.Api(mode)
    one, tenants = api.device(), api.ask("GET", "/v1/tenants")
    return one["memory_guaranteeable"] - count * one["context_bytes"], sum(it["in_use"] for tenant in tenants for it in tenant["memory"][:1])


def warm(workers: Sequence[engines.Worker], options: argparse.Namespace) -> None:
    """A few requests: kernels are compiled, and PyTorch has got what steps need beside the KV cache, and keeps it."""
    options.left.check(WARM_S)
    answers = engines.replay(workers, [[(0.0, options.prompt, 2)] * WARM] * len(workers), WARM_S, ends=True)
    for worker, answer in zip(workers, answers, strict=True):
        if min(answer["tokens"]) < 2:
            raise BenchError(f"{worker.name} did not serve {WARM} requests within {WARM_S:.0f} s: see {worker.log}")


def measure(name: str, used: dict[bool, int], logs: Path, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The values of a mode, and their intervals. `used` has the bytes of all engines without KV caches, without and with gpumux, once they are known."""
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(engines.mode_of(name, logs))
        managed = isinstance(mode, Gpumux)
        workers, cache = [], options.room // options.engines if name in SPLIT else options.room
        for number in range(options.engines):
            workers.append(engines.engine(mode, f"engine-{number}", options, context=8192, kv_cache_memory_bytes=cache, **engines.NO_PREFIXES))
            stack.callback(workers[-1].close)
        for worker in workers:
            engines.ready(worker, options)
            engines.check(name, worker)
        warm(workers, options)
        time.sleep(SETTLED_S)
        usable, now = device(mode, options.engines + 1)
        if managed not in used:
            used[managed] = now - (options.room if name in SPLIT else 0)
        if name not in SPLIT:
            mib = rest(usable, used[managed], options.room, name, options.engines) // kv.MIB
            stack.enter_context(holding(mode, "rest", f"{mib}MiB", promise=["--memory-guaranteed", f"{mib + 64}MiB"]))
        found, ended = [], set[int]()
        for seed in range(options.rounds):
            stop_s = options.engines * options.phase + options.drain
            options.left.check(stop_s)
            came = [load(number, options.engines, options, seed) for number in range(options.engines)]
            answers = served(workers, came, stop_s)
            ended |= {number for number, answer in enumerate(answers) if "ended" in answer}
            found.append(values(came, answers, stop_s))
        made, around = row(found)
        made["aborts"] = float(len(ended))
        if name == "elastic":
            alive = [worker for number, worker in enumerate(workers) if number not in ended]
            for worker in alive:
                worker.send(greedy=[[16, 1]])
            states = [worker.reply(common.REPLY_S) for worker in alive]
            made |= {it: sum(state[it] for state in states) for it in ("taken", "refused")}
        return made, around


def main() -> int:
    """Runs the modes, until the budget is spent."""
    parser = common.parser(
        "Engines that share the memory of one GPU while their loads change.",
        "  PYTHONPATH=DIR/carry:DIR/carry_deps GPUMUX=.bundle/bin/gpumux python3 bench/shift.py --quick --budget 200\n"
        "  PYTHONPATH=DIR/carry:DIR/carry_deps:KVCACHED GPUMUX=.bundle/bin/gpumux python3 bench/shift.py --engines 3 --room 12GiB\n"
        "  ... python3 bench/shift.py --engines 6 --storm 24 --shape 1b --room 6GiB --modes stock,elastic,kvcached"
    )
    parser.add_argument("--modes", type=common.listed(engines.MODES), default=engines.MODES, help="[all]")
    parser.add_argument("--budget", type=float, default=1200.0, help="seconds for all [%(default)s]")
    parser.add_argument("--engines", type=int, help="[3; 2 with --quick]")
    parser.add_argument("--phase", type=float, help="seconds [20; 8 with --quick]")
    parser.add_argument("--drain", type=float, default=10.0, help="seconds at the end without arrivals, at most [%(default)s]")
    parser.add_argument("--rounds", type=int, help="of all phases [5; 1 with --quick]")
    parser.add_argument("--room", help="of memory for all KV caches [12GiB; 3GiB with --quick]")
    parser.add_argument("--high", type=float, help="requests a second [8; 12 with --quick]")
    parser.add_argument("--low", type=float, default=0.5, help="requests a second [%(default)s]")
    parser.add_argument("--prompt", type=int, default=3072, help="tokens [%(default)s]")
    parser.add_argument("--output", type=int, default=128, help="tokens [%(default)s]")
    parser.add_argument("--memory", type=float, default=0.2, help="part of the GPU's memory that vLLM wants to see free [%(default)s]")
    parser.add_argument("--attention", default="TRITON_ATTN", help="vLLM's attention backend [%(default)s]")
    parser.add_argument("--storm", type=int, default=0, metavar="N", help="requests of each engine, all at the same moment, instead of phases")
    parser.add_argument("--shape", choices=engines.SHAPES, help="Llama 3's by parameters [8b; 1b with --quick]")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="decode by CUDA graphs")
    parser.set_defaults(stand_in=False, ranks=1, library="vllm")
    options = parser.parse_args()
    logs = common.begin(options)
    for name, usual, quick in (("engines", 3, 2), ("phase", 20.0, 8.0), ("rounds", 5, 1), ("room", "12GiB", "3GiB"), ("high", 8.0, 12.0)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    options.room, options.left = kv.bytes_of(options.room), engines.Budget(options.budget)
    engines.one_runner(options.modes)
    options.model = engines.prepare(logs, engines.SHAPES[options.shape or ("1b" if options.quick else "8b")])
    case = f"{options.engines}-engines" + ("-storm" if options.storm else "")
    results, used, notes = Results("shift", options.out, [case], engines.MODES), dict[bool, int](), list[str]()
    for name in [it for it in engines.MODES if it in options.modes]:
        with cell(results, f"{case}, {name}", logs), noted(notes, name):
            options.left.check(20)
            results.add(case, name, *measure(name, used, logs, options))
    if notes and results.data["rows"]:
        results.data["note"] = "; ".join(notes)
        results.write()
    return results.finish()


@contextlib.contextmanager
def noted(notes: list[str], mode: str) -> Iterator[None]:
    """Why a mode has no row is a note in the results."""
    try:
        yield
    except Exception as error:
        notes.append(f"{mode}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        raise


if __name__ == "__main__":
    sys.exit(main())
