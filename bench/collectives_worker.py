"""Jobs of several ranks that run collectives: `job` starts the ranks, one process each, and takes orders as `torch_worker.py` does.

A job is one program, so one tenant; its ranks are child processes. What they share is a *board*, a file of 64-bit words: rank 0 grants steps there, and
each rank notes whether it is inside a collective, and how many sums it has compared. `collectives.py` reads it too. A rank that dies has all
ranks of its job started again. `gemv` and `triad` are single processes that need memory bandwidth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATTERNS = ["ddp", "fsdp", "tensor", "pipeline", "all-to-all", "storm", "train"]
MIB = 1 << 20
READY_S = 200.0
IDLE_S = 60.0

# --- the board ----------------------------------------------------------------------------------

UNTIL, START, GRANTED, PATTERN, NEXT, IDLE, COUNT, FIRST, LAST, GENERATION = range(10)
STEPS, INSIDE, WRONG, CHECKED, PID, READY = range(6)
RANKS, WORDS_EACH, LOSSES, LENGTH = 16, 16, 1024, 4096


def now_us() -> int:
    """CLOCK_MONOTONIC in µs."""
    return time.monotonic_ns() // 1000


class Board:
    """Words that the processes of a job share. Every word has one writer at a time."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if not path.exists():
            path.write_bytes(bytes(8 * LENGTH))
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 8 * LENGTH)
        self.words = memoryview(self.map).cast("q")
        self.floats = memoryview(self.map).cast("d")

    def rank(self, rank: int, word: int) -> int:
        """A word of a rank."""
        return self.words[RANKS + rank * WORDS_EACH + word]

    def note(self, rank: int, word: int, value: int) -> None:
        """Writes it."""
        self.words[RANKS + rank * WORDS_EACH + word] = value

    def sum(self, ranks: int, word: int) -> int:
        """Over all ranks."""
        return sum(self.rank(it, word) for it in range(ranks))


# --- a rank -------------------------------------------------------------------------------------


