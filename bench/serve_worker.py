"""A language-model engine under measurement by `serve.py`: takes requests of given lengths at given times, as torch_worker.py takes orders.

An engine is anything with `add(name, prompt, output)`, `step()` (which gives the name and number of tokens so far of requests that moved; `last` has
their tokens), `busy()`, `drop(names)`, `preempted()` and `state()`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))


LIBRARIES = ["vllm", "sglang", "transformers", "stand-in"]
COLD = "GPUMUX_BENCH_COLD"


def prompt_of(name: str, length: int) -> list[int]:
    """Tokens of a request. Those of different names differ from the beginning, so that no cache of prefixes serves them."""
    return random.Random(name).choices(range(10, 30_010), k=length)


def make_cold(worker: Any) -> None:
    """In the process of one of vLLM's workers: its KV cache moves before its other memory."""
    import gpumux

    memory = worker.gpumux.range
    gpumux.advise(memory.address, memory.header.bytes, gpumux.COLD)


def memory_of(worker: Any) -> dict[str, int]:
    """There, too: what its KV cache has, and what became of it."""
    memory = worker.gpumux.range
    return {"committed": memory.committed(), **memory.losses()}


class Vllm:
    """vLLM, in this process (with several GPUs its workers are processes of their own), with random weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if options.granule:
            from gpumux import _blocks

            _blocks._GRANULE = options.granule << 20
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(
            options.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            gpu_memory_utilization=options.memory,
            max_model_len=options.context,
            **options.engine,
        )
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core
        # In a process of its own it is not seen.
        self.scheduler = getattr(getattr(core, "engine_core", core), "scheduler", None)
        self.blocks = getattr(self.scheduler, "gpumux", None)
        self.last: dict[str, Sequence[int]] = {}
        if options.cold and self.blocks:
            self.llm.collective_rpc(make_cold)

    def add(self, name: str, prompt: Sequence[int], output: int, salt: str | None = None) -> None:
        """A request, which makes exactly so many tokens; the prefix cache serves only requests of the same salt."""
        sampling = self.vllm.SamplingParams(max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False, temperature=0.0)
        salted = {"cache_salt": salt} if salt else {}
        self.engine.add_request(name, {"prompt_token_ids": prompt, **salted}, sampling)

    def step(self) -> list[tuple[str, int]]:
        """One step of the batch."""
        self.last = {it.request_id: it.outputs[0].token_ids for it in self.engine.step()}
        return [(name, len(made)) for name, made in self.last.items()]

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return self.engine.has_unfinished_requests()

    def preempted(self) -> int:
        """How often requests that are there were preempted."""
        return sum(it.num_preemptions for it in self.scheduler.requests.values())

    def state(self) -> dict[str, Any]:
        """Of which steps it has CUDA graphs, and what became of an elastic cache."""
        found = {"graphs": self.engine.vllm_config.compilation_config.cudagraph_mode.name}
        if self.blocks:
            ranks = self.llm.collective_rpc(memory_of)
            found |= {"refused": self.blocks.refused, "committed": min(it["committed"] for it in ranks)}
            found |= {name: sum(it[name] for it in ranks) for name in ("taken", "taken_cached", "moved")}
        return found

    def drop(self, names: Iterable[str]) -> None:
        """Forgets requests."""
        self.engine.abort_request(list(names))

    def sleep(self) -> None:
        """vLLM's sleep mode: its weights go to the host, and its cache is dropped."""
        self.llm.sleep(level=1)

    def wake(self) -> None:
        """The end of that."""
        self.llm.wake_up()


class Transformers:
    """Continuous batching of Hugging Face transformers (generate.py), in a thread of this process, with random weights."""

    WAIT_S = 0.002  # for tokens, before requests that have come meanwhile are added
    # Of a config.json, what only a library that loads weights needs.
    NO_SHAPE = ("architectures", "model_type", "torch_dtype", "dtype")

    def __init__(self, options: argparse.Namespace) -> None:
        import generate

        shape = json.loads((Path(options.model) / "config.json").read_text())
        model = generate.llama(**{name: of for name, of in shape.items() if name not in self.NO_SHAPE})
        self.manager = generate.batcher(model, **{"num_blocks": 512, "max_requests_per_batch": 256} | options.engine)
        self.open, self.last = set[str](), dict[str, Sequence[int]]()
        gc.collect()
        gc.freeze()  # a collection would be measured as latency

    def add(self, name: str, prompt: Sequence[int], output: int, _salt: str | None = None) -> None:
        """A request, which makes exactly so many tokens."""
        if self.manager.add_request(list(prompt), request_id=name, max_new_tokens=output, streaming=True) != name:
            raise RuntimeError(f"continuous batching takes no request: {name}")
        self.open.add(name)

    def step(self) -> list[tuple[str, int]]:
        """The tokens that have come, or none after a short while."""
        self.last, wait = {}, self.WAIT_S
        while found := self.manager.get_result(timeout=wait):
            wait = 0.0
            if found.request_id not in self.open:
                continue  # it was dropped
            if found.error:
                raise RuntimeError(f"continuous batching: {found.error}")
            self.last[found.request_id] = found.generated_tokens
            if found.is_finished():
                self.open.remove(found.request_id)
        if not self.last and not self.manager.is_running():
            raise RuntimeError("the thread of continuous batching has ended")
        return [(name, len(made)) for name, made in self.last.items()]

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.open)

    def preempted(self) -> int:
        """The library counts none."""
        return 0

    def state(self) -> dict[str, Any]:
        """Nothing that is asked of other engines."""
        return {}

    def drop(self, names: Iterable[str]) -> None:
        """Forgets requests."""
        for name in names:
            self.open.discard(name)
            self.manager.cancel_request(name)


