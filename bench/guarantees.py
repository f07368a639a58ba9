"""Guaranteed and received: latency and batch tenants that share one device, with guarantees and without.

Programs are `gpumux workload`, so it runs without PyTorch and on the emulated device. A case is a list of tenants, numbered in its order:

| case | tenants: class and guarantee |
|---|---|
| `3` | a light latency tenant (0.1; requests of ten kernels of 10 µs, 200 times a second), a busy one that always has work (0.4), batch (0.3) |
| `8`, `24` | a light latency tenant, a busy one, and others of classes standard and batch, with 0.1 and 0.03 each |
| `16` | a light latency tenant (0.1) and 15 batch tenants (0.04 each): what the daemon costs |
| `pausing` | a standard tenant (0.6) whose host works for 1 ms between kernels of 5 ms, and batch (0.2) |
| `two-gpus` | with `--devices 2`: on each device a standard tenant (0.6 and 0.3) and batch (0.2 and 0.5) |

Modes: `alone` (the light tenant's latency), `time-slicing`, `gpumux` (no guarantees) and `guaranteed`.

Values by the number of a tenant, for those that always have work: `share_N` (of the work that all tenants of its device had done, each call counted by its time
alone), in mode `guaranteed` also `guarantee_N` and `lag_N_ms`, the largest shortfall in any interval of whole seconds: guarantee × work done by all − own work,
and `bound_N_ms`, what the lag may be (docs/concepts.md); more fails the cell.
For the light tenant `latency_p50_us` and `latency_p99_us`, from when a request is due (in results up to commit cb64feb6: from when it is submitted); for all modes `total_rel` (work done for each second and device), with gpumux `daemon_cpu`
and `scheduler_cpu` (the part of one CPU that the daemon takes, and its scheduling thread), and `scheduler_user`, what of that is not in the kernel and its drivers. Each is the mean of the rounds; from five rounds on, with
the interval of rounds.py. `lag_N_ms` is the worst of the rounds.
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import common
import rounds
import shares
from common import BenchError, CpuTime, Gpumux, Mode, Results

MODES = ["alone", "time-slicing", "gpumux", "guaranteed"]


class Kind(NamedTuple):
    """What a program does: the arguments of its workload, and how much work one call is in µs, alone."""

    arguments: Sequence[str]
    kernels: int
    kernel_us: int
    steady: bool = True


KINDS = {
    "light": Kind(["latency", "--period-us", "5000", "--kernels", "10", "--wait", "spin", "--from-arrival"], 10, 10, steady=False),
    "busy": Kind(["batch"], 1, 1000),
    "batch": Kind(["batch"], 1, 2000),
    # Always late, so that the next request is prepared at once: a pause of 1 ms after each.
    "pausing": Kind(["latency", "--period-us", "100", "--kernels", "1", "--prepare-us", "1000", "--wait", "spin"], 1, 5000),
}


class Tenant(NamedTuple):
    """One tenant of a case."""

    kind: str
    klass: str
    guaranteed: float
    device: int | None = None
    ends_early: bool = False

    def arguments(self, _mode: Mode, work: Mapping[str, int]) -> list[str]:
        """Of its workload; `work` has the iterations of each kind's kernel."""
        return [*KINDS[self.kind].arguments, "--iterations", str(work[self.kind])]

    def environment(self) -> dict[str, str]:
        """Of its process: which device it sees, on which then its guarantee holds."""
        return {"CUDA_VISIBLE_DEVICES": common.visible(2).split(",")[self.device]} if self.device is not None else {}


def many(count: int, guaranteed: float) -> list[Tenant]:
    """A light and a busy latency tenant, and others."""
    classes = ["standard", "batch"]
    others = [Tenant("batch", classes[at % 2], guaranteed) for at in range(count - 2)]
    return [Tenant("light", "latency", guaranteed), Tenant("busy", "latency", guaranteed), *others]


CASES: dict[str, list[Tenant]] = {
    "3": [Tenant("light", "latency", 0.1), Tenant("busy", "latency", 0.4), Tenant("batch", "batch", 0.3)],
    "8": many(8, 0.1),
    "24": many(24, 0.03),
    "16": [Tenant("light", "latency", 0.1), *[Tenant("batch", "batch", 0.04)] * 15],
    "pausing": [Tenant("pausing", "standard", 0.6), Tenant("batch", "batch", 0.2)],
    "two-gpus": [Tenant("batch", klass, part, device) for device, parts in enumerate([(0.6, 0.2), (0.3, 0.5)]) for klass, part in zip(("standard", "batch"), parts)],
}
DEVICES = {"two-gpus": 2}


def lag_us(own: Sequence[float], total: Sequence[float], promised: float) -> float:
    """The largest of promised × total − own over all intervals."""
    most = now = 0.0
    for mine, all_of_it in zip(own, total):
        now = max(0.0, now + promised * all_of_it - mine)
        most = max(most, now)
    return most


def evaluate(tenants: Sequence[Tenant], found: Sequence[dict[str, Any]], guaranteed: bool) -> dict[str, float]:
    """The values of one cell."""
    values: dict[str, float] = {}
    worth = [KINDS[it.kind].kernels * KINDS[it.kind].kernel_us for it in tenants]
    # All start within the first second.
    work = [[count * us for count in report["per_second"][1:]] for report, us in zip(found, worth)]
    windows = min(map(len, work))
    if windows < 2:
        raise BenchError("two full seconds after the first are needed: raise --seconds")
    devices = {it.device for it in tenants}
    total = {at: [sum(own[window] for own, it in zip(work, tenants) if it.device == at) for window in range(windows)] for at in devices}
    values["total_rel"] = sum(map(sum, total.values())) / windows / 1e6 / len(devices)
    for number, (tenant, report, own) in enumerate(zip(tenants, found, work), 1):
        if not KINDS[tenant.kind].steady:
            values |= shares.latency(report)
            continue
        every = total[tenant.device]
        values[f"share_{number}"] = sum(own[:windows]) / max(sum(every), 1.0)
        if guaranteed:
            values[f"guarantee_{number}"] = tenant.guaranteed
            values[f"lag_{number}_ms"] = lag_us(own, every, tenant.guaranteed) / 1e3
    return values


