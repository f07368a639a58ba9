"""Real vLLM with an elastic KV cache (`gpumux.vllm`), beside vLLM as it is, with random weights.

`saturation`: `--requests` requests at once, of 128 tokens, which make 128. Modes `stock` (without gpumux), `gpumux` (vLLM as it is under `gpumux run`), `elastic`. Values:
`tokens_per_s`, `ttft_p50_ms`, `ttft_p99_ms` (times to the first token), `tpot_p50_ms`, `tpot_p99_ms` (times of each further token); `taken` and `refused` granules of `elastic`.

`tokens`: greedy tokens of the same requests, in rounds, while another tenant gets and loses memory at random on a device that has no more. Modes `stock`, `elastic`. Values:
`equal` of `requests`, in rounds whose batches were the same; `other_rounds` (vLLM was refused memory, and made other batches, whose rounding differs), `taken` granules without a page in
use, `moves` and `moved_gib` of granules with pages in use to the host, `changes` of the other tenant's memory. A request with other tokens in a round that counts fails the cell.

`start`: 2 and 6 servers that start at the same moment with vLLM's default part of the memory. Modes `stock`, `gpumux`. Values: `up` (servers that are there), `seconds` (until the last one is there).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import kv
import serve
from common import BenchError, Gpumux, Mode, Results, Worker
from memory import cell, started, wait_for

GIB = 1 << 30
LACKING = 384  # MiB that the other tenant of `tokens` takes from the engine at most
CASES, STARTS = ["saturation", "tokens"], ["start-2", "start-6"]
MODES = ["stock", "gpumux", "elastic"]
LLAMA_3_1B = serve.LLAMA_3_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
PATIENCE_S = 120.0


class Budget:
    """What is left of the time."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def check(self, needed_s: float) -> None:
        """Raises BenchError if there is less."""
        if time.monotonic() + needed_s > self.end:
            raise BenchError(f"the budget is spent: less than {needed_s:.0f} s are left")


@contextlib.contextmanager
def mode_of(name: str, logs: Path) -> Iterator[Mode]:
    """Without gpumux, or with a daemon of its own."""
    with Mode(name, logs) if name == "stock" else Gpumux(name, logs) as mode:
        yield mode


def engine(mode: Mode, name: str, options: argparse.Namespace, **more: Any) -> Worker:
    """A server that starts."""
    arguments = {"attention_backend": options.attention, "enforce_eager": options.eager} | more
    if mode.name == "elastic":
        arguments["worker_cls"] = "gpumux.vllm.Worker"
    memory = arguments.pop("memory", options.memory)
    given = [str(options.model), "--memory", str(memory), "--context", "4096", "--engine", json.dumps(arguments)]
    return Worker(name, given, mode, "latency", serve.ENGINE)


def ready(worker: Worker, options: argparse.Namespace) -> None:
    """It is there."""
    options.left.check(5)
    worker.reply(min(common.READY_S, options.left.end - time.monotonic()))


def saturation(mode: Mode, options: argparse.Namespace) -> dict[str, float]:
    """So many requests at once."""
    worker = engine(mode, "engine", options, kv_cache_memory_bytes=options.cache)
    try:
        ready(worker, options)
        start = time.monotonic() + 0.2
        requests = [[0.0, 128, 128]] * options.requests
        worker.send(start=start, stop=start + options.seconds, requests=requests, ends=True)
        answer = worker.reply(options.seconds + PATIENCE_S)
        worker.send(greedy=[[16, 1]])
        state = worker.reply(PATIENCE_S)
    finally:
        worker.close()
    done = [(first, last, made) for first, last, made in zip(answer["first_s"], answer["last_s"], answer["tokens"], strict=True) if made > 1]
    if not done:
        raise BenchError(f"no request had a token within {options.seconds} s")
    ttft = [first * 1e3 for first, _last, _made in done]
    tpot = [(last - first) / (made - 1) * 1e3 for first, last, made in done]
    span = max(last for _first, last, _made in done)
    found = {"tokens_per_s": sum(answer["tokens"]) / span, "finished": sum(made >= 128 for _f, _l, made in done)}
    for name, values in (("ttft", ttft), ("tpot", tpot)):
        found |= {f"{name}_p50_ms": common.quantile(values, 0.5), f"{name}_p99_ms": common.quantile(values, 0.99)}
    return found | {name: state[name] for name in ("taken", "refused") if name in state}