def plugin() -> None:
    """Runs in each process that SGLang starts. SGLang's scheduler then also answers what the benchmark asks an engine, such as how many granules were taken."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", told, HookType.AFTER)


def told(answer: Any, scheduler: Any, *_: Any) -> None:
    """Whether decoding steps are CUDA graphs, and what became of an elastic cache; with `COLD` its pages move before other memory from then on."""
    runner = scheduler.tp_worker.model_runner.decode_cuda_graph_runner
    found: dict[str, Any] = {"graphs": "FULL_DECODE_ONLY" if "Graph" in type(runner).__name__ else "NONE"}
    if cache := getattr(scheduler, "gpumux", None):
        import gpumux

        if os.environ.get(COLD):
            gpumux.advise(cache.range.address, cache.range.header.bytes, gpumux.COLD)
        found |= {"refused": cache.slots.refused, "committed": cache.range.committed(), **cache.range.losses()}
    answer.internal_state["bench"] = found


class Sglang:
    """SGLang with random weights. Its scheduler is a process of its own; what is for its tokens runs in this one during a step."""

    WAIT_S = 0.002  # for tokens, before requests that have come meanwhile are added

    def __init__(self, options: argparse.Namespace) -> None:
        # Its plugins are those of installed packages, and it hands the path on to its processes.
        self.installed = tempfile.TemporaryDirectory()
        package = Path(self.installed.name, "bench-0.dist-info")
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: bench\nVersion: 0\n")
        (package / "entry_points.txt").write_text("[sglang.srt.plugins]\ngpumux = gpumux.sglang:plugin\nbench = serve_worker:plugin\n")
        sys.path.insert(0, str(package.parent))
        os.environ |= ({"GPUMUX_KV": "elastic"} if options.elastic else {}) | ({COLD: "1"} if options.cold else {})
        import sglang
        from sglang.srt.managers.io_struct import GenerateReqInput

        self.request = GenerateReqInput
        self.engine = sglang.Engine(
            model_path=options.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            mem_fraction_static=options.memory,
            context_length=options.context,
            log_level="info",
            **options.engine,
        )
        self.loop, self.came = self.engine.loop, asyncio.Event()
        self.new, self.tasks = list[tuple[str, list[int], int, str | None]](), set[asyncio.Task[None]]()
        self.open, self.again, self.last = set[str](), dict[str, int](), dict[str, Sequence[int]]()
        if options.cold:
            self.state()

    def add(self, name: str, prompt: Sequence[int], output: int, salt: str | None = None) -> None:
        """A request, which makes exactly so many tokens; the prefix cache serves only requests of the same salt."""
        self.new.append((name, list(prompt), output, salt))
        self.open.add(name)
        self.again[name] = 0

    def step(self) -> list[tuple[str, int]]:
        """The tokens that have come, or none after a short while."""
        self.last = {}
        self.loop.run_until_complete(self._step())
        return [(name, len(made)) for name, made in self.last.items()]

    async def _step(self) -> None:
        if self.new:
            # In one message: the scheduler makes the same batches of the same requests.
            names, prompts, outputs, salts = map(list, zip(*self.new, strict=True))
            sampling = [{"max_new_tokens": it, "ignore_eos": True, "temperature": 0.0} for it in outputs]
            self.new = []
            asked = self.request(input_ids=prompts, sampling_params=sampling, rid=names, extra_key=salts, stream=True)
            self.tasks.add(asyncio.create_task(self._follow(asked)))
        if not self.came.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.came.wait(), self.WAIT_S)
        self.came.clear()
        for task in [it for it in self.tasks if it.done()]:
            self.tasks.remove(task)
            task.result()

    async def _follow(self, asked: Any) -> None:
        async for found in self.engine.tokenizer_manager.generate_request(asked, None):
            about = found["meta_info"]
            name, end = about["id"], about["finish_reason"]
            if name not in self.open:
                continue  # it was dropped
            if end and end["type"] != "length":
                raise RuntimeError(f"SGLang: {end}")
            self.last[name], self.again[name] = found["output_ids"], about.get("num_retractions") or 0
            if end:
                self.open.remove(name)
            self.came.set()

    def busy(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self.open)

    def preempted(self) -> int:
        """How often requests were preempted since they were added."""
        return sum(self.again.values())

    def state(self) -> dict[str, Any]:
        """Of which steps it has CUDA graphs, and what became of an elastic cache."""
        found: dict[str, Any] = self.engine.get_server_info()["internal_states"][0]["bench"]
        return found

    def drop(self, names: Iterable[str]) -> None:
        """Forgets requests."""
        for name in names:
            self.open.discard(name)
            self.engine.tokenizer_manager.abort_request(name)


def engine_of(options: argparse.Namespace) -> Any:
    """The engine of a library."""
    if options.library == "stand-in":
        from standin import StandIn

        return StandIn(options)
    return {"vllm": Vllm, "sglang": Sglang, "transformers": Transformers}[options.library](options)


def greedy(engine: Any, requests: list[list[int]], salt: str | None) -> dict[str, Any]:
    """All of these requests (tokens given, tokens made) at once: the tokens of each, how many requests each step moved, how often they were preempted, and
    its state."""
    made, batches, preempted = dict[str, list[int]](), list[int](), 0
    for number, (prompt, output) in enumerate(requests):
        engine.add(f"greedy-{number}", prompt_of(f"greedy-{number}", prompt), output, salt)
    while engine.busy():
        batches.append(len(engine.step()))
        made |= {name: list(tokens) for name, tokens in engine.last.items()}
        preempted = max(preempted, engine.preempted())
    tokens = [made[f"greedy-{number}"] for number in range(len(requests))]
    return {"tokens": tokens, "batches": batches, "preempted": preempted} | engine.state()


def replay(engine: Any, order: dict[str, Any], now: Callable[[], float], sleep: Callable[[float], None], turn: int = 0) -> dict[str, Any]:
    """Requests at their times from `start` until `stop` (with `ends`: until all are done, if that is earlier): when each had its first and its last token, and how many it had."""
    start, stop, requests = order["start"], order["stop"], order["requests"]
    first: list[float | None] = [None] * len(requests)
    last, tokens = list(first), [0] * len(requests)
    names, coming = dict[str, int](), 0
    while (moment := now()) < stop:
        while coming < len(requests) and start + requests[coming][0] <= moment:
            name = f"{turn}-{coming}"
            names[name] = coming
            engine.add(name, prompt_of(name, requests[coming][1]), requests[coming][2])
            coming += 1
        if not engine.busy():
            if coming == len(requests) and order.get("ends"):
                break
            due = start + requests[coming][0] if coming < len(requests) else stop
            sleep(min(due, stop) - moment)
            continue
        moved = engine.step()
        at = now() - start
        for name, made in moved:
            if name in names and made > tokens[names[name]]:
                which = names[name]
                first[which] = at if first[which] is None else first[which]
                last[which], tokens[which] = at, made
    engine.drop(name for name, which in names.items() if tokens[which] < requests[which][2])
    return {"first_s": first, "last_s": last, "tokens": tokens}


def main() -> None:
    """Makes the engine, says so, and takes orders until the standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("--memory", type=float, default=0.35)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--library", choices=LIBRARIES, default="vllm", help="stand-in: see standin.py [%(default)s]")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of vllm.LLM, sglang.Engine or ContinuousBatchingConfig, as JSON")
    parser.add_argument("--elastic", action="store_true", help="SGLang's KV cache (vLLM's is so by its arguments)")
    parser.add_argument("--cold", action="store_true", help="of an elastic cache, pages in use move before other memory")
    parser.add_argument("--granule", type=int, help="of an elastic cache, in MiB, as near as its blocks allow")
    parser.add_argument("--room", help="socket of what says when it may be awake: see rooms.py")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        engine = engine_of(options)
        begin = time.monotonic()
        warm = {"start": begin, "stop": begin + 10.0, "requests": [[0.0, 512, 32], [0.1, 64, 64]], "ends": True}
        wait: Callable[[float], None] = lambda s: time.sleep(max(0.0, s))  # noqa: E731
        replay(engine, warm, time.monotonic, wait, turn=-1)
        if options.room:
            from rooms import Sleeper

            engine = Sleeper(engine, options.room)
            wait = engine.wait
    except Exception as error:
        traceback.print_exc()
        answer(error=f"cannot prepare: {error}")
        sys.exit(1)
    answer(ready=True)
    for turn, line in enumerate(sys.stdin):
        order = json.loads(line)
        try:
            if "greedy" in order:
                answer(**greedy(engine, order["greedy"], order.get("salt")))
                continue
            if order.get("sleep"):
                engine.rest()
                answer(asleep=True)
                continue
            answer(**replay(engine, order, time.monotonic, wait, turn))
        except Exception as error:
            traceback.print_exc()
            answer(error=str(error))


if __name__ == "__main__":
    main()
