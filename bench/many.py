"""Many models on one card: vLLM engines (random weights, Llama-3-8B's shape), asked by a skewed load. Which of them have their memory on the card changes with it.

Cases are numbers of models, such as `6`. All that do not fit on the card need room on the host. The k-th one is asked `--rate` ÷ k times a second at random moments, with the lengths of a recorded trace (`--trace`, as for
serve.py). The load is the same in all modes; that of fewer models is a part of it. In each of `--rounds` it comes at other moments.

Modes: `stock` (all are on the card, where they fit; of one model it is a card of its own), `sleep` (vLLM's sleep mode, level 1, without gpumux: the
benchmark says which engines are awake, as a router of a fleet does: as many as fit, and a model that is asked takes the place of the one that has been idle for the longest, or of the
one that has been awake for the longest once its requests are done), `gpumux` (`gpumux run` and no more). In `sleep` engines start few at a time, since each needs room.

Values: `attainment`, the part of all requests that meet TTFT_MS and TPOT_MS (an unfinished one does not); `goodput_per_s` of them; `ttft_*`, `tpot_*`; `first_p50_ms`, `first_p99_ms`: times to the
first token of requests before which their model had none for PAUSE_S or more; `awake`, engines that `sleep` has on the card at once; `ready_s`, until all engines were there; `rounds`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import common
import engines
import kv
import rooms
import rounds
import serve
from common import BenchError, Gpumux, Mode, Results, Worker
from memory import Nvml, cell

MODES = ["stock", "sleep", "gpumux"]
CELLS = "1/stock,4/stock,4/sleep,4/gpumux,6/sleep,6/gpumux"
# What Aegaeon's evaluation (SOSP '25) takes as its usual objectives.
TTFT_MS, TPOT_MS = 10_000.0, 100.0
PAUSE_S = 2.0
LONGEST = 256  # tokens that a request makes, so that a measurement has many
SPARE = 1 << 30


class Request(NamedTuple):
    """When it comes (seconds from the start), tokens given and made, and whether its model had a pause before."""

    at: float
    prompt: int
    output: int
    paused: bool


def load(model: int, lengths: Sequence[serve.Request], rate: float, seconds: float, number: int = 0) -> list[Request]:
    """The requests of a model in a round; the most asked one is 0."""
    rng, found = random.Random(1000 * number + model), list[Request]()
    busy = -PAUSE_S
    for at in common.poisson(rng, rate / (model + 1), 0.0, seconds):
        one = rng.choice(lengths)
        found.append(Request(at, one.prompt, min(one.output, LONGEST), at - busy >= PAUSE_S))
        busy = at
    return found


Round = Sequence[serve.Served]


def values(played: Sequence[Round], seconds: float) -> dict[str, float]:
    """Of all models together. A request without a token counts with the time that it waited until the end of its round, which has so many seconds."""
    ttft, first, tpot, good = list[float](), list[float](), list[float](), 0
    for requests in played:
        for it in requests:
            ttft.append(it.waited_ms(seconds))
            first += ttft[-1:] if it.asked.paused else []
            tpot += [it.tpot_ms] if it.tpot_ms is not None else []
            good += it.good(TTFT_MS, TPOT_MS)
    if not tpot:
        raise BenchError("no request had two tokens")
    found = {"attainment": good / len(ttft), "goodput_per_s": good / (seconds * len(played)), "requests": float(len(ttft))}
    return found | common.quantiles("ttft", ttft) | common.quantiles("first", first) | common.quantiles("tpot", tpot)


def fits(usable: int, awake: int, asleep: int, models: int) -> int:
    """How many engines may be awake, where one takes so many bytes awake and asleep."""
    return max(0, min(models, (usable - SPARE - models * asleep) // max(1, awake - asleep)))


@contextlib.contextmanager
def started(name: str, models: int, logs: Path, options: argparse.Namespace) -> Iterator[tuple[list[Worker], dict[str, float]]]:
    """So many engines in a mode, ready; and what is to be said of them."""
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(Gpumux(name, logs) if name == "gpumux" else Mode(name, logs))
        given, flags = {"kv_cache_memory_bytes": options.cache}, list[str]()
        room = None
        if name == "sleep":
            room = stack.enter_context(rooms.Room(logs / f"room-{models}"))
            given["enable_sleep_mode"] = True
            flags = ["--room", str(room.path)]
        nvml, begin, workers = Nvml(), time.monotonic(), list[Worker]()
        before, asleep, size, most = nvml.memory().used, 0, 0, models

        def start(count: int) -> list[Worker]:
            numbers = range(len(workers), min(models, len(workers) + count))
            new = [engines.engine(mode, f"model-{number}", options, *flags, context=8192, **given) for number in numbers]
            for worker in new:
                stack.callback(worker.close)
            # One that has ended is noticed although others are waited for.
            while any(it.lines.empty() for it in new) and all(it.process.poll() is None for it in new) and options.left.lasts(5):
                time.sleep(0.1)
            for worker in sorted(new, key=lambda it: it.process.poll() is None):
                engines.ready(worker, options)
            workers.extend(new)
            return new

        while len(workers) < models:
            # The first one shows how many fit.
            new = start(models if not room else most if size else 1)
            size = size or nvml.memory().used - before
            for worker in new if room else ():
                worker.send(sleep=True)
            for worker in new if room else ():
                worker.reply(common.REPLY_S)
            if room and not asleep:
                asleep = nvml.memory().used - before
                most = fits(nvml.memory().total - before, size, asleep, models)
                if not most:
                    raise BenchError(f"none of {models} engines fits while the others sleep")
        said = {"ready_s": time.monotonic() - begin}
        if room:
            room.allow(most)
            said["awake"] = float(most)
        yield workers, said


def once(workers: Sequence[Worker], number: int, lengths: Sequence[serve.Request], seconds: float, stop_s: float, rate: float) -> Round:
    """One round."""
    came = [load(model, lengths, rate, seconds, number) for model in range(len(workers))]
    answers = engines.replay(workers, [[it[:3] for it in requests] for requests in came], stop_s)
    return [it for requests, answer in zip(came, answers, strict=True) for it in serve.served(requests, answer)]


def measure(name: str, models: int, lengths: Sequence[serve.Request], logs: Path, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The values of a mode with so many models, and their intervals where there are enough rounds."""
    with started(name, models, logs, options) as (workers, said):
        stop_s, found = options.seconds + options.drain, list[Round]()
        options.left.check(stop_s + 5)
        while len(found) < options.rounds and options.left.lasts(stop_s + 5):
            found.append(once(workers, len(found), lengths, options.seconds, stop_s, options.rate))
        made, around = values(found, stop_s), dict[str, list[float]]()
        if len(found) >= rounds.LEAST:
            pooled = lambda times: [one for one, n in zip(found, times) for _ in range(n)]  # noqa: E731
            around = {key: rounds.interval(lambda times, key=key: values(pooled(times), stop_s)[key], len(found)) for key in made if key != "requests"}
        return made | said | {"rounds": float(len(found))}, around


