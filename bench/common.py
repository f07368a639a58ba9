"""What the benchmarks share: results, statistics, modes of sharing, and worker processes.

A benchmark measures *cells*: one case in one mode. Each cell becomes a row of the results file, which is
written after every row; a cell that fails is reported on stderr and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import queue
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
WORKER = BENCH / "torch_worker.py"
TORCH = (sys.executable, str(WORKER))
PROCESSORS = 4  # that a worker has for itself, at most
READY_S = 240.0  # importing torch and warming a model takes 10 to 60 s
REPLY_S = 90.0  # beyond the measurement itself
ANSWER_S = 30.0  # the same of a measurement in rounds, of which a hanging mode must not take all the time


class BenchError(Exception):
    """A cell that could not be measured."""


# --- statistics ---------------------------------------------------------------------------------


def poisson(rng: random.Random, rate: float, begin: float, end: float) -> Iterator[float]:
    """Arrivals at random moments, so many a second."""
    at = begin
    while rate > 0 and (at := at + rng.expovariate(rate)) < end:
        yield at


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a fraction `q` of all values does not exceed."""
    if not values:
        raise BenchError("no values were measured")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def quantiles(kind: str, values: Sequence[float], unit: str = "ms") -> dict[str, float]:
    """Median and 99% quantile of times of a kind; nothing, where there are none."""
    return {f"{kind}_{name}_{unit}": quantile(values, q) for name, q in (("p50", 0.5), ("p99", 0.99))} if values else {}


def latency_values(ms: Sequence[float]) -> dict[str, float]:
    """Summary of latencies in milliseconds."""
    return {"latency_p50_ms": quantile(ms, 0.5), "latency_p99_ms": quantile(ms, 0.99), "latency_mean_ms": statistics.fmean(ms)}


def pauses(low_s: float, high_s: float, seconds: float, seed: int) -> list[float]:
    """Evenly distributed pauses, enough for so many seconds; the same seed gives the same ones in every mode."""
    rng, total, found = random.Random(seed), 0.0, []
    while total < seconds:
        found.append(rng.uniform(low_s, high_s))
        total += found[-1]
    return found


# --- results ------------------------------------------------------------------------------------


def run_quietly(*command: str) -> str:
    """Standard output of a short command, or nothing when it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=BENCH)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def visible(count: int = 1) -> str:
    """The first GPUs that programs see, with commas between: numbers as nvidia-smi has them, or UUIDs. Raises BenchError where they see fewer."""
    seen = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    if len(seen) < count:
        raise BenchError(f"CUDA_VISIBLE_DEVICES={','.join(seen)}: {count} GPUs are needed")
    return ",".join(seen[:count])


def another_gpu() -> str:
    """The UUID of a GPU of this machine other than the programs'. Raises BenchError where there is none."""
    ask = ("--query-gpu=uuid", "--format=csv,noheader")
    own = run_quietly("nvidia-smi", "-i", visible(), *ask).strip()
    others = [it.strip() for it in run_quietly("nvidia-smi", *ask).splitlines() if it.strip() != own]
    if not own or not others:
        raise BenchError(f"the machine has no GPU but {visible()}")
    return others[0]


