"""Real vLLM with an elastic KV cache (`gpumux.vllm`), beside vLLM as it is, with random weights; or with `--library sglang` SGLang (`gpumux.sglang`).

`saturation`: `--requests` requests at once, of 128 tokens, which make 128. `rate-8`, `rate-16`, `rate-32`: so many requests a second for 4 s, at random moments, of 512 tokens, which make 64. The engines of all modes
are there, and take turns in rounds; the same call goes on with the rounds of one before (`engines-GPU.rounds.jsonl`). Modes `stock` (without gpumux), `gpumux` (vLLM as it is under `gpumux run`), `elastic`, and where asked for `kvcached` (with its native module, without gpumux) and `kvcached-gpumux` (its
Python code on `gpumux.compat.kvcached`), `kvcached-layers` (its native module, with a page for each layer instead of one for all), and `elastic-2` and `elastic-64` (granules of about 2 and 64 MiB; those of `elastic` have about 16). Values: `tokens_per_s`, `ttft_p50_ms`, `ttft_p99_ms` (times to the first token), `tpot_p50_ms`, `tpot_p99_ms` (times of each further token); `finished` of `requests`; `rounds`; `tokens_rel`, tokens/s relative to `stock` in the same rounds;
`taken` and `refused` granules of `elastic`, in all of these cases of the last call together. Values are means over rounds.

`tokens`: greedy tokens of the same requests, in rounds, with CUDA graphs. Meanwhile a tenant with a guarantee gets memory at random moments and gives it back, so much that the engine
is left with less than its requests use. Modes `stock`, `elastic`. Values: `equal` of `requests`, in rounds whose batches were the same; `other_rounds` (vLLM was refused memory, and made
other batches, whose rounding differs; SGLang's are not seen: each round in which it was refused memory); `taken_free`, `taken_cached` and `taken_in_use`, granules taken from the engine by the state of their pages, as the engine's library counts them;
`moves` of the engine's memory to the host and their `moved_gib`; `takes` of the other tenant, and `takes_refused`. A request with other tokens in a round that counts fails the cell, and so does a run in which
no granule in use was taken.

`idle`: what an engine holds without a request. Modes `stock`, `gpumux`, `elastic`. Values: `device_gib` (what NVML reports more than before the engine), `first_ms` (the first token of a request
of 128 tokens); of `gpumux` and `elastic` `held_gib` (what the tenant has), and of `elastic` `floor_gib` (the same after another tenant has taken what needs no copy) and `first_taken_ms` (the first
token after that).

With `--ranks 2` each engine has two GPUs; `committed` is then what one rank has, losses are of both, and the other tenant of `tokens` is on the first GPU.

`start`: 2 and 6 servers that start at the same moment with vLLM's default part of the memory. Modes `stock`, `gpumux`. Values: `up` (servers that are there), `seconds` (until the last one is there).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import kv
import rounds
import serve
from common import BenchError, Gpumux, Mode, Results, Worker
from memory import cell
from residency import Nvml

GIB = 1 << 30
RATES = {"saturation": 0.0, "rate-8": 8.0, "rate-16": 16.0, "rate-32": 32.0}
CASES, STARTS = [*RATES, "tokens", "idle"], ["start-2", "start-6"]
PLAIN, KVCACHED = ["stock", "gpumux", "elastic"], ["kvcached", "kvcached-gpumux"]
MODES = PLAIN + KVCACHED
GRANULES = {"elastic-2": 2, "elastic-64": 64}  # MiB
LOADED = [*MODES, *GRANULES, "kvcached-layers"]
SAID = {"elastic": "the KV cache is elastic", "kvcached": "Successfully patched vllm"}
LLAMA_3_1B = serve.LLAMA_3_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_3_3B = LLAMA_3_1B | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}
# Steps that only decode are CUDA graphs; nothing is compiled, which takes minutes.
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64]},
}  # fmt: skip
SHAPES = {"1b": LLAMA_3_1B, "3b": LLAMA_3_3B, "8b": serve.LLAMA_3_8B}
# The same of SGLang.
SGLANG: dict[str, Any] = {"sampling_backend": "pytorch", "disable_prefill_cuda_graph": True, "max_running_requests": 256}
ATTENTION = {"vllm": "TRITON_ATTN", "sglang": "triton"}
KVCACHED_ENVIRONMENT = {"ENABLE_KVCACHED": "true", "KVCACHED_GPU_UTILIZATION": "0.99", "KVCACHED_LOG_LEVEL": "INFO"}
# kvcached's installation adds a file that Python reads at its start: `site` does the same for a folder of PYTHONPATH.
LAUNCH = (
    "import importlib.util, os, runpy, site, sys; {0}"
    "site.addsitedir(os.path.dirname(next(iter(importlib.util.find_spec('kvcached').submodule_search_locations)))); "
    "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
# kvcached and vLLM differ in what their caches of prefixes keep: where both are measured, none has one.
NO_PREFIXES = {"enable_prefix_caching": False}
PATIENCE_S, IDLE_S = 120.0, 1.0
WINDOW_S = 4.0
LEFT = 0.1, 0.8  # of what the engine's requests need
LAST_S = 20.0  # for a round of `tokens` and the end


class Budget:
    """What is left of the time."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def lasts(self, needed_s: float) -> bool:
        """Whether there is so much."""
        return time.monotonic() + needed_s <= self.end

    def check(self, needed_s: float) -> None:
        """Raises BenchError if there is less."""
        if not self.lasts(needed_s):
            raise BenchError(f"the budget is spent: less than {needed_s:.0f} s are left")


