"""A PyTorch process under measurement: a server of requests, a training job, or a job on all devices.

It prepares itself, prints one line of JSON when it is warm, and then takes orders as lines of JSON on its
standard input, answering each with one line on its standard output (`common.Worker` is the other end). Times
`start` and `stop` are CLOCK_MONOTONIC seconds, so that all workers measure the same stretch of time. All other
output goes to stderr. With `--free` it takes no orders but works until it is ended, for `gpumux profile`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

import generate
import gpumux
import models
import shapes
import torch

WARM_UPS = 10


def sleep_until(when: float) -> None:
    """Sleeps until a CLOCK_MONOTONIC time."""
    while (left := when - time.monotonic()) > 0:
        time.sleep(left)


def spend(until: float) -> None:
    """Works on the CPU until a CLOCK_MONOTONIC time, and leaves Python's lock to other threads meanwhile."""
    while time.monotonic() < until:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 4)


class Server:
    """One request: copy the input in, compute, copy the output out, wait for it."""

    def __init__(self, name: str, kind: str = "eager", images: int = 1, pageable: bool = False, stream: Any = None) -> None:
        model, self.kind = models.build(name), kind
        self.forward = model.forward
        example = torch.cat([model.example] * images)
        self.host_in = example if pageable else example.pin_memory()
        self.input = example.cuda()
        self.graph = None
        with torch.no_grad():
            # As torch's documentation asks: warm up beside the default stream, then capture.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    output = self.forward(self.input)
            torch.cuda.current_stream().wait_stream(side)
            self.host_out = torch.empty(output.shape, dtype=output.dtype).pin_memory()
            if model.graph:
                self.graph = torch.cuda.CUDAGraph()
                # A graph's kernels have the priority and the context of the stream on which they were captured.
                with torch.cuda.graph(self.graph, stream=stream):
                    self.graph_output = self.forward(self.input)
            for kind in ("graph", "eager"):
                for _ in range(WARM_UPS):
                    self.request(kind)

    def request(self, kind: str) -> None:
        """Serves one request; `graph` where the model has one."""
        self.input.copy_(self.host_in, non_blocking=True)
        if kind == "graph" and self.graph:
            self.graph.replay()
            output = self.graph_output
        else:
            output = self.forward(self.input)
        self.host_out.copy_(output, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def visits(self, order: dict[str, Any]) -> dict[str, Any]:
        """Requests of one client that pauses for given times between them, until `stop`: the latency of each."""
        sleep_until(order["start"])
        latencies: list[float] = []
        for pause in order["pauses"]:
            time.sleep(pause)
            begin = time.monotonic()
            if begin >= order["stop"]:
                break
            self.request(order["kind"])
            latencies.append((time.monotonic() - begin) * 1e3)
        sleep_until(order["stop"])
        return {"latencies_ms": latencies, "seconds": order["stop"] - order["start"]}

    def requests(self, order: dict[str, Any]) -> dict[str, Any]:
        """Requests at given times after `start`, until `stop`: the latency of each, and when it began.

        Latency runs from the submission, or from the arrival when the request before was still going on then.
        `prepare_us` is spent on the CPU before the submission, as a server does to decode its input; with `hint`, gpumux is
        told of the work when that begins.
        """
        prepare, hint = order.get("prepare_us", 0) / 1e6, order.get("hint", False)
        begins: list[float] = []
        latencies: list[float] = []
        for arrival in order["arrivals"]:
            due = order["start"] + arrival
            late = time.monotonic() > due
            sleep_until(due)
            if time.monotonic() >= order["stop"]:
                break
            begin = time.monotonic()
            if hint:
                gpumux.hint(expected_us=int(prepare * 1e6))
            spend(begin + prepare)
            begin = due + prepare if late else time.monotonic()
            self.request(order["kind"])
            latencies.append((time.monotonic() - begin) * 1e3)
            begins.append(begin - order["start"])
        sleep_until(order["stop"])
        return {"latencies_ms": latencies, "begins_s": begins, "seconds": order["stop"] - order["start"]}

    def free(self) -> None:
        """Requests back to back until the process is ended."""
        while True:
            self.request(self.kind)

    def repeat(self, order: dict[str, Any]) -> dict[str, Any]:
        """Requests back to back from `start` to `stop`: how many, and the time they took."""
        sleep_until(order["start"])
        begin, calls = time.monotonic(), 0
        while time.monotonic() < order["stop"]:
            self.request(order["kind"])
            calls += 1
        return {"calls": calls, "seconds": time.monotonic() - begin}


class Streams:
    """Streams of one process by priority, `high` or `low`; with `green`, of green contexts instead: that part of the SMs for low priority, the rest for high."""

    kept: list[Any] = []  # a green context ends with its object, and all work on it fails

    def __init__(self, green: float | None) -> None:
        sys.setswitchinterval(2e-5)  # a thread that waits for Python's lock gets it soon
        lowest, highest = torch.cuda.Stream.priority_range()
        self.priorities, self.green = {"low": lowest, "high": highest}, dict[str, Any]()
        if green:
            from torch.cuda.green_contexts import GreenContext

            every = torch.cuda.get_device_properties(0).multi_processor_count
            low = max(8, int(every * green) // 8 * 8)  # SMs come in eights
            for name, sms in (("low", low), ("high", (every - low) // 8 * 8)):
                self.green[name] = GreenContext.create(num_sms=sms, device_id=0)
            self.kept += self.green.values()

    def make(self, priority: str) -> Any:
        """A new stream."""
        return self.green[priority].Stream() if self.green else torch.cuda.Stream(priority=self.priorities[priority])


def at_once(work: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Does all of it, each in a thread of its own: the answers by name."""
    answers: dict[str, Any] = {}

    def do(name: str) -> None:
        try:
            answers[name] = work[name]()
        except Exception:
            traceback.print_exc()

    threads = [threading.Thread(target=do, args=(name,)) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if missing := sorted(work.keys() - answers.keys()):
        raise RuntimeError(f"no answer of {', '.join(missing)}")
    return answers


class Many:
    """Several servers in one process: a thread and a stream for each, in one context."""

    def __init__(self, options: argparse.Namespace) -> None:
        streams = Streams(options.green)
        self.servers: dict[str, tuple[Server, Any]] = {}
        for task in options.tasks:
            name, model, priority = task.split("=")
            stream = streams.make(priority)
            with torch.cuda.stream(stream):
                self.servers[name] = Server(model, stream=stream), stream

    def many(self, order: dict[str, Any]) -> dict[str, Any]:
        """`requests` of several servers at once."""

        def serve(name: str, mine: dict[str, Any]) -> dict[str, Any]:
            server, stream = self.servers[name]
            with torch.no_grad(), torch.cuda.stream(stream):
                return server.requests(mine | {"start": order["start"], "stop": order["stop"]})

        return {"tasks": at_once({name: functools.partial(serve, name, mine) for name, mine in order["tasks"].items()})}


class Stepping:
    """A job of steps, each awaited, as by a program that looks at every loss."""

    def step(self) -> None:
        """Makes one step."""
        raise NotImplementedError

    def free(self) -> None:
        """Works until the process is ended."""
        while True:
            self.step()

    def steps(self, order: dict[str, Any]) -> dict[str, Any]:
        """Works from before `start` to after `stop`: steps from the first to the last completion, and the time of each."""
        ends: list[float] = []
        while True:
            self.step()
            now = time.monotonic()
            if now >= order["start"]:
                ends.append(now)
            if len(ends) > 1 and now >= order["stop"]:
                steps_ms = [(end - begin) * 1e3 for begin, end in zip(ends, ends[1:])]
                return {"calls": len(steps_ms), "seconds": now - ends[0], "steps_ms": steps_ms}


class Parallel(Stepping):
    """Layers that are split over all devices, with a sum over them after each, as in tensor parallelism."""

    def __init__(self, _: argparse.Namespace) -> None:
        def on_each(*shape: int) -> list[torch.Tensor]:
            devices = range(torch.cuda.device_count())
            return [torch.randn(shape, device=device, dtype=torch.bfloat16) for device in devices]

        width, batch = 8192, 4096
        self.layers = [on_each(width, width) for _ in range(16)]
        self.input, self.sums = on_each(batch, width), on_each(batch, width)
        for _ in range(5):
            self.step()

    def step(self) -> None:
        """All layers once. They have the same input, so that values stay finite."""
        for layer in self.layers:
            parts = [torch.matmul(*each) for each in zip(self.input, layer)]
            torch.cuda.nccl.all_reduce(parts, self.sums)
        for device in range(len(self.sums)):
            torch.cuda.synchronize(device)


class Training(Stepping):
    """Training steps in bf16."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.cuda.set_device(options.device)
        network = getattr(models.torchvision.models, options.model)()
        self.network = network.cuda().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01)
        images = torch.randn(options.batch, 3, 224, 224)
        self.images = images.cuda().to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (options.batch,)).cuda()
        for _ in range(5):
            self.step()

    def step(self) -> None:
        """Makes one step."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.network(self.images), self.labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        torch.cuda.current_stream().synchronize()


class Kernels(Stepping):
    """Kernels of one kind, eight in a step: `triad` and `gemv` move 1.5 GiB each and need all of the memory's bandwidth, `gemm` multiplies matrices and needs all SMs."""

    def __init__(self, options: argparse.Namespace) -> None:
        def on_device(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        if options.role == "triad":
            a, b, c = (on_device(256 << 20) for _ in range(3))
            self.kernel = lambda: torch.add(b, c, alpha=0.5, out=a)
        elif options.role == "gemv":
            matrix, vector = on_device(96 << 10, 8 << 10), on_device(8 << 10)
            self.kernel = lambda: torch.mv(matrix, vector)
        else:
            a, b, c = (on_device(8 << 10, 8 << 10) for _ in range(3))
            self.kernel = lambda: torch.matmul(b, c, out=a)
        for _ in range(5):
            self.step()

    def step(self) -> None:
        """Eight kernels."""
        for _ in range(8):
            self.kernel()
        torch.cuda.current_stream().synchronize()


class Pair:
    """Tokens, or a server's requests, and training in one process: a thread and a stream for each, in one context."""

    def __init__(self, options: argparse.Namespace) -> None:
        streams = Streams(options.green)
        self.streams = {"server": streams.make("high"), "training": streams.make("low")}
        with torch.cuda.stream(self.streams["server"]):
            self.server: Any = Server(options.server, stream=self.streams["server"]) if options.server else generate.Generate(options)
        with torch.enable_grad(), torch.cuda.stream(self.streams["training"]):
            self.training = Training(options)

    def pair(self, order: dict[str, Any]) -> dict[str, Any]:
        """The orders of both at once, or of one of them."""

        def do(name: str) -> dict[str, Any]:
            mine = order[name] | {"start": order["start"], "stop": order["stop"]}
            with torch.set_grad_enabled(name == "training"), torch.cuda.stream(self.streams[name]):
                return getattr(getattr(self, name), mine["op"])(mine)

        return at_once({name: functools.partial(do, name) for name in self.streams if name in order})


def main() -> None:
    """Prepares, says so, and takes orders until the standard input closes."""
    parser = argparse.ArgumentParser(description="A PyTorch process that takes orders on stdin.")
    parser.add_argument("--free", action="store_true", help="take no orders, but work until ended")
    roles = parser.add_subparsers(dest="role", required=True)
    serve = roles.add_parser("serve")
    serve.add_argument("--model", choices=models.MODELS, default="resnet50")
    serve.add_argument("--kind", choices=("eager", "graph"), default="eager", help="of the requests of --free")
    serve.add_argument("--images", type=int, default=1, help="inputs in one request")
    serve.add_argument("--cores", help="run on these cores only, such as 2,3")
    serve.add_argument("--pageable", action="store_true", help="inputs lie in ordinary memory")
    many = roles.add_parser("many")
    many.add_argument("tasks", nargs="+", metavar="NAME=MODEL=high|low")
    many.add_argument("--green", type=float, help="part of the SMs of a green context for low priority; the rest for high")
    train = roles.add_parser("train")
    for role in ("parallel", "triad", "gemv", "gemm", "shapes"):
        roles.add_parser(role)
    tokens = roles.add_parser("generate")
    pair = roles.add_parser("pair")
    for one in (tokens, pair):
        one.add_argument("--kinds", default="eager", help="ways of making tokens that orders may name, separated by commas")
    pair.add_argument("--green", type=float, help="as of many")
    pair.add_argument("--server", choices=models.MODELS, help="in place of tokens")
    for one in (train, pair):
        one.add_argument("--model", default="resnet152")
        one.add_argument("--batch", type=int, default=128)
        one.add_argument("--device", type=int, default=0)
    options = parser.parse_args()

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    torch.manual_seed(1)
    if cores := getattr(options, "cores", None):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if os.environ.get("BENCH_STREAM"):
        # A peer that schedules only streams that a program has made.
        torch.cuda.set_stream(torch.cuda.Stream())
    made: dict[str, Callable[[argparse.Namespace], Any]] = {
        "serve": lambda it: Server(it.model, it.kind, it.images, it.pageable), "many": Many, "triad": Kernels, "gemv": Kernels, "gemm": Kernels, "train": Training, "pair": Pair, "parallel": Parallel, "shapes": shapes.Shapes, "generate": generate.Generate,
    }  # fmt: skip
    grad = torch.enable_grad if options.role in ("train", "parallel") else torch.no_grad
    try:
        worker = made[options.role](options)
    except Exception as error:
        traceback.print_exc()
        answer(error=f"cannot prepare: {error}")
        sys.exit(1)
    gc.collect()
    gc.disable()  # a collection would be measured as latency
    answer(ready=True)
    if options.free:
        with grad():
            worker.free()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            with grad():
                answer(**getattr(worker, order["op"])(order))
        except Exception as error:
            traceback.print_exc()
            answer(error=str(error))


if __name__ == "__main__":
    main()
