"""What the workers compute: networks with random weights, and stand-ins for other GPU programs.

`build(name)` gives a function from an input tensor to an output tensor, both on the GPU, an example input on
the CPU, and whether it can be captured in a CUDA graph. Weights are random: time does not depend on them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torchvision

Forward = Callable[[Any], Any]


class Model(NamedTuple):
    """A computation, its example input (on the CPU), and whether a CUDA graph can hold it."""

    forward: Forward
    example: Any
    graph: bool = True


def vision(name: str, side: int = 224) -> Model:
    """A torchvision network in fp16, batch 1."""
    network = getattr(torchvision.models, name)
    # GoogLeNet's kin draw their weights one by one, for a minute, unless told not to.
    extra = {"init_weights": False, "aux_logits": False} if name == "inception_v3" else {}
    with torch.device("cuda"):  # a big network's weights take seconds to draw on the CPU
        return Model(network(**extra).half().eval(), torch.randn(1, 3, side, side, device="cpu").half())


def distilbert(tokens: int = 128) -> Model:
    """DistilBERT base in fp16, batch 1."""
    example = torch.randint(0, 30_000, (1, tokens))
    try:
        from transformers import DistilBertConfig, DistilBertModel

        with torch.device("cuda"):
            network = DistilBertModel(DistilBertConfig()).half().eval()
        forward = lambda ids: network(input_ids=ids).last_hidden_state[:, 0]  # noqa: E731
        forward(example.cuda())
        return Model(forward, example)
    except Exception as error:  # whatever this version of transformers is missing
        print(f"transformers cannot be used ({error}): same shape from torch", file=sys.stderr)
    embed = torch.nn.Embedding(30_522, 768).cuda().half()
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 6).cuda().half().eval()
    return Model(lambda ids: encoder(embed(ids))[:, 0], example)


def decode(tokens: int = 8, prompt: int = 128, layers: int = 12, width: int = 768) -> Model:
    """The next tokens of a language model of GPT-2's size in fp16, one after the other, with a cache of keys and values."""
    functional, heads = torch.nn.functional, width // 64
    with torch.device("cuda"):
        words = torch.nn.Embedding(50_257, width).half()
        linear = lambda given, made: torch.nn.Linear(given, made).half()  # noqa: E731
        blocks = [
            (linear(width, 3 * width), linear(width, width), linear(width, 4 * width), linear(4 * width, width))
            for _ in range(layers)
        ]
        cache = torch.randn(layers, 2, heads, prompt + tokens, 64).half()

    def step(word: Any, at: int) -> Any:
        state = words(word)
        for (inner, outer, up, down), known in zip(blocks, cache):
            query, key, value = inner(functional.layer_norm(state, (width,))).view(3, heads, 1, 64)
            known[0, :, at], known[1, :, at] = key[:, 0], value[:, 0]
            seen = functional.scaled_dot_product_attention(query, known[0, :, : at + 1], known[1, :, : at + 1])
            state = state + outer(seen.reshape(1, width))
            state = state + down(functional.gelu(up(functional.layer_norm(state, (width,)))))
        return (state @ words.weight.T).argmax(-1)

    def forward(word: Any) -> Any:
        for at in range(prompt, prompt + tokens):
            word = step(word, at)
        return word

    return Model(forward, torch.zeros(1, dtype=torch.long, device="cpu"))


def weather(steps: int = 10) -> Model:
    """Stand-in for a weather simulation: a five-point stencil on four fields, state kept between calls."""
    state = torch.rand(4, 1024, 2048).cuda()

    def forward(push: Any) -> Any:
        for _ in range(steps):
            around = sum(state.roll(shift, axis) for shift in (1, -1) for axis in (1, 2))
            state.mul_(0.6).add_(around, alpha=0.1)
        state.add_(push)
        return state[:, 0, 0]

    return Model(forward, torch.zeros(1))


def on_graph(algorithm: str, nodes: int = 52_804, edges: int = 10_614_210, rounds: int = 10) -> Model:
    """Stand-in for a graph program on a random graph of the size of SuiteSparse's crankseg_1."""
    random = torch.Generator().manual_seed(1)
    source, target = (torch.randint(0, nodes, (edges,), generator=random).cuda() for _ in range(2))
    step = {"sssp": torch.rand(edges, generator=random).cuda(), "bfs": 1.0}.get(algorithm, 0.0)
    degree = torch.zeros(nodes).cuda().index_add_(0, source, torch.ones(edges).cuda()).clamp_(min=1)

    first = {
        "pagerank": torch.full((nodes,), 1 / nodes),
        "cc": torch.arange(nodes, dtype=torch.float32),
    }.get(algorithm, torch.full((nodes,), float("inf"))).cuda()

    def ranks(_: Any) -> Any:
        value = first
        for _ in range(rounds):
            moved = torch.zeros_like(value).index_add_(0, target, (value / degree)[source])
            value = moved.mul_(0.85).add_(0.15 / nodes)
        return value[:8]

    def least(root: Any) -> Any:
        value = first.clone() if algorithm == "cc" else first.index_fill(0, root, 0.0)
        for _ in range(rounds):
            value = value.scatter_reduce(0, target, value[source] + step, "amin")
        return value[:8]

    forward = ranks if algorithm == "pagerank" else least
    return Model(forward, torch.zeros(1, dtype=torch.long), graph=False)


MODELS: dict[str, Callable[[], Model]] = {
    "resnet50": lambda: vision("resnet50"),
    "vgg": lambda: vision("vgg19"),
    "resnet152": lambda: vision("resnet152"),
    "densenet": lambda: vision("densenet201"),
    "inception": lambda: vision("inception_v3", 299),
    "bert": distilbert,
    "decode": decode,
    "miniweather": weather,
    **{name: (lambda name=name: on_graph(name)) for name in ("bfs", "sssp", "pagerank", "cc")},
}


def build(name: str) -> Model:
    """The model of this name."""
    return MODELS[name]()
