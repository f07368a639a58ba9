"""What the workers compute: networks with random weights, and the programs of GPreempt's workloads that are none (algorithms.py).

`build(name)` gives a function from an input tensor to an output tensor, both on the GPU, an example input on
the CPU, and whether it can be captured in a CUDA graph. Weights are random: time does not depend on them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import algorithms
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


def weather(nz: int = 512, nx: int = 1024) -> Model:
    """A time step of the weather model, its state kept between calls."""
    column = lambda values: torch.tensor(values, dtype=torch.float32).reshape(-1, 1)  # noqa: E731
    # The bubble is drawn cell by cell: on the CPU, and coarse.
    made = algorithms.Weather(nz, nx, column, lambda shape: torch.zeros(shape), torch.cat)
    for name, value in vars(made).items():
        if isinstance(value, torch.Tensor):
            setattr(made, name, value.cuda())

    def forward(push: Any) -> Any:
        # Two steps, so that a captured graph has both orders of directions.
        made.step()
        made.step()
        return made.state[:, 0, 0] + push

    return Model(forward, torch.zeros(1))


def on_graph(algorithm: str, nodes: int = 52_804, edges: int = 10_614_210) -> Model:
    """A graph program until nothing changes, on a power-law graph of the size of SuiteSparse's crankseg_1, edges both ways."""
    random = torch.Generator().manual_seed(1)
    weights = torch.tensor(algorithms.power_law_weights(nodes))
    ends = [torch.multinomial(weights, edges // 2, replacement=True, generator=random) for _ in range(2)]
    source, target = torch.cat(ends).cuda(), torch.cat(ends[::-1]).cuda()
    lengths = torch.rand(edges // 2, generator=random).repeat(2).cuda() + 0.01 if algorithm == "sssp" else 1.0
    degree = torch.zeros(nodes).cuda().index_add_(0, source, torch.ones(len(source)).cuda()).clamp_(min=1)
    least = lambda value, at, found: value.scatter_reduce(0, at, found, "amin")  # noqa: E731
    total = lambda at, values: torch.zeros(nodes, device="cuda").index_add_(0, at, values)  # noqa: E731
    names = torch.arange(nodes, dtype=torch.float32).cuda()
    infinite, even = torch.full((nodes,), float("inf")).cuda(), torch.full((nodes,), 1 / nodes).cuda()

    def forward(root: Any) -> Any:
        if algorithm == "pagerank":
            return algorithms.ranks(even, source, target, degree, total)[:8]
        if algorithm == "cc":
            return algorithms.components(names, source, target, least, torch.equal)[:8]
        return algorithms.distances(infinite.index_fill(0, root, 0.0), source, target, lengths, least, torch.equal)[:8]

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
