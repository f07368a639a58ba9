"""The ways in which a latency program submits work and waits for it, by one small language model: for `torch_worker.py shapes`.

| shape | one request |
|---|---|
| `graph` | a token as one CUDA graph, then a wait; pauses of 1 to 4 ms between requests |
| `eager` | a token, launched kernel by kernel, then a wait |
| `short` | `eager` with a quarter of the layers |
| `batching` | as an engine with continuous batching: 1 ms on the host, a token for each of 1 to 16 sequences, then a wait; now and then a prompt of 512 tokens |
| `pipeline` | tokens submitted two ahead; a request ends when its token is there, and begins when that before is |
| `callback` | `eager`, with a host function in the stream that wakes the program |
| `poller` | `eager`, with a loop that asks whether an event has come |
| `gpu-bound` | forty matrix products of about 0.2 ms, then a wait |
| `changing` | 30 of `graph`, 30 of `eager`, and so on: also each by its name |
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

SHAPES = ("graph", "eager", "short", "batching", "pipeline", "callback", "poller", "gpu-bound", "changing")
PAUSE_S = (0.001, 0.004)
IN_A_ROW = 30  # requests of a kind, where it changes
AHEAD = 2  # tokens of the pipeline
HOST_S = 0.001  # an engine's own work for a step
PROMPT = 512
PROMPT_EVERY = 32  # steps
SEQUENCES = 16


class Decoder:
    """A transformer of Llama-3.2-1B's shape with random weights, and operations as small as Hugging Face's: about 500 kernels a token."""

    def __init__(self, layers: int = 16, width: int = 2048, inner: int = 8192, vocabulary: int = 128_256, context: int = 512) -> None:
        made = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[0] ** 0.5  # noqa: E731
        self.words, self.heads = made(vocabulary, width), width // 64
        self.scale, self.turn = made(width), made(64)
        self.layers = [(made(width, 3 * width), made(width, width), made(width, inner), made(width, inner), made(inner, width)) for _ in range(layers)]
        self.cache = torch.randn(layers, 2, SEQUENCES, self.heads, context, 64, device="cuda", dtype=torch.bfloat16)

    def norm(self, state: Any) -> Any:
        """The root-mean-square norm in single steps."""
        wide = state.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(state.dtype) * self.scale

    def rotated(self, value: Any) -> Any:
        """A rotary embedding in single steps; of which position does not matter to the time."""
        left, right = value.chunk(2, -1)
        return value * self.turn + torch.cat((-right, left), -1) * self.turn

    def forward(self, state: Any, cached: bool, layers: int | None = None) -> Any:
        """The first layers, or all, for sequences × tokens; with one token each, the cache is the past."""
        sequences, tokens, width = state.shape
        for (inner, outer, gate, up, down), known in zip(self.layers[:layers], self.cache):
            parts = (self.norm(state) @ inner).chunk(3, -1)
            query, key, value = (it.view(sequences, tokens, self.heads, 64).transpose(1, 2) for it in parts)
            query, key = self.rotated(query), self.rotated(key)
            if cached:
                known[0, :sequences, :, -1:], known[1, :sequences, :, -1:] = key, value
                key, value = known[0, :sequences], known[1, :sequences]
            seen = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=not cached)
            state = state + seen.transpose(1, 2).reshape(sequences, tokens, width) @ outer
            normed = self.norm(state)
            state = state + (torch.nn.functional.silu(normed @ gate) * (normed @ up)) @ down
        return state

    def step(self, words: Any, layers: int | None = None) -> Any:
        """The next word of each sequence."""
        state = self.forward(self.words[words].unsqueeze(1), cached=True, layers=layers)
        return (self.norm(state[:, 0]) @ self.words.T).argmax(-1)

    def prompt(self, tokens: int) -> Any:
        """What a new sequence of so many tokens costs."""
        return self.forward(self.words[:tokens].unsqueeze(0), cached=False)


class Shapes:
    """A program that takes the shape of an order."""

    def __init__(self, _options: Any = None) -> None:
        self.decoder = Decoder()
        self.word = torch.zeros(1, dtype=torch.long, device="cuda")
        self.host = torch.zeros(AHEAD + 1, 1, dtype=torch.long).pin_memory()
        self.matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.product = torch.empty_like(self.matrix)
        self.arrived = threading.Event()
        # Kept for as long as the driver may call it.
        self.wake = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.arrived.set())
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, type(self.wake), ctypes.c_void_p]
        with torch.no_grad():
            # As torch's documentation asks: warm up beside the default stream, then capture.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.decoder.step(self.word)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.graph_word = self.decoder.step(self.word)
            for name in SHAPES[:-1]:
                for _ in itertools.islice(self.requests(name, random.Random(1)), 5):
                    pass

    def eager(self, layers: int | None = None) -> None:
        """Submits a token."""
        self.host[0].copy_(self.decoder.step(self.word, layers), non_blocking=True)

    def replay(self) -> None:
        """One token by its graph."""
        self.graph.replay()
        self.host[0].copy_(self.graph_word, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def waited(self, wait: Callable[[], None], layers: int | None = None) -> Iterator[tuple[str, float]]:
        """Tokens, each waited for."""
        while True:
            begin = time.monotonic()
            self.eager(layers)
            wait()
            yield "eager", begin

    def by_callback(self) -> None:
        """Until the driver calls."""
        self.arrived.clear()
        failed = self.driver.cuLaunchHostFunc(torch.cuda.current_stream().cuda_stream, self.wake, None)
        if failed or not self.arrived.wait(60.0):
            raise RuntimeError(f"cuLaunchHostFunc: {failed or 'no call within 60 s'}")

    def by_polling(self) -> None:
        """Until an event has come."""
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            pass

    def graphs(self, rng: random.Random) -> Iterator[tuple[str, float]]:
        """Requests of an interactive client."""
        while True:
            time.sleep(rng.uniform(*PAUSE_S))
            begin = time.monotonic()
            self.replay()
            yield "graph", begin

    def batching(self, rng: random.Random) -> Iterator[tuple[str, float]]:
        """Steps of an engine."""
        words, count = torch.zeros(SEQUENCES, dtype=torch.long, device="cuda"), SEQUENCES // 2
        for step in itertools.count():
            begin = time.monotonic()
            while time.monotonic() < begin + HOST_S:
                pass
            if step % PROMPT_EVERY == 0:
                self.decoder.prompt(PROMPT)
            count = min(SEQUENCES, max(1, count + rng.choice((-1, 0, 1))))
            self.decoder.step(words[:count]).tolist()
            yield "batching", begin

    def pipeline(self) -> Iterator[tuple[str, float]]:
        """Tokens that are submitted before the last is there."""
        events = [torch.cuda.Event() for _ in range(AHEAD + 1)]
        word, last = self.word, time.monotonic()
        for step in itertools.count():
            word = self.decoder.step(word)
            slot = step % len(events)
            self.host[slot].copy_(word, non_blocking=True)
            events[slot].record()
            if step >= AHEAD:
                events[(step - AHEAD) % len(events)].synchronize()
                yield "pipeline", last
                last = time.monotonic()

    def products(self) -> Iterator[tuple[str, float]]:
        """Long kernels, one after the other."""
        while True:
            begin = time.monotonic()
            for _ in range(40):
                torch.mm(self.matrix, self.matrix, out=self.product)
            torch.cuda.current_stream().synchronize()
            yield "gpu-bound", begin

    def requests(self, shape: str, rng: random.Random) -> Iterator[tuple[str, float]]:
        """Requests without end: the kind of each, and when it began."""
        wait = torch.cuda.current_stream().synchronize
        match shape:
            case "graph":
                return self.graphs(rng)
            case "eager":
                return self.waited(wait)
            case "short":
                return self.waited(wait, len(self.decoder.layers) // 4)
            case "batching":
                return self.batching(rng)
            case "pipeline":
                return self.pipeline()
            case "callback":
                return self.waited(self.by_callback)
            case "poller":
                return self.waited(self.by_polling)
            case "gpu-bound":
                return self.products()
            case "changing":
                kinds = itertools.cycle([self.graphs(rng), self.waited(wait)])
                return itertools.chain.from_iterable(itertools.islice(kind, IN_A_ROW) for kind in kinds)
        raise ValueError(f"unknown shape {shape}: use {', '.join(SHAPES)}")

    def shape(self, order: dict[str, Any]) -> dict[str, Any]:
        """Works from before `start` to `stop`: the time of each request in between, by kind."""
        found: dict[str, list[float]] = {}
        for kind, begin in self.requests(order["shape"], random.Random(order["seed"])):
            now = time.monotonic()
            if now >= order["stop"]:
                break
            if begin >= order["start"]:
                found.setdefault(kind, []).append((now - begin) * 1e3)
        torch.cuda.synchronize()
        every = [ms for kind in found.values() for ms in kind]
        more = found if len(found) > 1 else {}
        return {"latencies_ms": every, "more_ms": more, "seconds": order["stop"] - order["start"]}