def greedy(worker: Worker, options: argparse.Namespace, rounds: int) -> list[dict[str, Any]]:
    """The same requests, so many times."""
    found = []
    for _ in range(rounds):
        options.left.check(5)
        worker.send(greedy=[[160 + 3 * number, options.output] for number in range(48)])
        found.append(worker.reply(PATIENCE_S))
    return found


def tokens(logs: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """What each mode made, the second one beside a tenant that takes memory."""
    # A hit in the prefix cache changes how a prompt is computed, and its rounding.
    plain = {"kv_cache_memory_bytes": options.cache, "enable_prefix_caching": False}
    with mode_of("stock", logs) as mode:
        worker = engine(mode, "tokens", options, **plain)
        try:
            ready(worker, options)
            base, again = greedy(worker, options, 2)
        finally:
            worker.close()
    same = sum(a == b for a, b in zip(base["tokens"], again["tokens"], strict=True))
    yield "stock", {"equal": same, "requests": len(base["tokens"]), "preempted": again["preempted"]}
    with mode_of("elastic", logs) as mode, ExitStack() as stack:
        assert isinstance(mode, Gpumux)
        worker = engine(mode, "tokens", options, **plain)
        stack.callback(worker.close)
        ready(worker, options)
        rounds = greedy(worker, options, 1)
        if "taken" not in rounds[0]:
            raise BenchError(f"the KV cache is not elastic: see {worker.log}")
        taker = [sys.executable, str(kv.WORKER), "--bytes", str(6 * GIB), "--page", str(2 * kv.MIB)]
        pool = stack.enter_context(kv.pool(mode, "taker", taker))
        # The rest of the device is taken but for a part that is too small for the other tenant, to whom what it lacks is guaranteed:
        # the engine must give granules, also such with pages in use.
        free = lambda: kv.Api(mode).ask("GET", "/v1/memory")[0]["free"] // kv.MIB  # noqa: E731
        rest = free() - 2 * 1024
        file = logs / "ready-engines"
        file.unlink(missing_ok=True)
        ballast = [common.gpumux(), "workload", "idle", "--memory", f"{rest}MiB", "--seconds", "3600", "--ready-file", str(file)]
        wait_for(file, stack.enter_context(started(mode, "rest", ballast, ["--memory-guaranteed", f"{rest + 64}MiB"])))
        room, own = free(), kv.tenant(mode, "taker")
        setting = [mode.binary, "set", own["name"], "--memory-guaranteed", f"{own['memory'][0]['in_use'] // kv.MIB + room + LACKING + 64}MiB"]
        subprocess.run(setting, env=os.environ | mode.environment(), check=True, timeout=20)
        common.say(f"{room} MiB are left for the taker")
        stop, wrong = threading.Event(), []

        def take() -> None:
            sizes = [it * kv.MIB for it in (room + LACKING, room // 4, room + LACKING // 2, room // 2)]
            for turn in range(10_000):
                if stop.is_set():
                    return
                try:
                    wrong.append(kv.order(pool, "shuffle", size=sizes[turn % 4])["wrong"])
                except BenchError as error:
                    common.say(f"error: the taker: {error}")
                    return

        thread = threading.Thread(target=take)
        thread.start()
        try:
            rounds += greedy(worker, options, options.rounds)
        finally:
            stop.set()
            thread.join(PATIENCE_S)
            moved = kv.tenant(mode, "tokens")["moves"]
    if sum(wrong):
        raise BenchError(f"{sum(wrong)} pages of the other tenant have other contents than were written")
    found: dict[str, float] = {"equal": 0, "requests": 0, "other_rounds": 0, "changes": len(wrong), "taken": rounds[-1]["taken"], "refused": rounds[-1]["refused"]}
    found |= {"moves": moved["outs"], "moved_gib": moved["out_bytes"] / GIB}
    before = 0
    for one in rounds:
        if one["preempted"] or one["refused"] > before:
            found["other_rounds"] += 1
        else:
            found["equal"] += sum(a == b for a, b in zip(base["tokens"], one["tokens"], strict=True))
            found["requests"] += len(base["tokens"])
        before = one["refused"]
    if found["equal"] < found["requests"]:
        raise BenchError(f"other tokens without a refusal: {found}")
    yield "elastic", found


def start(mode: Mode, count: int, options: argparse.Namespace) -> dict[str, float]:
    """So many servers, at the same moment."""
    begin = time.monotonic()
    # vLLM's default: each wants to see nine tenths of its GPU free.
    workers = [engine(mode, f"server-{number}", options, memory=0.9) for number in range(count)]
    up, took = 0, 0.0
    try:
        for worker in workers:
            try:
                ready(worker, options)
                up, took = up + 1, time.monotonic() - begin
            except BenchError as error:
                common.say(f"error: {worker.name}: {error}")
    finally:
        for worker in workers:
            worker.close()
    return {"up": up, "servers": count, "seconds": took}


def main() -> int:
    """Runs cases in modes, until the budget is spent."""
    parser = common.parser(
        "Real vLLM with an elastic KV cache.",
        "  PYTHONPATH=DIR/carry:DIR/carry_deps GPUMUX=.bundle/bin/gpumux python3 bench/engines.py --quick --budget 150\n"
        "  GPUMUX=.bundle/bin/gpumux python3 bench/engines.py --cases tokens --rounds 20",
    )
    parser.add_argument("--cases", type=common.listed(CASES + STARTS), help="[all; with --quick all but start-6]")
    parser.add_argument("--modes", type=common.listed(MODES), default=MODES)
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for all [%(default)s]")
    parser.add_argument("--seconds", type=float, help="of `saturation`, at most [60; 20 with --quick]")
    parser.add_argument("--requests", type=int, default=64, help="of `saturation` [%(default)s]")
    parser.add_argument("--rounds", type=int, help="of `tokens` [10; 3 with --quick]")
    parser.add_argument("--output", type=int, default=64, help="tokens that a request of `tokens` makes [%(default)s]")
    parser.add_argument("--memory", type=float, default=0.5, help="part of the GPU's memory that vLLM wants to see free [%(default)s]")
    parser.add_argument("--cache", default="16GiB", help="of addresses for the KV cache [%(default)s]")
    parser.add_argument("--attention", default="TRITON_ATTN", help="vLLM's attention backend [%(default)s]")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True, help="without CUDA graphs")
    options = parser.parse_args()
    logs = common.begin(options)
    options.cases = options.cases or CASES + (STARTS[:1] if options.quick else STARTS)
    options.seconds = options.seconds or (20.0 if options.quick else 60.0)
    options.rounds = options.rounds or (3 if options.quick else 10)
    options.cache, options.left = kv.bytes_of(options.cache), Budget(options.budget)
    package = str(common.BENCH.parent / "python")
    os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    options.model = logs / "model"
    options.model.mkdir(exist_ok=True)
    (options.model / "config.json").write_text(json.dumps(LLAMA_3_1B if options.quick else serve.LLAMA_3_8B))
    results = Results("engines", options.out, CASES + STARTS, MODES)
    for case in options.cases:
        run(results, case, options.modes, logs, options)
    return results.finish()


def run(results: Results, case: str, modes: Sequence[str], logs: Path, options: argparse.Namespace) -> None:
    """One case in its modes."""
    if case == "tokens":
        with cell(results, case, logs):
            options.left.check(30)
            for name, values in tokens(logs, options):
                results.add(case, name, values)
        return
    for name in modes:
        if case != "saturation" and name == "elastic":
            continue
        with cell(results, f"{case}, {name}", logs):
            options.left.check(20)
            with mode_of(name, logs) as mode:
                values = saturation(mode, options) if case == "saturation" else start(mode, int(case.partition("-")[2]), options)
            results.add(case, name, values)


if __name__ == "__main__":
    sys.exit(main())