class _Kvcached(Mode):
    def environment(self) -> dict[str, str]:
        layers = {"KVCACHED_CONTIGUOUS_LAYOUT": "false"} if self.name == "kvcached-layers" else {}
        return super().environment() | KVCACHED_ENVIRONMENT | layers


class _KvcachedGpumux(Gpumux):
    def environment(self) -> dict[str, str]:
        return super().environment() | KVCACHED_ENVIRONMENT


def mode_of(name: str, logs: Path) -> Mode:
    """Without gpumux, or with a daemon of its own."""
    kinds = {"stock": Mode, "kvcached": _Kvcached, "kvcached-layers": _Kvcached, "kvcached-gpumux": _KvcachedGpumux}
    return kinds.get(name, Gpumux)(name, logs)


def program(mode: str) -> Sequence[str]:
    """What runs an engine of a mode, before its arguments."""
    if not mode.startswith("kvcached"):
        return serve.ENGINE
    return (sys.executable, "-c", LAUNCH.format("import gpumux.compat.kvcached; " if mode == "kvcached-gpumux" else ""), *serve.ENGINE[1:])


def said(mode: str) -> str:
    """What an engine of a mode, or of a variant of it, writes into its log."""
    return SAID.get(mode.partition("-")[0], "")


def check(mode: str, worker: Worker) -> None:
    """Raises BenchError where an engine has not the memory of its mode."""
    if said(mode) not in worker.log.read_text(errors="replace"):
        raise BenchError(f"{worker.name} is not {mode}: {worker.log} lacks {said(mode)!r}")


def check_graphs(worker: Worker, answer: dict[str, Any], options: argparse.Namespace) -> None:
    """Raises BenchError where an engine that answers so does not decode by graphs although it should."""
    if options.graphs and not options.stand_in and answer["graphs"] != GRAPHS["compilation_config"]["cudagraph_mode"]:
        raise BenchError(f"the engine has CUDA graphs {answer['graphs']}, and not of its decoding steps: see {worker.log}")


def prepare(logs: Path, shape: dict[str, Any]) -> Path:
    """Lets engines find gpumux's package; the folder of a model of this shape."""
    package, model = str(common.BENCH.parent / "python"), logs / "model"
    os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(shape))
    return model