def cells(text: str) -> list[tuple[int, str]]:
    """`6/gpumux,6/sleep`."""
    found = [(int(models), name) for models, _, name in (it.partition("/") for it in text.split(","))]
    if wrong := [name for models, name in found if name not in MODES or models < 1]:
        raise argparse.ArgumentTypeError(f"{wrong[0]}: a cell is a number of models, / and one of {', '.join(MODES)}")
    return found


def main() -> int:
    """Runs the cases in their modes, until the budget is spent."""
    parser = common.parser(
        "Many models on one card.",
        "  PYTHONPATH=DIR/carry:DIR/carry_deps GPUMUX=.bundle/bin/gpumux python3 bench/many.py --trace conv.csv --budget 550",
    )
    parser.add_argument("--trace", type=Path, required=True, help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens")
    parser.add_argument("--cells", type=cells, default=cells(CELLS), help=f"numbers of models, each with a mode [{CELLS}]")
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second of the most asked model [%(default)s]")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a round, in which requests come [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="in each cell [%(default)s]")
    parser.add_argument("--drain", type=float, default=30.0, help="seconds after them, until all could be done [%(default)s]")
    parser.add_argument("--cache", default="2GiB", help="of an engine's KV cache [%(default)s]")
    parser.add_argument("--memory", type=float, default=0.2, help="part of the GPU's memory that vLLM wants to see free [%(default)s]")
    parser.add_argument("--attention", default="TRITON_ATTN", help="vLLM's attention backend [%(default)s]")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds for all [%(default)s]")
    parser.set_defaults(graphs=False, stand_in=False, ranks=1, library="vllm")
    options = parser.parse_args()
    logs = common.begin(options)
    options.seconds /= 4 if options.quick else 1
    options.cache, options.left = kv.bytes_of(options.cache), engines.Budget(options.budget)
    lengths = serve.read(options.trace)
    options.model = engines.prepare(logs, serve.LLAMA_3_8B)
    results = Results("many", options.out, list(dict.fromkeys(str(models) for models, _ in options.cells)), MODES)
    for models, name in options.cells:
        with cell(results, f"{models}, {name}", logs):
            options.left.check(60)
            results.add(str(models), name, *measure(name, models, lengths, logs, options))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