class Bounds(threading.Thread):
    """Watches the bounds on the lag of tenants: their shares × the bounds on their waits (docs/concepts.md), the largest while they run."""

    def __init__(self, mode: Gpumux) -> None:
        super().__init__(daemon=True)
        self.mode, self.over = mode, threading.Event()
        self.ms: dict[str, float] = {}

    def run(self) -> None:
        while not self.over.wait(1.5):
            with contextlib.suppress(OSError, http.client.HTTPException, BenchError):
                for tenant in self.mode.tenants_now():
                    for it in tenant["domains"]:
                        bound = it["entitled_share"] * it["wait_bound_us"] / 1e3
                        self.ms[tenant["name"]] = max(self.ms.get(tenant["name"], 0.0), bound)

    def __enter__(self) -> Bounds:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


def cell(mode: Mode, tenants: Sequence[Tenant], work: Mapping[str, int], seconds: float, guaranteed: bool) -> dict[str, float]:
    """One case in one mode."""
    asked = [it if guaranteed else it._replace(guaranteed=0.0) for it in tenants]
    with contextlib.ExitStack() as stack:
        threads = {"daemon_cpu": (None,), "scheduler_cpu": ("scheduler",), "scheduler_user": ("scheduler", True)} if isinstance(mode, Gpumux) else {}
        bounds = stack.enter_context(Bounds(mode)) if isinstance(mode, Gpumux) and guaranteed else None
        watched = {name: stack.enter_context(CpuTime(mode.daemon.pid, *thread)) for name, thread in threads.items()}  # type: ignore[attr-defined]
        found, end = shares.timed_run(mode, asked, work, seconds)
        values = evaluate(tenants, found, guaranteed)
        for name, it in watched.items():
            # Neither the programs' start nor their end.
            values[name] = it.part(end - seconds + 1, end - 1)
        for number in range(1, len(tenants) + 1) if bounds else ():
            if f"lag_{number}_ms" in values:
                values[f"bound_{number}_ms"] = bounds.ms[mode.tenants[f"{number - 1}"]]  # type: ignore[attr-defined, union-attr]
    return values


def above(values: Mapping[str, float]) -> list[str]:
    """Which lags are above their bounds."""
    lags = {name: values[name.replace("lag", "bound")] for name in values if name.startswith("lag_")}
    return [f"{name} {values[name]:.0f} of at most {bound:.0f}" for name, bound in lags.items() if values[name] > bound]


def summed_up(found: Sequence[dict[str, float]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The values of a cell's rounds in one row, and their intervals."""
    values, around = {}, {}
    for name in found[0]:
        if name.startswith(("lag_", "bound_")):
            values[name] = max(it[name] for it in found)
            continue
        values[name] = statistics.fmean(it[name] for it in found)
        if len(found) >= rounds.LEAST:
            mean = lambda times, name=name: sum(it[name] * n for it, n in zip(found, times)) / sum(times)  # noqa: E731
            around[name] = rounds.interval(mean, len(found))
    return values, around


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "Guarantees of compute among latency and batch tenants: what was received of them.",
        "  GPUMUX=target/release/gpumux python3 bench/guarantees.py --quick --modes gpumux,guaranteed\n"
        "  gpumux emu -- python3 bench/guarantees.py --cases 3 --seconds 6\n"
        "  python3 bench/guarantees.py --devices 2 --cases two-gpus",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one cell [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s; 1 with --quick]")
    parser.add_argument("--devices", type=int, default=1, help="devices of the machine [%(default)s]")
    parser.add_argument("--cases", type=common.listed(list(CASES)))
    parser.add_argument("--modes", type=common.listed(MODES), default=MODES)
    options = parser.parse_args()
    cases = options.cases or [case for case in CASES if DEVICES.get(case, 1) <= options.devices]
    logs = common.begin(options)
    options.rounds = 1 if options.quick else options.rounds
    seconds = max(4.0, options.seconds / (4 if options.quick else 1))
    results = Results("guarantees", options.out, list(CASES), MODES)

    plain = Mode("alone", logs)
    work = {name: shares.calibrated(plain, kind.arguments[0], kind.kernel_us)["iterations"] for name, kind in KINDS.items()}
    light = [Tenant("light", "latency", 0.0)]
    seen: dict[tuple[str, str], list[dict[str, float]]] = {}

    def add(case: str, name: str, values: dict[str, float]) -> None:
        seen.setdefault((case, name), []).append(values)
        results.add(case, name, *summed_up(seen[case, name]))

    for number in range(options.rounds):
        at = number % len(options.modes)
        for name in [*options.modes[at:], *options.modes[:at]]:
            if name == "alone":
                found = shares.run(plain, light, work, seconds)[0]
                for case in cases:
                    if CASES[case][0].kind == "light":
                        add(case, name, shares.latency(found))
                continue
            with results.cell(name), common.mode("gpumux" if name == "guaranteed" else name, logs) as mode:
                for case in cases:
                    with results.cell(f"{case} / {name}, round {number}"):
                        values = cell(mode, CASES[case], work, seconds, name == "guaranteed")
                        add(case, name, values)
                        if wrong := above(values):
                            raise BenchError("more lag than is promised: " + ", ".join(wrong))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