def one_runner(modes: Sequence[str]) -> None:
    """kvcached changes vLLM's first model runner only: beside it, all modes have the same."""
    if any(it.startswith("kvcached") for it in modes):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def of_sglang(given: dict[str, Any], model: Path) -> dict[str, Any]:
    """Arguments of SGLang that mean what these mean to vLLM. It counts its cache in tokens."""
    shape = json.loads((model / "config.json").read_text())
    head = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    token = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    made = SGLANG | {"attention_backend": given["attention_backend"], "disable_radix_cache": not given.get("enable_prefix_caching", True)}
    made |= {"disable_cuda_graph": True} if given["enforce_eager"] else {"cuda_graph_bs_decode": given["compilation_config"]["cudagraph_capture_sizes"]}
    return made | ({"max_total_tokens": given["kv_cache_memory_bytes"] // token} if "kv_cache_memory_bytes" in given else {})


def engine(
    mode: Mode, name: str, options: argparse.Namespace, *flags: str, klass: str = "latency", elastic: bool | None = None, context: int = 4096, **more: Any
) -> Worker:
    """A server that starts."""
    arguments = {"attention_backend": options.attention} | (GRAPHS if options.graphs else {"enforce_eager": True}) | more
    if options.ranks > 1:
        arguments |= {"tensor_parallel_size": options.ranks, "distributed_executor_backend": "mp"}
    elastic = mode.name == "elastic" if elastic is None else elastic
    if elastic:
        arguments |= {"distributed_executor_backend": "gpumux.vllm.Executor"} if options.ranks > 1 else {"worker_cls": "gpumux.vllm.Worker"}
    memory = arguments.pop("memory", options.memory)
    if options.library == "sglang":
        arguments, flags = of_sglang(arguments, options.model), (*flags, "--library", "sglang", *(["--elastic"] if elastic else []))
    given = [str(options.model), "--memory", str(memory), "--context", str(context), "--engine", json.dumps(arguments), *flags]
    return Worker(name, given + (["--library", "stand-in"] if options.stand_in else []), mode, klass, program(mode.name))


def ready(worker: Worker, options: argparse.Namespace) -> None:
    """It is there."""
    options.left.check(5)
    worker.reply(min(common.READY_S, options.left.end - time.monotonic()))


def send(workers: Sequence[Worker], requests: Sequence[Sequence[Sequence[float]]], stop_s: float, **more: Any) -> None:
    """The engines have their requests (when, tokens given, tokens made) at the same time."""
    start = time.monotonic() + 0.5
    for worker, own in zip(workers, requests, strict=True):
        worker.send(start=start, stop=start + stop_s, requests=own, **more)


def replay(workers: Sequence[Worker], requests: Sequence[Sequence[Sequence[float]]], stop_s: float, **more: Any) -> list[dict[str, Any]]:
    """So too; their answers, at the latest after so many seconds."""
    send(workers, requests, stop_s, **more)
    return [worker.reply(stop_s + common.REPLY_S) for worker in workers]


def burst(worker: Worker, options: argparse.Namespace, rate: float = 0.0, seed: int = 0) -> dict[str, float]:
    """So many requests at once; or so many a second."""
    options.left.check(10)
    requests, length_s = [[0.0, 128, 128]] * options.requests, options.seconds
    if rate:
        requests = [[at, 512, 64] for at in common.poisson(random.Random(seed), rate, 0.0, WINDOW_S)]
        length_s += WINDOW_S
    start = time.monotonic() + 0.2
    worker.send(start=start, stop=start + length_s, requests=requests, ends=True)
    answer = worker.reply(length_s + PATIENCE_S)
    done = [it for it in serve.served(requests, answer) if it.tpot_ms is not None]
    if not done:
        raise BenchError(f"no request had a token within {length_s} s")
    span, finished = max(it.last_s for it in done), sum(it.tokens >= it.asked[2] for it in done)
    found = {"tokens_per_s": sum(answer["tokens"]) / span, "finished": float(finished), "requests": float(len(requests))}
    return found | common.quantiles("ttft", [it.ttft_ms for it in done]) | common.quantiles("tpot", [it.tpot_ms for it in done])


def means(found: Sequence[dict[str, float]], stock: Sequence[dict[str, float]]) -> dict[str, Callable[[Sequence[int]], float]]:
    """Means of all values over rounds, as functions of how often each round is taken; beside `stock` also `tokens_rel`, the ratio to it in the same rounds."""
    mean = lambda cells, key: functools.partial(rounds.mean_of, [one[key] for one in cells])  # noqa: E731
    given = {key: mean(found, key) for key in found[0]}
    if found is not stock:
        base = mean(stock, "tokens_per_s")
        given["tokens_rel"] = lambda times: given["tokens_per_s"](times) / base(times)
    return given


def loads(
    cases: Sequence[str], modes: Sequence[str], logs: Path, options: argparse.Namespace, results: Results
) -> Iterator[tuple[str, str, dict[str, float], dict[str, list[float]]]]:
    """Engines of all modes are there at the same time and have their requests one after the other, in rounds: means of each case and mode, and their intervals.
    Rounds of an earlier call with the same results count."""
    record = rounds.Record(results, modes, {})
    whole = lambda: [it for it in record.cases.get(" ".join(cases), []) if not it["failed"]]  # noqa: E731
    with contextlib.ExitStack() as stack:
        shared = {name: stack.enter_context(mode_of(name, logs)) for name in dict.fromkeys("gpumux" if it.startswith("elastic") else it for it in modes)}
        engines = dict[str, Worker]()
        for name in modes:
            mode = shared.get(name) or shared["gpumux"]
            flags = ["--granule", str(GRANULES[name])] if name in GRANULES else []
            # With a size for its cache, vLLM does not measure what is free.
            engines[name] = engine(mode, name, options, *flags, elastic=name.startswith("elastic"), kv_cache_memory_bytes=options.cache, **NO_PREFIXES)
            stack.callback(engines[name].close)
        for name, worker in engines.items():
            ready(worker, options)
            check(name, worker)
        for worker in engines.values():
            burst(worker, options)
            if options.graphs:
                worker.send(greedy=[[16, 1]])
                check_graphs(worker, worker.reply(PATIENCE_S), options)
        begin, before = time.monotonic(), len(whole())
        for number in range(before, options.bursts):
            # A round takes about as long as those before it.
            made = number - before
            if not options.left.lasts((time.monotonic() - begin) / made * 1.25 + 10 if made else len(cases) * len(modes) * 8):
                break
            one: rounds.Round = {"case": " ".join(cases), "round": number, "noise": rounds.noise(), "failed": {}, "cells": {}}
            for case in cases:
                for nth in range(len(modes)):
                    name = modes[(number + nth) % len(modes)]
                    try:
                        one["cells"][f"{case} {name}"] = burst(engines[name], options, RATES[case], number)
                    except BenchError as error:
                        one["failed"][f"{case} {name}"] = str(error)
            record.add(one)
            if one["failed"]:
                common.say(f"error: round {number} does not count: {one['failed']}")
                break
        if not whole():
            raise BenchError("no round is whole, or the budget is spent before the first one")
        states = dict[str, dict[str, Any]]()
        for name in modes:
            # One that has ended says no more.
            with contextlib.suppress(BenchError):
                engines[name].send(greedy=[[16, 1]])
                states[name] = engines[name].reply(PATIENCE_S)
    noisy = max(it["noise"] for it in whole())
    results.data["host"] = f"{len(whole())} rounds; host noise at most {noisy:.2f}."
    for case in cases:
        seen = {name: [it["cells"][f"{case} {name}"] for it in whole()] for name in modes}
        for name, found in seen.items():
            values, around = dict[str, float](), dict[str, list[float]]()
            for key, mean in means(found, seen.get("stock", found)).items():
                values[key] = mean([1] * len(found))
                if len(found) >= rounds.LEAST:
                    around[key] = rounds.interval(mean, len(found))
            yield case, name, values | {"rounds": float(len(found))} | {it: states[name][it] for it in ("taken", "refused") if it in states.get(name, {})}, around


def greedy(worker: Worker, options: argparse.Namespace, salt: int) -> dict[str, Any]:
    """The same requests once more; with another salt the prefix cache serves none of them: a hit changes how a prompt is computed, and its rounding."""
    options.left.check(5)
    worker.send(greedy=[[160 + 3 * number, options.output] for number in range(48)], salt=f"round-{salt}")
    return worker.reply(PATIENCE_S)


class Taker:
    """A tenant that is guaranteed what the engine leaves of `room` bytes, and takes a part of it again and again until it is stopped."""

    def __init__(self, pool: Worker, room: int, needs: int) -> None:
        self.pool, self.room, self.needs, self.random = pool, room, needs, random.Random(7)
        self.takes, self.refused, self.wrong, self.error, self.stopped = 0, 0, 0, None, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.stopped.wait(self.random.uniform(0.02, 0.3)):
            left = int(self.needs * self.random.uniform(*LEFT))
            try:
                self.wrong += kv.order(self.pool, "get", size=self.room - left, wait_s=60)["wrong"]
                self.takes += 1
                self.stopped.wait(self.random.uniform(0, 0.1))
                kv.order(self.pool, "release")
            except BenchError as error:
                common.say(f"error: {error}")
                self.refused += 1
                if self.pool.process.poll() is not None:
                    self.error = error
                    return

    def __enter__(self) -> Taker:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join(PATIENCE_S)


@contextlib.contextmanager
def beside(mode: Gpumux, needs: int, logs: Path, options: argparse.Namespace) -> Iterator[tuple[Worker, int]]:
    """A process with a pool that is guaranteed what the engine does not use, and so many bytes are that without a request, on a device with little room."""
    room = kv.bytes_of(options.room)
    command = [sys.executable, str(kv.WORKER), "--bytes", str(2 * room + needs), "--page", str(2 * kv.MIB), *(["--no-torch"] if options.stand_in else [])]
    # Of a higher class than the engine, which comes back as soon as there is room then.
    with kv.pool(mode, "taker", command, "--class", "latency") as pool, kv.left(mode, room, logs) as free:
        own, all_of_it = kv.tenant(mode, "taker")["memory"][0]["in_use"], free + needs
        most = own + all_of_it - int(needs * LEFT[0])
        mode.set("taker", "--memory-guaranteed", f"{most // kv.MIB + 1}MiB")
        common.say(f"the engine needs {needs // kv.MIB} of {all_of_it // kv.MIB} MiB")
        yield pool, all_of_it


def tokens(logs: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """What each mode made, the second one beside a tenant that takes memory."""
    with mode_of("stock", logs) as mode:
        worker = engine(mode, "tokens", options, kv_cache_memory_bytes=options.cache)
        try:
            ready(worker, options)
            base, again = (greedy(worker, options, salt) for salt in range(2))
        finally:
            worker.close()
    same = sum(a == b for a, b in zip(base["tokens"], again["tokens"], strict=True))
    yield "stock", {"equal": same, "requests": len(base["tokens"]), "preempted": again["preempted"]}
    with mode_of("elastic", logs) as mode, ExitStack() as stack:
        assert isinstance(mode, Gpumux)
        # Its weights would go before its cache otherwise, since they are in larger pieces.
        worker = engine(mode, "tokens", options, "--cold", klass="standard", kv_cache_memory_bytes=options.cache)
        stack.callback(worker.close)
        ready(worker, options)
        rounds = [greedy(worker, options, 0)]
        if "taken" not in rounds[0]:
            raise BenchError(f"the KV cache is not elastic: see {worker.log}")
        check_graphs(worker, rounds[0], options)
        needs = rounds[0]["committed"]
        with beside(mode, needs, logs, options) as (pool, all_of_it), Taker(pool, all_of_it, needs) as other:
            while len(rounds) <= options.rounds and not other.error and options.left.lasts(LAST_S):
                rounds.append(greedy(worker, options, len(rounds)))
        if other.error or other.wrong:
            raise other.error or BenchError(f"{other.wrong} pages of the other tenant have other contents than were written")
        moved = kv.tenant(mode, "tokens")["moves"]
    end = rounds[-1]
    found: dict[str, float] = {"equal": 0, "requests": 0, "other_rounds": 0, "takes": other.takes, "takes_refused": other.refused, "refused": end["refused"]}
    found |= {"taken_free": end["taken"] - end["taken_cached"], "taken_cached": end["taken_cached"], "taken_in_use": end["moved"]}
    found |= {"moves": moved["outs"], "moved_gib": moved["out_bytes"] / GIB}
    for before, one in zip([rounds[0], *rounds], rounds):
        refused = one["refused"] > before["refused"]
        if one["preempted"] or refused and one["batches"] != base["batches"]:
            found["other_rounds"] += 1
        else:
            found["equal"] += sum(a == b for a, b in zip(base["tokens"], one["tokens"], strict=True))
            found["requests"] += len(base["tokens"])
    if found["equal"] < found["requests"]:
        raise BenchError(f"other tokens without a refusal: {found}")
    if not found["taken_in_use"]:
        raise BenchError(f"no granule in use was taken: {found}")
    yield "elastic", found


def first_ms(worker: Worker, options: argparse.Namespace) -> float:
    """How long the first token of a request takes."""
    options.left.check(5)
    start = time.monotonic()
    worker.send(start=start, stop=start + PATIENCE_S, requests=[[0.0, 128, 2]], ends=True)
    return worker.reply(2 * PATIENCE_S)["first_s"][0] * 1e3


def idle(mode: Mode, logs: Path, options: argparse.Namespace) -> dict[str, float]:
    """An engine that has served requests, and has none."""
    # The memory of programs that have ended is free a little later.
    time.sleep(IDLE_S)
    before, held = Nvml().memory().used, lambda: kv.tenant(mode, "idle")["memory"][0]["in_use"] / GIB
    worker = engine(mode, "idle", options, kv_cache_memory_bytes=options.cache)
    try:
        ready(worker, options)
        state = greedy(worker, options, 0)
        time.sleep(IDLE_S)
        found = {"device_gib": (Nvml().memory().used - before) / GIB}
        if isinstance(mode, Gpumux):
            found["held_gib"] = held()
        found["first_ms"] = first_ms(worker, options)
        if mode.name == "elastic":
            with beside(mode, state["committed"], logs, options) as (pool, all_of_it):
                time.sleep(IDLE_S)
                kv.order(pool, "get", size=all_of_it - state["committed"] // 8, wait_s=60)
                kv.order(pool, "release")
                time.sleep(IDLE_S)
                found["floor_gib"], moves = held(), kv.moves(mode, "idle")
                found["first_taken_ms"] = first_ms(worker, options)
            if moves:
                raise BenchError(f"its memory was copied to the host, {moves} times: {found}")
        return found
    finally:
        worker.close()


def start(mode: Mode, count: int, options: argparse.Namespace) -> dict[str, float]:
    """So many servers, at the same moment."""
    begin = time.monotonic()
    # vLLM's default: each wants to see nine tenths of its GPU free.
    workers, up, took = list[Worker](), 0, 0.0
    with ExitStack() as stack:
        for number in range(count):
            workers.append(engine(mode, f"server-{number}", options, memory=0.9))
            stack.callback(workers[-1].close)
        for worker in workers:
            try:
                ready(worker, options)
                up, took = up + 1, time.monotonic() - begin
            except BenchError as error:
                common.say(f"error: {worker.name}: {error}")
    return {"up": up, "servers": count, "seconds": took}


def main() -> int:
    """Runs cases in modes, until the budget is spent."""
    parser = common.parser(
        "Real vLLM with an elastic KV cache.",
        "  PYTHONPATH=DIR/carry:DIR/carry_deps GPUMUX=.bundle/bin/gpumux python3 bench/engines.py --quick --budget 150\n"
        "  GPUMUX=.bundle/bin/gpumux python3 bench/engines.py --quick --cases tokens --rounds 21 --budget 450\n"
        "  gpumux emu --profile FILE -- python3 bench/engines.py --cases tokens --stand-in --rounds 4 --output 16 --cache 192MiB --room 64MiB",
    )
    parser.add_argument("--cases", type=common.listed(CASES + STARTS), help="[all; with --quick all but start-6]")
    parser.add_argument("--modes", type=common.listed(LOADED), default=PLAIN)
    parser.add_argument("--shape", choices=SHAPES, help="Llama 3's by parameters [8b; 1b with --quick]")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for all [%(default)s]")
    parser.add_argument("--seconds", type=float, help="of `saturation`, and of `rate-…` after the last request, at most [60; 20 with --quick]")
    parser.add_argument("--bursts", type=int, help="rounds of `saturation` and `rate-…`, at most [12; 3 with --quick]")
    parser.add_argument("--requests", type=int, default=64, help="of `saturation` [%(default)s]")
    parser.add_argument("--rounds", type=int, help="of `tokens`, at most [21; 3 with --quick]")
    parser.add_argument("--output", type=int, default=64, help="tokens that a request of `tokens` makes [%(default)s]")
    parser.add_argument("--memory", type=float, default=0.5, help="part of the GPU's memory that vLLM wants to see free [%(default)s]")
    parser.add_argument("--cache", default="16GiB", help="of addresses for the KV cache [%(default)s]")
    parser.add_argument("--library", choices=ATTENTION, default="vllm", help="the engine [%(default)s]")
    parser.add_argument("--attention", help=f"the engine's attention backend [{', '.join(ATTENTION.values())}]")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True, help="decode by CUDA graphs")
    parser.add_argument("--room", default="1GiB", help="of `tokens`, beside what the engine has [%(default)s]")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of an engine, by vLLM's tensor parallelism [%(default)s]")
    parser.add_argument("--stand-in", action="store_true", help="another engine in vLLM's place, also on the emulated device")
    options = parser.parse_args()
    if options.library == "sglang" and (options.ranks > 1 or not {*options.modes} <= {*PLAIN}):
        parser.error(f"SGLang has one GPU here, and the modes {', '.join(PLAIN)}")
    options.attention = options.attention or ATTENTION[options.library]
    logs = common.begin(options)
    options.cases = options.cases or ["saturation", "tokens", "idle", *(STARTS[:1] if options.quick else STARTS)]
    options.seconds = options.seconds or (20.0 if options.quick else 60.0)
    options.rounds = options.rounds or (3 if options.quick else 21)
    options.bursts = options.bursts or (3 if options.quick else 12)
    options.cache, options.left = kv.bytes_of(options.cache), Budget(options.budget)
    options.model = prepare(logs, SHAPES[options.shape or ("1b" if options.quick else "8b")])
    one_runner(options.modes)
    results = Results("engines", options.out, CASES + STARTS, LOADED)
    if at_once := [case for case in options.cases if case in RATES]:
        with cell(results, ", ".join(at_once), logs):
            for case, name, values, around in loads(at_once, options.modes, logs, options, results):
                results.add(case, name, values, around)
    for case in options.cases:
        if case not in RATES:
            run(results, case, [name for name in options.modes if name in PLAIN], logs, options)
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
        if case in STARTS and name == "elastic":
            continue
        with cell(results, f"{case}, {name}", logs):
            options.left.check(20)
            with mode_of(name, logs) as mode:
                match case:
                    case "idle":
                        values = idle(mode, logs, options)
                    case _:
                        values = start(mode, int(case.partition("-")[2]), options)
            results.add(case, name, values)


if __name__ == "__main__":
    sys.exit(main())