def device_and_driver() -> tuple[str, str]:
    """Product name of the programs' GPU, and the driver's version."""
    line = run_quietly("nvidia-smi", "-i", visible(), "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = line.splitlines()[0].partition(",") if line else ("unknown", "", "")
    return name.strip(), driver.strip() or "unknown"


def commit() -> str:
    """The commit that is measured: GPUMUX_COMMIT, or git's."""
    return os.environ.get("GPUMUX_COMMIT") or run_quietly("git", "rev-parse", "HEAD") or "unknown"


def slug(device: str) -> str:
    """`NVIDIA H100 80GB HBM3` becomes `h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia")).strip("-")


def shown_command(argv: Sequence[str]) -> str:
    """How to repeat it: without where the files went on that machine."""
    words, skip = ["python3", f"bench/{Path(argv[0]).name}"], False
    for word in argv[1:]:
        if skip:
            skip = False
        elif word in ("--out", "--logs", "--tests"):
            skip = True
        elif not word.startswith(("--out=", "--logs=", "--tests=")):
            words.append(Path(word).name if word.startswith("/") else word)
    return shlex.join(words)


def head(bench: str, device: str, driver: str) -> dict[str, Any]:
    """What a results file tells of its call."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return {"bench": bench, "device": device, "driver": driver, "date": date, "commit": commit(), "command": shown_command(sys.argv)}


def save(path: Path, data: dict[str, Any]) -> None:
    """Writes a results file."""
    check_results(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


class Results:
    """One results file, complete after every row."""

    def __init__(self, bench: str, out: Path, cases: Sequence[str], modes: Sequence[str]) -> None:
        device, driver = device_and_driver()
        self.order = {(case, mode): (a, b) for a, case in enumerate(cases) for b, mode in enumerate(modes)}
        self.path = out / f"{bench}-{slug(device)}.json"
        self.failed: list[str] = []
        self.data: dict[str, Any] = head(bench, device, driver) | {"rows": []}

    def add(self, case: str, mode: str, values: dict[str, float], around: dict[str, list[float]] | None = None) -> None:
        """Writes one row, with the intervals of its values if there are any, in place of an earlier one of the same cell."""
        rows = [row for row in self.data["rows"] if (row["case"], row["mode"]) != (case, mode)]
        rounded = {name: float(f"{value:.6g}") for name, value in values.items()}
        row: dict[str, Any] = {"case": case, "mode": mode, "values": rounded}
        if around:
            row["interval"] = {name: [float(f"{it:.6g}") for it in ends] for name, ends in around.items()}
        rows.append(row)
        self.data["rows"] = sorted(rows, key=lambda row: self.order[row["case"], row["mode"]])
        self.write()
        say(f"{case} / {mode}: " + ", ".join(f"{k} {v:.5g}" for k, v in rounded.items()))

    def write(self) -> None:
        """Writes the file."""
        save(self.path, self.data)

    @contextlib.contextmanager
    def cell(self, what: str) -> Iterator[None]:
        """Keeps the run alive when what is inside fails."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as failure:
            self.failed.append(what)
            say(f"error: {what}: {failure}")
            if not isinstance(failure, BenchError):
                traceback.print_exc()

    def finish(self) -> int:
        """The exit code: 0 when no cell failed."""
        say(f"{len(self.data['rows'])} rows in {self.path}")
        if self.failed:
            say("error: left out: " + "; ".join(self.failed))
        return 1 if self.failed else 0


# What a row may have besides (rounds.py), and what of that a table shows as columns.
COUNTS = ("samples", "rounds", "ended")
MAY = ("interval", "series", *COUNTS)


def check_results(data: Any) -> None:
    """Raises BenchError unless `data` has the shape of every file in bench/results: one call of one benchmark."""
    head = {"bench", "device", "driver", "date", "commit", "command"}
    extra = set(data) - head - {"rows"}
    if not head < set(data) or not extra <= {"note", "host"} or not all(isinstance(data[key], str) for key in head | extra):
        raise BenchError(f"a results file has exactly {', '.join(sorted(head))} (text) and rows, and may have note and host")
    for row in data["rows"]:
        if not {"case", "mode", "values"} <= set(row) <= {"case", "mode", "values", *MAY} or not row["values"]:
            raise BenchError(f"a row has case, mode and values, and may have {', '.join(MAY)}: {row}")
        if not set(row.get("interval", {})) <= set(row["values"]) or not all(isinstance(row.get(name, 0), int) for name in ("samples", "rounds")):
            raise BenchError(f"{row['case']} / {row['mode']}: an interval without its value, or no number of samples or rounds")
        values = [*row["values"].items(), *((name, value) for name, over in row.get("series", {}).items() for value in over.values())]
        for name, value in values:
            around = row.get("interval", {}).get(name, [value, value])
            if not all(isinstance(it, (int, float)) and math.isfinite(it) for it in (value, *around)):
                raise BenchError(f"{row['case']} / {row['mode']}: {name} is {value} in {around}")


def say(text: str) -> None:
    """Progress, with the time, on stderr."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# --- processes ----------------------------------------------------------------------------------


def gpumux() -> str:
    """The gpumux binary: GPUMUX, or the one on PATH."""
    found = shutil.which(os.environ.get("GPUMUX", "gpumux"))
    if not found:
        raise BenchError("no gpumux binary: set GPUMUX to its path")
    return os.path.abspath(found)


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log, for an error message."""
    with contextlib.suppress(OSError):
        return "\n    ".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""


def end(process: subprocess.Popen[Any], patience_s: float = 10.0) -> None:
    """Ends a process that we started and all that it started: politely, then for sure."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def until(what: str, patience_s: float, found: Callable[[], Any], process: subprocess.Popen[Any] | None = None) -> Any:
    """What is found within a time, and while the process lives; raises BenchError where nothing is."""
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(OSError):
            if answer := found():
                return answer
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {patience_s:.0f} s")
        if process and process.poll() is not None:
            raise BenchError(f"{what}: the program has ended with {process.returncode}")
        time.sleep(0.02)


def until_none(what: str, patience_s: float, found: Callable[[], Sequence[str]]) -> None:
    """Until nothing is found any more; raises BenchError with what still is."""
    deadline = time.monotonic() + patience_s
    while left := found():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: {', '.join(left)}")
        time.sleep(0.2)


TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int, thread: str | None = None, user: bool = False) -> float:
    """User and system time so far, or user time alone, of a process, or of its threads of one name."""
    folder = Path(f"/proc/{pid}")
    total = 0
    for task in [folder] if thread is None else (folder / "task").iterdir():
        # Other threads may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError) if thread else contextlib.nullcontext():
            if thread is None or (task / "comm").read_text().strip() == thread:
                fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
                total += int(fields[11]) + (0 if user else int(fields[12]))
    return total / TICKS


class CpuTime:
    """Watches the CPU time of a process, or of its threads of one name, or what of it is user time."""

    def __init__(self, pid: int, name: str | None = None, user: bool = False) -> None:
        self.what, self.seen, self.over = (pid, name, user), [], threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.over.wait(0.1):
            self.seen.append((time.monotonic(), cpu_seconds(*self.what)))

    def __enter__(self) -> CpuTime:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def part(self, begin: float, end: float) -> float:
        """The part of one CPU that it took between two times of the monotonic clock."""
        within = [it for it in self.seen if begin <= it[0] <= end]
        if len(within) < 2:
            raise BenchError("the CPU time was not watched long enough")
        (first, before), (last, after) = within[0], within[-1]
        return (after - before) / (last - first)


class Mode:
    """How programs share the GPU. This one, plain, leaves it to the driver: time slicing."""

    def __init__(self, name: str, logs: Path) -> None:
        self.name, self.logs = name, logs

    def __enter__(self) -> Mode:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def environment(self) -> dict[str, str]:
        """What a program needs in addition."""
        return {}

    def variables(self, name: str, klass: str | None) -> dict[str, str]:
        """What a program of this name and class has in its environment besides."""
        return {}

    def command(self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()) -> list[str]:
        """The command that runs a program in this mode; `promise` are further flags of `gpumux run`."""
        variables = self.variables(name, klass)
        return [*(["env", *(f"{k}={v}" for k, v in variables.items())] if variables else []), *command]

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str] = {}, **given: Any) -> subprocess.Popen[Any]:
        """Starts a command with this mode's environment, in a session of its own; what it says goes to the log, but for pipes that are given."""
        with open(log, "a") as out:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, **given}
            return subprocess.Popen(command, env=os.environ | self.environment() | environment, start_new_session=True, text=True, **pipes)

    def check(self, names: Sequence[str]) -> None:
        """Raises BenchError unless these programs really run in this mode."""

    def before(self, names: Iterable[str]) -> None:
        """These programs are about to be measured together."""

    def after(self, names: Iterable[str]) -> None:
        """They have been."""


