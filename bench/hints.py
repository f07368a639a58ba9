"""What hints gain: a latency task beside batch work, whose device is taken before the task's work arrives.

The task: 10 kernels of 10 µs every 5 ms or so. Cases are `JOB/prepN`: each request is prepared on the CPU for N µs,
then launched, and its latency runs from the launch; a hint comes when the preparation begins. `JOB/copyN`: each
request begins with a pinned copy to the GPU that takes about N µs, which counts as latency. `train/torch-pinned` and
`train/torch-pageable`: an unmodified PyTorch program copies 16 images (4.8 MB) from pinned or ordinary memory and replays
ResNet-50 as a CUDA graph. JOB is a batch job: kernels of 10 ms or 100 ms, or ResNet-152 training (`train`).

Modes: `alone`, `none` (gpumux without hints), `auto` (what the library predicts), `manual` (the program hints), `outside`
(another program hints through the API). Values: `latency_p50_us`, `latency_p99_us`, `added_p50_us`, `added_p99_us` (over alone),
`batch_rate` (kernels or steps per second), and what `gpumux ps` counted: `hints_given`, `hints_useful`, `held_us`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import colocation
import common
import shares
from common import BenchError, Crew, Gpumux, Mode, Results

MODES = ["alone", "none", "auto", "manual", "outside"]
FLAGS = {"none": "off", "auto": "auto", "manual": "manual", "outside": "manual"}
PREPARE_US = [0, 25, 50, 100, 150, 200, 500]
COPY_US = [50, 100, 200, 400]
COPY_BYTES_PER_US = 50_000  # PCIe 5 x16
KERNEL_US = {"10ms": 10_000, "100ms": 100_000}
TORCH = {"torch-pinned": ["--images", "16"], "torch-pageable": ["--images", "16", "--pageable"]}
CASES = [
    *(f"{job}/prep{us}" for job in (*KERNEL_US, "train") for us in PREPARE_US),
    *(f"{job}/copy{us}" for job in (*KERNEL_US, "train") for us in COPY_US),
    *(f"train/{kind}" for kind in TORCH),
]
LEAD_S = 0.5
PERIODIC = ["--period-us", "5000", "--jitter", "0.5", "--kernels", "10", "--wait", "spin"]
TRAINING = (["train", "--model", "resnet152"], "batch")


def modes_of(case: str) -> list[str]:
    """The modes that make sense: a program that begins with its copy has no moment to hint before."""
    return MODES if "/prep" in case else MODES[:3]


def task(case: str, iterations: int) -> list[str]:
    """Arguments of the latency task of a case."""
    kind = case.partition("/")[2]
    arguments = ["latency", *PERIODIC, "--iterations", str(iterations)]
    if kind.startswith("copy"):
        return [*arguments, "--copy", str(int(kind.removeprefix("copy")) * COPY_BYTES_PER_US)]
    prepare = int(kind.removeprefix("prep"))
    return [*arguments, *(["--prepare-us", str(prepare)] if prepare else [])]


def start(mode: Mode, name: str, klass: str, hints: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a workload; `hints` is one of MODES."""
    promise = ["--hints", FLAGS[hints]] if hints in FLAGS else []
    command = mode.command(["PROGRAM"], name, klass, promise)[:-1]
    program = [common.gpumux(), "workload", *arguments, "--json"]
    if hints == "manual":
        program += ["--hint", "manual"]
    elif hints == "outside" and isinstance(mode, Gpumux):
        api = str(mode.folder / "api.sock")
        program += ["--hint", "outside", "--hint-tenant", mode.tenants[name], "--hint-api", api]
    return mode.start([*command, *program], mode.logs / f"{mode.name}-{hints}-{name}.log", stdout=subprocess.PIPE)


def counted(mode: Mode, name: str) -> dict[str, float]:
    """What gpumux says of a tenant's hints."""
    if not isinstance(mode, Gpumux):
        return {}
    for tenant in mode.tenants_now():
        if tenant["name"] == mode.tenants[name]:
            hints = tenant["hints"]
            return {"hints_given": hints["given"], "hints_useful": hints["useful"], "held_us": hints["held_us"]}
    raise BenchError(f"{name} is not managed by gpumux")


