"""A language-model server under a production trace, alone and beside other work, in rounds (rounds.py), by mode of sharing (peers.py).

The engine is vLLM with random weights of Llama-3-8B's shape, or with `--library transformers` Hugging Face's continuous batching and Llama-3.2-1B's
(`--config`: a folder with another config.json). Requests come as in a recorded trace (`--trace`: a CSV with TIMESTAMP,ContextTokens,GeneratedTokens, such as the
Azure LLM inference traces of 2023, CC-BY 4.0, which this repository does not hold).

Cases are a load and what is beside it: `0.5x`, `1x`, `2x`, `4x` (the trace so many times as fast); `1x+train` (ResNet-152 training), `1x+engine` (a second engine with the same
load), `1x+batch` (ResNet-50 requests back to back).

Values: `latency_*` is the time to the first token (TTFT); `tpot_*` the time of each further token of a request; `tokens_per_s`, `requests_per_s`; `goodput_per_s`, the
finished ones that met TTFT_MS and TPOT_MS; `attainment`, the part of the judged ones that meets them; `batch_rate` of what is beside, `second_tokens_per_s` of the second engine;
`gpu_busy` and `memory_gib` as nvidia-smi sees them. `series` of a row has `gpu_busy` by second of the trace as played, for the vision paper's Fig. 1b.

Rules, fixed here before anything is measured:
- *Parts.* A round plays the next part of the trace that has FEWEST requests. Each mode plays each part.
- *Judged*, and measured for TTFT, are the requests that come TTFT_MS before the end of a round or earlier, in every mode. One that is unfinished at the end is judged by
  then: its first token came within TTFT_MS, and no further one is overdue. One without a token counts with the time that it has waited. Requests come until the end,
  so that the load does not fall.
- Programs that have started play WARM_S of the trace, which does not count.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import common
import peers
import rounds
from colocation import STEPS, rate
from common import BenchError, Results

ENGINE = (sys.executable, str(common.BENCH / "serve_worker.py"))
# What a user of an interactive service accepts, fixed before anything is measured.
TTFT_MS, TPOT_MS = 1000.0, 50.0
BESIDE = {"train": (["train", "--batch", "32"], STEPS), "batch": (["serve"], {"op": "repeat", "kind": "eager"})}
CASES = [f"{load}x{beside}" for beside in ("", "+train", "+engine", "+batch") for load in (0.5, 1, 2, 4)]
MODES = ["alone", "time-slicing", "mps", "mps-priority", "mps-50", "gpumux", "no-hints", "objective", "space", "group"]
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Llama-3.2-1B's, where nothing else is said: see generate.py.
SHAPES = {"vllm": LLAMA_3_8B, "transformers": {"max_position_embeddings": 8192}, "stand-in": {}}
CONTEXT = 8192
FEWEST = 20
WARM_S = 4.0


class Request(NamedTuple):
    """One line of a trace: when it came (in seconds from the first), tokens given, tokens made."""

    at: float
    prompt: int
    output: int


def trace(lines: Iterator[dict[str, str]]) -> list[Request]:
    """Reads a trace; what is longer than the context is cut to it."""
    found, first = [], None
    for line in lines:
        # Seven digits of a second's fraction are one too many for Python.
        at = datetime.datetime.fromisoformat(line["TIMESTAMP"][:26])
        first = first or at
        output = max(1, min(int(line["GeneratedTokens"]), CONTEXT // 2))
        found.append(Request((at - first).total_seconds(), max(1, min(int(line["ContextTokens"]), CONTEXT - output)), output))
    return found


def read(path: Path) -> list[Request]:
    """A trace in a file."""
    with open(path, newline="") as file:
        found = trace(csv.DictReader(file))
    if not found:
        raise BenchError(f"{path} has no requests")
    return found


def part(requests: Sequence[Request], speed: float, begin: float, seconds: float) -> list[Request]:
    """The requests of so many seconds from `begin`, at this speed; the trace begins anew at its end."""
    length = requests[-1].at + 1.0
    found, lap = [], int(begin * speed // length)
    while lap * length < (begin + seconds) * speed:
        low = bisect.bisect_left(requests, begin * speed - lap * length, key=lambda it: it.at)
        for one in requests[low:]:
            at = (one.at + lap * length) / speed - begin
            if at >= seconds:
                break
            found.append(one._replace(at=at))
        lap += 1
    return found


def begins(requests: Sequence[Request], speed: float, seconds: float) -> list[float]:
    """Where the parts of so many seconds begin that have enough requests, in seconds as played."""
    parts = range(max(1, int((requests[-1].at + 1.0) / speed // seconds)))
    found = [at * seconds for at in parts if len(part(requests, speed, at * seconds, seconds)) >= FEWEST]
    if not found:
        raise BenchError(f"no {seconds:g} s of the trace have {FEWEST} requests: use longer --seconds")
    return found


LEAD_S = 0.5


class Served(NamedTuple):
    """What became of a request: ms until its first token, and for each further one, if there are such; how many it had, and when the last one."""

    asked: Sequence[Any]
    ttft_ms: float | None
    tpot_ms: float | None
    tokens: int
    last_s: float

    def waited_ms(self, stop_s: float) -> float:
        """Until its first token, or until the end."""
        return (stop_s - self.asked[0]) * 1e3 if self.ttft_ms is None else self.ttft_ms

    def good(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether it had all its tokens, within these times."""
        return self.ttft_ms is not None and self.tokens >= self.asked[2] and self.ttft_ms <= ttft_ms and (self.tpot_ms or 0.0) <= tpot_ms

    def keeps(self, stop_s: float, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether it is good, or was until the end."""
        if self.ttft_ms is None or self.ttft_ms > ttft_ms or self.tokens >= self.asked[2]:
            return self.good(ttft_ms, tpot_ms)
        return (stop_s - self.asked[0]) * 1e3 - self.ttft_ms <= self.tokens * tpot_ms


def served(came: Sequence[Sequence[Any]], answer: dict[str, Any]) -> list[Served]:
    """Of requests (when, tokens given, tokens to make) what an engine answers of them."""
    found = []
    for one, first, last, made in zip(came, answer["first_s"], answer["last_s"], answer["tokens"], strict=True):
        ttft = None if first is None else (first - one[0]) * 1e3
        found.append(Served(one, ttft, (last - first) / (made - 1) * 1e3 if made > 1 else None, made, last or 0.0))
    return found


def cell(came: Sequence[Request], answer: dict[str, Any], seconds: float, **others: float) -> dict[str, Any]:
    """What one round gave: `first_s` and `last_s` of each request, or none, relative to its start, and how many `tokens` it had made."""
    found = served(came, answer)
    done, good = (sum(map(of, found)) for of in (lambda it: it.tokens >= it.asked[2], lambda it: it.good(TTFT_MS, TPOT_MS)))
    rates = {"tokens_per_s": sum(it.tokens for it in found) / seconds, "requests_per_s": done / seconds, "goodput_per_s": good / seconds}
    judged = [it for it in found if it.asked[0] <= seconds - TTFT_MS / 1e3]
    if judged:
        rates["attainment"] = sum(it.keeps(seconds, TTFT_MS, TPOT_MS) for it in judged) / len(judged)
    ttft = [it.waited_ms(seconds) for it in judged]
    tpot = [it.tpot_ms for it in found if it.tpot_ms is not None]
    return rounds.cell(ttft, **rates, **others) | {"more_ms": {"tpot": rounds.cell(tpot)["latencies_ms"]}}


class Used(NamedTuple):
    """What nvidia-smi saw: means, and the part of each second that the GPU was busy, by seconds from `since`."""

    means: dict[str, float]
    busy: dict[int, float]


def used_of(lines: Iterable[str], since: float, until: float) -> Used:
    """Reads nvidia-smi's lines between two times: time, percent busy, MiB."""
    seen = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last one may be cut
            at, busy, mib = line.split(",")
            seen.append((datetime.datetime.strptime(at.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp() - since, float(busy) / 100, float(mib) / 1024))
    seen = [it for it in seen if 0 <= it[0] < until - since]
    if not seen:
        return Used({}, {})
    seconds = dict[int, list[float]]()
    for at, part_busy, _ in seen:
        seconds.setdefault(int(at // 1), []).append(part_busy)
    means = {"gpu_busy": statistics.fmean(it[1] for it in seen), "memory_gib": statistics.fmean(it[2] for it in seen)}
    return Used(means, {at: statistics.fmean(of) for at, of in seconds.items()})


@contextlib.contextmanager
def utilization(seconds: float) -> Iterator[Used]:
    """Fills in what nvidia-smi sees of the programs' GPU for so long from when the programs begin, at the block's end; nothing, where there is none."""
    found, since = Used({}, {}), time.time() + LEAD_S
    command = ["nvidia-smi", "-i", common.visible(), "--query-gpu=timestamp,utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
    with tempfile.TemporaryFile("w+") as out:
        try:
            watching = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError:
            yield found
            return
        try:
            yield found
        finally:
            common.end(watching, 2.0)
        out.seek(0)
        means, busy = used_of(out, since, since + seconds)
        found.means.update(means)
        found.busy.update(busy)


def main() -> int:
    """Runs all rounds that were asked for, or as many as the budget allows."""
    parser = common.parser(
        "A language-model server under a production trace, alone and beside other work, by mode of sharing.",
        "  GPUMUX=target/release/gpumux python3 bench/serve.py --trace conv.csv --cases 1x,1x+train --budget 500\n"
        "The exit code is 75 when the budget was spent: the same command goes on.",
    )
    rounds.arguments(parser, seconds=20.0)
    parser.add_argument("--trace", type=Path, required=True, help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens")
    parser.add_argument("--library", choices=SHAPES, default="vllm", help="the engine; stand-in computes nothing: see standin.py [%(default)s]")
    parser.add_argument("--config", type=Path, help="folder with the model's config.json [Llama-3-8B's shape; Llama-3.2-1B's with transformers]")
    parser.add_argument("--memory", type=float, default=0.35, help="part of the GPU's memory for each engine of vLLM [%(default)s]")
    more = 'more arguments of vllm.LLM, or of ContinuousBatchingConfig with transformers, as JSON: {"enforce_eager": true} [%(default)s]'
    parser.add_argument("--engine", default="{}", help=more)
    common.selections(parser, CASES, MODES, cases=["1x", "1x+train"], modes=["alone", "time-slicing", "gpumux"])
    options = parser.parse_args()
    logs = common.begin(options)
    requests = read(options.trace)
    config = options.config or logs / "model"
    if not options.config:
        config.mkdir(exist_ok=True)
        (config / "config.json").write_text(json.dumps(SHAPES[options.library]))
    engine = ([*ENGINE, str(config), "--library", options.library, "--memory", str(options.memory), "--context", str(CONTEXT), "--engine", options.engine], "latency")
    seconds, most, least = rounds.quick(options)
    parts = {case: begins(requests, speed_of(case), seconds) for case in options.cases}
    name = options.trace.stem if options.library == "vllm" else f"{options.library}-{options.trace.stem}"
    results = Results(f"serve-{name}", options.out, CASES, MODES)
    with ExitStack() as stack:
        stages = peers.stages(MODES, options.modes)
        crews, notes = peers.crews(stack, stages.values(), logs, ())
        modes = [name for name, stage in stages.items() if stage in crews]
        warmed = set[common.Worker]()

        def programs(case: str) -> peers.Programs:
            beside = case.partition("+")[2]
            others = {"second": engine} if beside == "engine" else {beside: ([*common.TORCH, *BESIDE[beside][0]], "batch")} if beside in BESIDE else {}
            return {"engine": engine} | others

        def have(case: str, mode: str) -> None:
            crew = crews[stages[mode]]
            crew.have(programs(case))
            if mode in peers.SETTINGS:
                peers.settle(crew, *peers.SETTINGS[mode])
            now = set(crew.workers.values())
            if not now <= warmed:
                play(case, mode, parts[case][0], min(WARM_S, seconds))
                warmed.update(now)

        def play(case: str, mode: str, begin: float, seconds: float) -> dict[str, Any]:
            beside, crew = case.partition("+")[2], crews[stages[mode]]
            came = part(requests, speed_of(case), begin, seconds)
            replay = {"op": "replay", "requests": came}
            orders = {"engine": replay} | ({"second": replay} if beside == "engine" and mode != "alone" else {})
            batch = {beside: BESIDE[beside][1]} if beside in BESIDE else {}
            with utilization(seconds) as used:
                answers = crew.measure(seconds, orders | (batch if mode != "alone" else {}), LEAD_S)
            others = dict(used.means)
            if batch:
                others["batch_rate"] = rate((crew.measure(seconds / 4, batch) if mode == "alone" else answers)[beside])
            if "second" in answers:
                others["second_tokens_per_s"] = sum(answers["second"]["tokens"]) / seconds
            over = {f"{begin + at:g}": float(f"{busy:.3g}") for at, busy in sorted(used.busy.items())}
            return cell(came, answers["engine"], seconds, **others) | ({"series": {"gpu_busy": over}} if over else {})

        def prepare(case: str) -> None:
            def at_once(stage: str) -> peers.Programs:
                # vLLM measures what memory is free while it starts: one engine after the other.
                there = crews[stage].workers
                return {name: it for name, it in programs(case).items() if options.library != "vllm" or name in BESIDE or name in there}

            failed = peers.warm({stages[mode]: crews[stages[mode]] for mode in modes}, at_once)

            def started(case: str, mode: str) -> None:
                if stages[mode] in failed:
                    raise failed[stages[mode]]
                have(case, mode)

            rounds.prepare(case, modes, started, notes)

        def measure(case: str, mode: str, number: int) -> dict[str, Any]:
            have(case, mode)
            return play(case, mode, parts[case][number % len(parts[case])], seconds)

        plan = rounds.Plan(options.cases, modes, measure, prepare, dict.fromkeys(options.cases, least), options.cases)
        return rounds.run(plan, results, options.budget, most, notes)


def speed_of(case: str) -> float:
    """How many times as fast a case plays the trace."""
    return float(case.partition("x")[0])


if __name__ == "__main__":
    sys.exit(main())