class Mps(Mode):
    """A private MPS control daemon, in folders of its own. The compute mode stays as it is."""

    def __enter__(self) -> Mps:
        places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/nvidia/bin", "/usr/bin"])
        found = shutil.which("nvidia-cuda-mps-control", path=places)
        if not found:
            raise BenchError("nvidia-cuda-mps-control is not installed")
        self.control, self.folder = found, Path(tempfile.mkdtemp(prefix="mps-"))
        for part in ("pipe", "log"):
            (self.folder / part).mkdir()
        with open(self.logs / "mps-control.log", "w") as log:
            started = subprocess.run(
                [self.control, "-d"],
                env=os.environ | self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=30,
                check=False,
            )
        if started.returncode:
            raise BenchError(f"MPS did not start: {tail(self.logs / 'mps-control.log')}")
        return self

    def _ask(self, question: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.control],
            input=question + "\n",
            env=os.environ | self.environment(),
            capture_output=True,
            text=True,
            timeout=20,
        )

    def __exit__(self, *_: object) -> None:
        # The answer to `quit` may wait for clients, and comes late or never when one hangs.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ask("quit")
        for _attempt in range(100):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._ask("get_server_list").returncode:
                    break
            time.sleep(0.1)
        for log in (self.folder / "log").glob("*.log"):
            shutil.copy(log, self.logs / f"mps-{log.name}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
        }

    def check(self, names: Sequence[str]) -> None:
        if not self._ask("get_server_list").stdout.strip():
            raise BenchError("no MPS server runs: the programs did not connect to it")