def beside(
    mode: Mode, hints: str, arguments: Sequence[str], seconds: float, job: list[str] | Crew | None
) -> dict[str, float]:
    """Runs the latency task beside a job (a workload's arguments, or a crew that trains): values without `added`."""
    with tempfile.TemporaryDirectory() as folder:
        ready, begin = Path(folder) / "ready", Path(folder) / "start"
        gate = ["--seconds", str(seconds), "--start-file", str(begin), "--ready-file", str(ready)]
        processes: list[subprocess.Popen[str]] = []
        with shares.ending(processes), ThreadPoolExecutor() as threads:
            if isinstance(job, list):
                processes.append(start(mode, "job", "batch", "", [*job, *gate[:-1], str(ready) + "-job"]))
                common.until("the job is ready", common.REPLY_S, Path(str(ready) + "-job").exists, processes[-1])
            processes.append(start(mode, "task", "latency", hints, [*arguments, *gate]))
            common.until("the task is ready", common.REPLY_S, ready.exists, processes[-1])
            if isinstance(job, Crew):
                training = threads.submit(job.measure, seconds, {"training": colocation.STEPS}, LEAD_S)
                # Each request is one beside training.
                time.sleep(LEAD_S)
            begin.touch()
            time.sleep(max(0.0, seconds - 0.3))
            # While both still run: the counts go with the process.
            values = counted(mode, "task")
            reports = shares.reports(processes, time.monotonic() + seconds + common.REPLY_S)
            if job:
                values["batch_rate"] = colocation.rate(training.result()["training"]) if isinstance(job, Crew) else reports[0]["rate"]
            return shares.latency(reports[-1]) | values


def torch(mode: Mode, hints: str, case: str, seconds: float, crew: Crew, alone: bool) -> dict[str, float]:
    """The same for an unmodified PyTorch program."""
    kind = case.partition("/")[2]
    server = (["serve", "--model", "resnet50", *TORCH[kind]], "latency")
    crew.have({"server": server} | ({} if alone else {"training": TRAINING}))
    if isinstance(mode, Gpumux):
        mode.set("server", "--hints", FLAGS[hints])
    before = counted(mode, "server")
    answers = crew.measure(seconds, {"server": colocation.requests("graph", seconds)} | ({} if alone else {"training": colocation.STEPS}))
    ms = answers["server"]["latencies_ms"]
    values = {f"latency_{name}_us": common.quantile(ms, q) * 1e3 for name, q in (("p50", 0.5), ("p99", 0.99))}
    if not alone:
        values["batch_rate"] = colocation.rate(answers["training"])
    after = counted(mode, "server")
    return values | {name: after[name] - before[name] for name in after}


def added(values: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    """Values with what the latencies are over those alone."""
    more = {f"added_{q}_us": values[f"latency_{q}_us"] - alone[f"latency_{q}_us"] for q in ("p50", "p99")}
    return values | more


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "A latency task whose GPU is taken before its work arrives, by way of hinting.",
        "  GPUMUX=target/release/gpumux python3 bench/hints.py\n"
        "  python3 bench/hints.py --cases 10ms/prep200,10ms/copy200 --modes none,auto,manual --seconds 10",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one cell [%(default)s]")
    common.selections(parser, CASES, MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds = options.seconds / (4 if options.quick else 1)
    results = Results("hints", options.out, CASES, MODES)
    plain = Mode("alone", logs)

    iterations = shares.calibrated(plain, "latency", 10)["iterations"]

    # Alone is always measured: what is added is over it.
    alone: dict[str, dict[str, float]] = {}
    with Crew(plain) as crew:
        for case in options.cases:
            with results.cell(f"{case} / alone"):
                if case.partition("/")[2] in TORCH:
                    alone[case] = torch(plain, "alone", case, seconds, crew, alone=True)
                else:
                    alone[case] = beside(plain, "alone", task(case, iterations), seconds, None)
                if "alone" in options.modes:
                    results.add(case, "alone", alone[case])

    with results.cell("gpumux"), common.mode("gpumux", logs) as mode, Crew(mode) as crew:
        for case in [case for case in options.cases if case in alone]:
            name, kind = case.split("/")
            for hints in [it for it in modes_of(case)[1:] if it in options.modes]:
                with results.cell(f"{case} / {hints}"):
                    if kind in TORCH:
                        values = torch(mode, hints, case, seconds, crew, alone=False)
                    else:
                        if name == "train":
                            crew.have({"training": TRAINING})
                            job: list[str] | Crew = crew
                        else:
                            crew.close(*crew.workers)
                            job = ["batch", "--kernel-us", str(KERNEL_US[name]), "--in-flight", "4"]
                        values = beside(mode, hints, task(case, iterations), seconds, job)
                    results.add(case, hints, added(values, alone[case]))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
