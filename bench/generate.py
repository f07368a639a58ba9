"""Hugging Face transformers under measurement, with random weights of Llama-3.2-1B's shape: for `torch_worker.py generate`, and for `serve_worker.py`.

`eager` is `generate`, one sequence; `batching` the library's own continuous batching, with clients that each send their next request when the last
is answered; `graph` the decoder of shapes.py as one CUDA graph a token, back to back. No CUDA graphs and no compiler in the first two.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import time
from typing import Any

import shapes
import torch

PROMPT, TOKENS, CLIENTS = 64, 64, 8
WARM_S = 2.0  # tokens before the first order


def llama(**shape: Any) -> Any:
    """A model on the GPU; `shape` has what differs from Llama-3.2-1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256)
    # No token ends a sequence before its length.
    config = LlamaConfig(**usual | dict(max_position_embeddings=4096) | shape | dict(attn_implementation="sdpa", bos_token_id=None, eos_token_id=None))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def batcher(model: Any, **sizes: Any) -> Any:
    """The library's continuous batching of a model, at work in a thread of its own."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

    usual = dict(block_size=256, max_batch_tokens=1024, use_cuda_graph=False, max_blocks_per_request=0)
    # Asked for by name: otherwise the library looks for kernels on the network.
    model.set_attn_implementation("paged|sdpa")
    generation = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1)
    config = ContinuousBatchingConfig(**usual | sizes)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    manager.start()
    return manager


class Over(Exception):
    """The time of a measurement is over: the rest of a sequence is not made."""


class Clock:
    """A streamer, as of a server that sends each token on: when each came."""

    def __init__(self, stop: float) -> None:
        self.times: list[float] = []
        self.stop = stop

    def put(self, _tokens: Any) -> None:
        """The prompt, then each token, on the host."""
        self.times.append(time.monotonic())
        if self.times[-1] >= self.stop:
            raise Over

    def end(self) -> None:
        """Of the sequence."""


class Generate:
    """The model, and its ways of making tokens."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = llama()
        self.device = torch.device("cuda")
        self.manager: Any = None
        # Another model, which takes memory of its own.
        self.kinds = options.kinds.split(",")
        self.shapes = shapes.Shapes() if "graph" in self.kinds else None
        self.eager(time.monotonic(), time.monotonic() + WARM_S, random.Random(1))

    def prompt(self, rng: random.Random) -> list[int]:
        """Words at random."""
        return [rng.randrange(10, 100_000) for _ in range(PROMPT)]

    def eager(self, start: float, stop: float, rng: random.Random) -> list[list[float]]:
        """Sequences one after the other: when each token came."""
        found = []
        while True:
            clock = Clock(stop)
            words = torch.tensor([self.prompt(rng)], device=self.device)
            mask = torch.ones_like(words)
            with contextlib.suppress(Over):
                self.model.generate(words, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, streamer=clock)
            found.append(clock.times[1:])
            if time.monotonic() >= stop:
                return found

    def start_batching(self) -> None:
        """Makes the manager; its cache is small, as many programs share the device."""
        self.manager = batcher(self.model, num_blocks=64, max_requests_per_batch=2 * CLIENTS)

    def batching(self, start: float, stop: float, rng: random.Random) -> list[list[float]]:
        """Clients of the engine: when each token of each request came."""
        found: list[list[float]] = []
        if self.manager is None:
            self.start_batching()
            warm = time.monotonic()
            self.batching(warm, warm, rng)
        try:
            under_way = 0
            while time.monotonic() < stop or under_way or not found:
                while under_way < CLIENTS and (time.monotonic() < stop or not found):
                    self.manager.add_request(self.prompt(rng), max_new_tokens=TOKENS, record_timestamps=True)
                    under_way += 1
                done = self.manager.get_result(timeout=30.0)
                if done is None or done.error:
                    raise RuntimeError(f"continuous batching: {done.error if done else 'no answer within 30 s'}")
                found.append(done.timestamps)
                under_way -= 1
            return found
        except BaseException:
            self.stop_batching()
            raise

    def stop_batching(self) -> None:
        """Back to the attention of `generate`."""
        if self.manager is not None:
            self.manager.stop(block=True, timeout=10.0)
            self.manager = None
            self.model.set_attn_implementation("sdpa")

    def graph(self, start: float, stop: float, _rng: random.Random) -> list[list[float]]:
        """Tokens of a CUDA graph."""
        found = []
        assert self.shapes
        while not found or time.monotonic() < stop:
            self.shapes.replay()
            found.append(time.monotonic())
        return [found]

    def free(self) -> None:
        """Tokens in the first way until the process is ended."""
        getattr(self, self.kinds[0])(time.monotonic(), math.inf, random.Random(1))

    def tokens(self, order: dict[str, Any]) -> dict[str, Any]:
        """Tokens from before `start` to `stop`: the times between them, and how many there were."""
        start, stop, kind = order["start"], order["stop"], order["kind"]
        if kind == "eager":
            self.stop_batching()
        sequences = getattr(self, kind)(start, stop, random.Random(order["seed"]))
        between = [(end - begin) * 1e3 for times in sequences for begin, end in zip(times, times[1:]) if begin >= start and end <= stop]
        calls = sum(start <= it <= stop for times in sequences for it in times)
        if not between:
            raise RuntimeError(f"{kind}: no two tokens between start and stop: raise --seconds")
        return {"latencies_ms": between, "calls": calls, "seconds": stop - start}