class Gpumux(Mode):
    """A gpumux daemon of our own, with one of its policies and mechanisms; `more` are further flags of `gpumux run`, by a program's name."""

    def __init__(self, name: str, logs: Path, policy: str | None = None, mechanism: str | None = None, **more: Sequence[str]) -> None:
        super().__init__(name, logs)
        self.policy, self.mechanism, self.more = policy, mechanism, more
        self.tenants: dict[str, str] = {}
        self.started = 0

    def __enter__(self) -> Gpumux:
        self.binary, self.folder = gpumux(), Path(tempfile.mkdtemp(prefix="gpumux-"))
        self.start_daemon()
        return self

    def start_daemon(self) -> None:
        """Starts the daemon, and waits until it answers."""
        # The modes of a benchmark have daemons of their own on one device, of which one works at a time. A daemon does not see those in other networks.
        apart = ["unshare", "--net"] if os.geteuid() == 0 else []
        command = [*apart, self.binary, "daemon"]
        for flag, value in (("--policy", self.policy), ("--mechanism", self.mechanism)):
            command += [flag, value] if value else []
        log = self.logs / f"daemon-{self.name}.log"
        self.daemon = self.start(command, log)
        deadline = time.monotonic() + 20
        while not self._answers():
            if self.daemon.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise BenchError(f"the daemon did not start: {tail(log)}")
            time.sleep(0.02)

    def kill_daemon(self) -> None:
        """Ends the daemon without a word to anything."""
        self.daemon.kill()
        self.daemon.wait()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as api:
            return api.connect_ex(str(self.folder / "api.sock")) == 0

    def __exit__(self, *_: object) -> None:
        end(self.daemon)
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        return {"GPUMUX_RUNTIME_DIR": str(self.folder)}

    def flags(self, name: str, klass: str | None) -> list[str]:
        """Flags of `gpumux run` for a program of this name and class."""
        return [*(["--class", klass] if klass else []), *self.more.get(name, ())]

    def command(self, command: Sequence[str], name: str, klass: str | None, promise: Sequence[str] = ()) -> list[str]:
        # The tenant of an earlier process of this name may not have ended yet.
        self.started += 1
        self.tenants[name] = f"{name}-{self.started}"
        run = [self.binary, "run", "--strict", "--name", self.tenants[name], *self.flags(name, klass), *promise, "--"]
        return [*run, *super().command(command, name, klass)]

    def ask(self, *words: str, timeout: float = 20) -> subprocess.CompletedProcess[str]:
        """Runs a command of gpumux with this daemon."""
        return subprocess.run([self.binary, *words], env=os.environ | self.environment(), capture_output=True, text=True, timeout=timeout)

    def set(self, name: str, *flags: str) -> None:
        """Changes settings of a program that runs."""
        done = self.ask("set", self.tenants[name], *flags)
        if done.returncode:
            raise BenchError(f"gpumux set {name} {' '.join(flags)}: {done.stderr.strip()}")

    def tenants_now(self) -> list[dict[str, Any]]:
        """What `gpumux ps` knows; nothing, with a line on stderr, if it fails."""
        asked = self.ask("ps", "--json")
        if asked.returncode != 0:
            say(f"gpumux ps: {asked.stderr.strip()}")
            return []
        return json.loads(asked.stdout)["tenants"]

    def check(self, names: Sequence[str]) -> None:
        def missing() -> list[str]:
            managed = {tenant["name"] for tenant in self.tenants_now() if tenant["domains"]}
            return [name for name in names if self.tenants[name] not in managed]

        until_none("not managed by gpumux", 10, missing)

    def trace(self, file: Path, seconds: float) -> None:
        """Writes what the scheduler did lately."""
        self.ask("trace", "--seconds", f"{seconds:.0f}", "--output", str(file)).check_returncode()