class Rank:
    """One process of a job, with one GPU."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.world = options.rank, options.ranks
        self.board = Board(options.board)
        self.board.note(self.rank, PID, os.getpid())
        local = os.environ.get("LOCAL_RANK")
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count() if local is None else int(local))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", init_method=f"file://{options.store}", rank=self.rank, world_size=self.world)
        print(f"rank {self.rank} of {self.world} on {self.device}, NCCL {torch.cuda.nccl.version()}", file=sys.stderr, flush=True)
        # Eight layers are 1 GiB of weights.
        self.width, self.batch, self.layers = 8192, 4096, 8
        self.rng = random.Random(self.rank)
        self.made: dict[str, Any] = {}

    def tensor(self, name: str, *shape: int) -> Any:
        """A tensor of this name, made when it is first needed. Values stay finite, however often layers are applied."""
        if name not in self.made:
            made = self.torch.randn(shape, device=self.device, dtype=self.torch.float32) / self.width**0.5
            self.made[name] = made.to(self.torch.bfloat16)
        return self.made[name]

    def weights(self) -> list[Any]:
        """One matrix a layer."""
        return [self.tensor(f"w{layer}", self.width, self.width) for layer in range(self.layers)]

    def input(self) -> Any:
        """What layers are applied to."""
        return self.tensor("x", self.batch, self.width)

    def ddp(self) -> None:
        """Each layer's gradients are summed while the next is computed."""
        handles = []
        for layer, weight in enumerate(self.weights()):
            self.torch.matmul(self.input(), weight)
            self.torch.matmul(self.input(), weight)
            gradient = self.tensor(f"g{layer}", self.width // 2, self.width)
            handles.append(self.dist.all_reduce(gradient, op=self.dist.ReduceOp.MAX, async_op=True))
        for handle in handles:
            handle.wait()

    def fsdp(self) -> None:
        """Each layer's weights are gathered before it, and its gradients scattered after it."""
        part = self.width // self.world
        full, scattered = self.tensor("full", self.width, self.width), self.tensor("scattered", part, self.width)
        for layer in range(self.layers):
            self.dist.all_gather_into_tensor(full, self.tensor(f"shard{layer}", part, self.width))
            self.torch.matmul(self.input(), full)
            self.dist.reduce_scatter_tensor(scattered, full, op=self.dist.ReduceOp.MAX)

    def tensor_parallel(self) -> None:
        """Each layer's products are summed before the next begins."""
        part = self.width // self.world
        mine = self.tensor("mine", self.batch, part)
        for weight in self.weights():
            product = self.torch.matmul(mine, weight[:part])
            self.dist.all_reduce(product)

    def pipeline(self) -> None:
        """Micro-batches go through the ranks' stages, forth and back."""
        for forth in (True, False):
            order = list(range(self.world)) if forth else list(reversed(range(self.world)))
            at = order.index(self.rank)
            for _ in range(4):
                held = self.tensor("micro", self.batch // 4, self.width)
                if at > 0:
                    self.dist.recv(held, order[at - 1])
                for weight in self.weights():
                    product = self.torch.matmul(held, weight)
                if at + 1 < self.world:
                    self.dist.send(product, order[at + 1])

    def all_to_all(self) -> None:
        """Each layer's input comes from all ranks, as with experts."""
        mixed = self.tensor("mixed", self.batch, self.width)
        for weight in self.weights():
            self.dist.all_to_all_single(mixed, self.input())
            self.torch.matmul(mixed, weight)

    def storm(self) -> None:
        """Large sums, with pauses in which one rank is ahead of the others; each is compared."""
        for part in range(4):
            time.sleep(self.rng.uniform(0, 0.008))
            self.torch.matmul(self.input(), self.weights()[0])
            self.compare(16 * MIB, part)

    def compare(self, length: int, salt: int) -> None:
        """A sum over all ranks of numbers that are known: every word is compared."""
        torch, rank = self.torch, self.rank
        name = f"numbers{length}"
        if name not in self.made:
            self.made[name] = torch.arange(length, device=self.device, dtype=torch.int32)
        salt += 13 * self.step_number
        self.board.note(rank, INSIDE, 1)
        known = self.made[name] * 7 + salt
        summed = known + 3 * rank
        self.dist.all_reduce(summed)
        expected = known * self.world + 3 * self.world * (self.world - 1) // 2
        wrong = int((summed != expected).sum().item())
        self.board.note(rank, INSIDE, 0)
        self.board.note(rank, WRONG, self.board.rank(rank, WRONG) + wrong)
        self.board.note(rank, CHECKED, self.board.rank(rank, CHECKED) + length)

    def train(self) -> None:
        """A small network on this rank's part of a batch that is the same for any number of ranks. The loss goes to the board."""
        torch = self.torch
        if "net" not in self.made:
            torch.manual_seed(1)
            rows, hidden = 8192, 4096
            layers = [torch.nn.Linear(1024, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)]
            net = torch.nn.Sequential(*layers).to(self.device)
            data = torch.randn(rows, 1024), torch.randn(rows, 1)
            part = slice(rows // self.world * self.rank, rows // self.world * (self.rank + 1))
            self.made["net"] = net, torch.optim.SGD(net.parameters(), lr=0.005), *(it[part].to(self.device) for it in data)
        net, optimizer, inputs, targets = self.made["net"]
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameter in net.parameters():
            self.dist.all_reduce(parameter.grad)
            parameter.grad /= self.world
        optimizer.step()
        total = loss.detach().clone()
        self.dist.all_reduce(total)
        if self.rank == 0 and LOSSES + self.step_number < LENGTH:
            self.board.floats[LOSSES + self.step_number] = total.item() / self.world

    def step(self, pattern: str) -> None:
        """One step: the pattern, and a sum that is compared."""
        self.board.note(self.rank, INSIDE, int(pattern != "storm"))
        {"tensor": self.tensor_parallel, "all-to-all": self.all_to_all}.get(pattern, getattr(self, pattern, self.ddp))()
        self.compare(MIB, 5)
        self.torch.cuda.synchronize()

    def run(self) -> None:
        """Makes steps for as long as rank 0 grants them."""
        words, self.step_number = self.board.words, 0
        with self.torch.no_grad():
            self.compare(1024, 0)
        # The first step of an optimizer loads half of PyTorch.
        parameter = self.torch.nn.Parameter(self.torch.zeros(1, device=self.device))
        parameter.grad = self.torch.zeros_like(parameter)
        self.torch.optim.SGD([parameter], lr=0.1).step()
        self.board.note(self.rank, READY, 1)
        paused = True
        while True:
            if self.rank == 0:
                # Not before two steps are done: the first of a pattern may take long.
                while now_us() >= words[UNTIL] and (paused or words[COUNT]):
                    words[IDLE], paused = 1, True
                    time.sleep(0.0005)
                if paused:
                    paused, words[IDLE], words[COUNT], words[FIRST] = False, 0, 0, 0
                words[PATTERN] = words[NEXT]
                words[GRANTED] = self.step_number + 1
            else:
                while words[GRANTED] <= self.step_number:
                    time.sleep(0.0002)
            pattern = PATTERNS[words[PATTERN]]
            with self.torch.set_grad_enabled(pattern == "train"):
                self.step(pattern)
            self.step_number += 1
            self.board.note(self.rank, STEPS, self.board.rank(self.rank, STEPS) + 1)
            if self.rank == 0 and (now := now_us()) >= words[START]:
                if words[FIRST]:
                    words[COUNT] += 1
                else:
                    words[FIRST] = now
                words[LAST] = now


# --- a job --------------------------------------------------------------------------------------


class Job:
    """Starts the ranks and gives them orders; all start again when one has died."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="collectives-"))
        self.board = Board(options.board)
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.start()
        self.wait_ready()

    def environment(self, rank: int) -> dict[str, str]:
        """Of a rank. NVLink multicast is off: not all machines have it."""
        found = {"NCCL_DEBUG": "WARN"} | dict(os.environ)
        if self.options.nccl:
            # After gpumux's own library, before the one that PyTorch would load.
            found["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), self.options.nccl]))
        if self.options.local_rank:
            return found | {"LOCAL_RANK": str(rank)}
        if self.options.nccl:
            found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        return found | {"NCCL_NVLS_ENABLE": "0"}

    def start(self) -> None:
        """A generation of ranks."""
        words, count = self.board.words, self.options.ranks
        words[GENERATION] += 1
        words[GRANTED] = words[IDLE] = words[COUNT] = words[FIRST] = 0
        for rank in range(count):
            for word in (INSIDE, READY):
                self.board.note(rank, word, 0)
        store = self.folder / f"store-{words[GENERATION]}"
        command = [sys.executable, __file__, "rank", "--board", self.options.board, "--ranks", str(count), "--store", str(store)]
        start = lambda rank: subprocess.Popen([*command, "--rank", str(rank)], env=self.environment(rank), stdin=subprocess.DEVNULL)  # noqa: E731
        self.ranks = [start(rank) for rank in range(count)]

    def dead(self) -> list[int]:
        """Ranks that have ended."""
        return [rank for rank, process in enumerate(self.ranks) if process.poll() is not None]

    def wait_ready(self) -> None:
        """Until all ranks have a communicator."""
        end = time.monotonic() + READY_S
        while self.board.sum(self.options.ranks, READY) < self.options.ranks:
            if self.dead() or time.monotonic() > end:
                states = [process.poll() for process in self.ranks]
                self.end()
                raise RuntimeError(f"the ranks are not ready: exit codes {states}")
            time.sleep(0.01)

    def end(self) -> None:
        """Ends all ranks: those that wait in a collective for one that has died end only so."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.wait()

    def heal(self) -> bool:
        """Starts all again if one has died."""
        if not self.dead():
            return False
        print(f"rank {self.dead()} has ended: all start again", file=sys.stderr, flush=True)
        self.end()
        self.start()
        return True

    def begin(self, order: dict[str, Any]) -> dict[str, Any]:
        """Steps of a pattern from now on, until `stop`."""
        words = self.board.words
        words[NEXT] = PATTERNS.index(order["pattern"])
        words[START] = int(order["start"] * 1e6)
        words[UNTIL] = int(order["stop"] * 1e6)
        return {"begun": True}

    def steps(self, order: dict[str, Any]) -> dict[str, Any]:
        """The same, and from the first completion after `start` to the first after `stop`: how many, and the time they took."""
        words = self.board.words
        words[IDLE] = 0
        self.begin(order)
        while time.monotonic() < order["stop"] or not words[IDLE]:
            if self.dead():
                raise RuntimeError(f"rank {self.dead()} has ended")
            if time.monotonic() > order["stop"] + IDLE_S:
                raise RuntimeError(f"a step takes more than {IDLE_S:g} s")
            time.sleep(0.001)
        if not words[COUNT]:
            raise RuntimeError("not two steps were made")
        wrong = self.board.sum(self.options.ranks, WRONG)
        return {"calls": words[COUNT], "seconds": (words[LAST] - words[FIRST]) / 1e6, "wrong": wrong}

    def losses(self, order: dict[str, Any]) -> dict[str, Any]:
        """The losses of training, and the rate."""
        answer = self.steps(order | {"pattern": "train"})
        made = min(self.board.words[GRANTED], LENGTH - LOSSES)
        return answer | {"losses": [self.board.floats[LOSSES + it] for it in range(made)]}


# --- memory bandwidth ---------------------------------------------------------------------------


class Bandwidth:
    """What a single process needs of the memory's bandwidth."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.torch = torch
        if options.role == "gemv":
            # 12 matrices of 128 MiB for each token: far more than the L2 cache.
            self.matrices = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(12)]
            self.vector = torch.randn(8192, 1, device="cuda", dtype=torch.bfloat16)
            for _ in range(20):
                self.token()
        else:
            self.arrays = [torch.randn(128 * MIB, device="cuda") for _ in range(3)]
            for _ in range(20):
                self.triad()
        torch.cuda.synchronize()

    def token(self) -> None:
        """Reads 1.5 GiB."""
        for matrix in self.matrices:
            self.torch.mv(matrix, self.vector[:, 0])
        self.torch.cuda.synchronize()

    def triad(self) -> None:
        """Moves 1.5 GiB."""
        a, b, c = self.arrays
        self.torch.add(b, c, alpha=0.5, out=a)

    def tokens(self, order: dict[str, Any]) -> dict[str, Any]:
        """Token after token with a pause between, from `start` to `stop`: the latency of each."""
        time.sleep(max(0.0, order["start"] - time.monotonic()))
        latencies: list[float] = []
        rng = random.Random(1)
        while time.monotonic() < order["stop"]:
            time.sleep(rng.uniform(0.0, 0.002))
            begin = time.monotonic()
            self.token()
            latencies.append((time.monotonic() - begin) * 1e3)
        return {"latencies_ms": latencies}

    def triads(self, order: dict[str, Any]) -> dict[str, Any]:
        """Bytes per second, from `start` to `stop`."""
        time.sleep(max(0.0, order["start"] - time.monotonic()))
        begin, calls = time.monotonic(), 0
        while time.monotonic() < order["stop"]:
            for _ in range(8):
                self.triad()
            self.torch.cuda.synchronize()
            calls += 8
        return {"gbs": calls * 1.5 * (1 << 30) / (time.monotonic() - begin) / 1e9}

    def knee(self, order: dict[str, Any]) -> dict[str, Any]:
        """Bandwidth by the number of SMs, in a green context each."""
        from torch.cuda.green_contexts import GreenContext

        every = self.torch.cuda.get_device_properties(0).multi_processor_count
        found = {}
        for sms in order["sms"]:
            if sms > every:
                continue
            green = GreenContext.create(num_sms=sms, device_id=0)  # its end is the end of its stream
            stream = green.Stream()
            with self.torch.cuda.stream(stream):
                self.triad()
                stream.synchronize()
                begin = time.monotonic()
                for _ in range(8):
                    self.triad()
                stream.synchronize()
            found[str(sms)] = 8 * 1.5 * (1 << 30) / (time.monotonic() - begin) / 1e9
        return {"gbs": found, "every": every}


def main(arguments: Sequence[str] | None = None) -> None:
    """A rank, or something that takes orders until the standard input closes."""
    parser = argparse.ArgumentParser(description="A job of several ranks, or one that needs memory bandwidth; takes orders on stdin.")
    roles = parser.add_subparsers(dest="role", required=True)
    for role in ("job", "rank"):
        made = roles.add_parser(role)
        made.add_argument("--board", required=True)
        made.add_argument("--ranks", type=int, default=2)
        made.add_argument("--nccl", default="", help="job: this NCCL in place of PyTorch's, with several ranks on a GPU")
        made.add_argument("--local-rank", action="store_true", help="job: ranks have LOCAL_RANK, as torchrun's have, and nothing else is set for NCCL")
        made.add_argument("--rank", type=int, default=0)
        made.add_argument("--store", default="")
    roles.add_parser("gemv")
    roles.add_parser("triad")
    options = parser.parse_args(arguments)
    if options.role == "rank":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its job
        return Rank(options).run()

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        worker: Job | Bandwidth = Job(options) if options.role == "job" else Bandwidth(options)
    except Exception as error:
        traceback.print_exc()
        answer(error=f"cannot prepare: {error}")
        sys.exit(1)
    answer(ready=True)
    if isinstance(worker, Job):
        import threading

        def watch() -> None:
            while True:
                time.sleep(0.05)
                if worker.board.words[UNTIL] > now_us() + 10**8:  # an order without an end
                    worker.heal()

        threading.Thread(target=watch, daemon=True).start()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer(**getattr(worker, order["op"])(order))
        except Exception as error:
            traceback.print_exc()
            answer(error=str(error))
    if isinstance(worker, Job):
        worker.end()


if __name__ == "__main__":
    main()