def mode(name: str, logs: Path) -> Mode:
    """The mode of this name. `alone` is plain: what makes it alone is that the others are idle."""
    match name:
        case "alone" | "time-slicing":
            return Mode(name, logs)
        case "mps":
            return Mps(name, logs)
        case "gpumux":
            return Gpumux(name, logs)
        case "fixed":
            return Gpumux(name, logs, policy="fixed")
    raise BenchError(f"unknown mode {name}")


class Worker:
    """A child that takes orders on its standard input and answers each with one line of JSON."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        mode: Mode,
        klass: str | None = None,
        program: Sequence[str] = TORCH,
        promise: Sequence[str] = (),
    ) -> None:
        self.name, self.log = name, mode.logs / f"{mode.name}-{name}.log"
        command = mode.command([*program, *arguments], name, klass, promise)
        self.log.unlink(missing_ok=True)
        self.process = mode.start(command, self.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(line)
        self.lines.put(None)

    def send(self, **order: Any) -> None:
        """Gives an order."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:  # a broken or an already closed pipe
            raise self._lost("is gone") from error

    def reply(self, timeout: float) -> dict[str, Any]:
        """The next answer."""
        try:
            line = self.lines.get(timeout=timeout)
        except queue.Empty:
            # Python programs that expect this signal write where their threads are; it is ended anyway.
            with contextlib.suppress(OSError):
                sizes = [self.log.stat().st_size]
                os.killpg(self.process.pid, signal.SIGUSR1)
                until = time.monotonic() + 5.0
                while (sizes[-1] == sizes[0] or sizes[-1] != sizes[-2]) and time.monotonic() < until:
                    time.sleep(0.1)
                    sizes.append(self.log.stat().st_size)
            raise self._lost(f"gave no answer within {timeout:.0f} s") from None
        if line is None:
            raise self._lost("ended")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def _lost(self, what: str) -> BenchError:
        # It may be in the middle of an order: it is unusable.
        self.close(patience_s=5.0)
        return BenchError(f"{self.name} {what}: see {self.log}\n    {tail(self.log)}")

    def close(self, patience_s: float = 10.0) -> None:
        """Ends it, and waits until its memory is back."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self.process.poll() is None:
            end(self.process, patience_s)


def threads(pid: int) -> Iterator[int]:
    """The threads of a process and of all that it has started."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        yield int(task.name)
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from threads(int(child))


class Crew:
    """The workers of one mode: started together, measured together, ended together."""

    def __init__(self, mode: Mode, program: Sequence[str] = TORCH) -> None:
        self.mode, self.program = mode, program
        self.workers: dict[str, Worker] = {}
        self.started: dict[str, tuple[Sequence[str], str]] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(*self.workers)

    def have(self, wanted: dict[str, tuple[Sequence[str], str]]) -> None:
        """Makes exactly these workers (arguments and class) run, warm, and checks that the mode is in force."""
        # Another program of the same name is not the one that is wanted.
        self.close(*(name for name in self.workers if wanted.get(name) != self.started[name]))
        new = [name for name in wanted if name not in self.workers]
        begin = time.monotonic()
        for name in new:
            arguments, klass = wanted[name]
            self.workers[name] = Worker(name, arguments, self.mode, klass, self.program)
            self.started[name] = wanted[name]
        try:
            for name in new:
                self.workers[name].reply(max(1.0, READY_S - (time.monotonic() - begin)))
            if wanted:
                self.mode.check(list(wanted))
        except BaseException:
            self.close(*new)
            raise
        if new:
            say(f"{self.mode.name}: {', '.join(new)} ready in {time.monotonic() - begin:.1f} s")

    def place(self, number: int) -> None:
        """Puts each worker on processors of its own, in each round on others. All modes' programs of a round run on the same ones: on a virtual machine
        one may be slower than another for minutes, which hits programs that launch kernel by kernel more than any mode of sharing does."""
        processors = sorted(os.sched_getaffinity(0))
        # A process that is two programs has the processors of two.
        programs = {name: 2 if self.started.get(name, ((), ""))[0][:1] == ["pair"] else 1 for name in sorted(self.workers)}
        each = min(len(processors) // max(1, sum(programs.values())), PROCESSORS)
        if each < 1:
            return
        first = number * each
        for name, count in programs.items():
            chosen = {processors[(first + nth) % len(processors)] for nth in range(count * each)}
            first += count * each
            for thread in threads(self.workers[name].process.pid):
                with contextlib.suppress(OSError):  # it has ended
                    os.sched_setaffinity(thread, chosen)

    def _worker(self, name: str) -> Worker:
        if name not in self.workers:
            raise BenchError(f"{name} is not running")
        return self.workers[name]

    def measure(self, seconds: float, orders: dict[str, dict[str, Any]], lead: float = 0.5) -> dict[str, Any]:
        """Gives orders for one common stretch of time, which begins in `lead` seconds, and collects the answers."""
        try:
            self.mode.before(orders)
            start = time.monotonic() + lead
            for name, order in orders.items():
                self._worker(name).send(**order, start=start, stop=start + seconds)
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            self.mode.after(orders)
            return {name: self._worker(name).reply(ANSWER_S) for name in orders}
        except BaseException:
            # The answers of the others would be taken for those of the next measurement.
            self.close(*orders)
            raise

    def close(self, *names: str) -> None:
        """Ends these workers."""
        leaving = [self.workers.pop(name) for name in names if name in self.workers]
        threads = [threading.Thread(target=worker.close) for worker in leaving]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# --- command line -------------------------------------------------------------------------------


def parser(description: str, examples: str) -> argparse.ArgumentParser:
    """Flags that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=description,
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, default=BENCH / "results", help="folder of the results file")
    made.add_argument("--logs", type=Path, help="folder for the logs of all processes [a new one in /tmp]")
    made.add_argument("--quick", action="store_true", help="a quarter of the time, to see that it works")
    return made


def begin(options: argparse.Namespace) -> Path:
    """Makes the folder of logs, keeps the GPUs awake, and lets SIGTERM clean up as an interrupt does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs: Path = options.logs or Path(tempfile.mkdtemp(prefix="bench-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    say(f"logs in {logs}")
    # While no program has a GPU open the driver shuts it down, and the next program waits seconds for it.
    for gpu in Path("/dev").glob("nvidia[0-9]*"):
        with contextlib.suppress(OSError):
            os.open(gpu, os.O_RDWR | os.O_CLOEXEC)
    return logs


def selections(parser: argparse.ArgumentParser, cases: Sequence[str], modes: Sequence[str], apart: Sequence[str] = (), /, **defaults: Any) -> None:
    """Flags that choose cases and modes; those that are set apart only by name."""
    parser.add_argument("--cases", type=listed(cases), default=defaults.get("cases", list(cases)))
    parser.add_argument("--modes", type=listed(modes, apart), default=defaults.get("modes", list(modes)))


def parts(parser: argparse.ArgumentParser, every: Iterable[str]) -> None:
    """The same of a benchmark of several parts."""
    parser.add_argument("part", choices=[*every, "all"])
    parser.add_argument("--cases", help="a comma-separated selection")
    parser.add_argument("--modes", help="a comma-separated selection")


Part = tuple[list[str], list[str]]


def run_parts(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    every: Mapping[str, Part],
    run: Callable[[str, Results, list[str], list[str]], None],
    prefix: str = "",
    usual: Callable[[str], Part] | None = None,
) -> int:
    """Runs one part, or all, with cases and modes as chosen or usual; the exit code."""
    if options.part == "all" and (options.cases or options.modes):
        parser.error("--cases and --modes need one part")
    worst = 0
    for part in every if options.part == "all" else [options.part]:
        try:
            chosen = [listed(all_of)(text) if text else all_of for text, all_of in zip((options.cases, options.modes), (usual or every.__getitem__)(part), strict=True)]
        except argparse.ArgumentTypeError as wrong:
            parser.error(str(wrong))
        if chosen[0]:
            results = Results(prefix + part, options.out, *every[part])
            run(part, results, *chosen)
            worst = max(worst, results.finish())
    return worst


def listed(allowed: Sequence[str], apart: Sequence[str] = ()) -> Any:
    """For argparse: a comma-separated selection, or `all` but for those that are set apart."""

    def parse(text: str) -> list[str]:
        chosen = [it for it in allowed if it not in apart] if text == "all" else text.split(",")
        if unknown := sorted(set(chosen) - set(allowed)):
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}: use {', '.join(allowed)}")
        return chosen

    return parse
