"""What a switch costs a short request, and what that consists of, by the neighbour's preemption mode, its kernels' length and its state.

A request (case `300us`: a kernel that reads 8 MiB again and again, `--touch`) comes every 2 ms on average, beside a neighbour that fills the GPU with kernels. Both are
`gpumux workload switch` under the daemon, which gives the neighbour a timeslice of 1 µs and the request one of 1 s. The kernels of both write the device's timer.

Modes: `alone`, and `MODE-LENGTH`: the neighbour's preemption mode (`instruction`, the driver's own; `thread-block`; `wait-for-idle`) and how long its kernels run.
`state` is a length of 1 ms with 200 registers in use by each of 256 threads and 48 KiB of shared memory on every SM; `shared` has 4 × 48 KiB instead, and no such registers.

Values, in ms: `latency` of a request from its launch to its end as the host sees it. Its parts: `start` until its first instruction, `kernel` from there to the
last one, `wake` from there until the host has seen it, above the quickest (some µs, which are in `start`). `stopped` is the part of `start` until the neighbour's last instruction, and `switch` the rest of it: the runlist, the firmware, and
the contexts' state. `kernel` beside `alone` is what cold caches and translation tables cost. `met`: the part of requests at whose launch the neighbour ran.
Only these have `stopped` and `switch`; both are medians of a round. The clocks of host and device are compared by the quickest end of all requests, which a neighbour does not delay.
"""

from __future__ import annotations

import bisect
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import common
import rounds
import shares
from common import BenchError, Gpumux, Results

LENGTHS_US = {"10us": 10, "100us": 100, "1ms": 1_000, "10ms": 10_000, "state": 1_000, "shared": 1_000}
STATE = {
    "state": ["--registers", "200", "--shared", "48KiB"],
    "shared": ["--blocks", "4", "--shared", "48KiB"],
}
NEIGHBOURS = {f"{mode}-{length}": (mode, length) for mode in ("instruction", "thread-block", "wait-for-idle") for length in LENGTHS_US}
MODES = ["alone", *NEIGHBOURS]
# Where all blocks run to their end, there is no state to save.
DEFAULT_MODES = [it for it in MODES if it not in ("wait-for-idle-state", "wait-for-idle-shared", "thread-block-shared")]
CASES = {"100us": 100, "300us": 300, "1ms": 1_000}
# A host that spins sees the end of a request some µs after it (see `wake` of mode alone).
WAKE_US = 60.0

Request = Sequence[int]  # submitted, first and last instruction, seen


class Parts(NamedTuple):
    """Of a request, in µs."""

    start: float
    kernel: float
    wake: float
    stopped: float | None
    switch: float | None


def offset(compared: Sequence[Request]) -> float:
    """How far the device's timer is ahead of the host's clock, in ns, as if the host saw the quickest end at once: what is before a request's first
    instruction differs by neighbour, what follows its last does not."""
    return max(last - seen for _, _, last, seen in compared)


def parts(request: Request, ahead: float, ran: Sequence[Sequence[int]]) -> Parts:
    """The parts of one request; `ran`: in which stretches the neighbour did, in order."""
    submitted, first, last, seen = request
    launched = submitted + ahead
    stopped = None
    # The last stretch that began before the request's first instruction.
    at = bisect.bisect_left(ran, first, key=lambda it: it[0]) - 1
    before = bisect.bisect_right(ran, launched, key=lambda it: it[0]) - 1
    if at >= 0 and before >= 0 and ran[before][1] >= launched and ran[at][1] <= first:
        stopped = ran[at][1]
    return Parts(
        (first - launched) / 1e3,
        (last - first) / 1e3,
        (seen + ahead - last) / 1e3,
        None if stopped is None else (stopped - launched) / 1e3,
        None if stopped is None else (first - stopped) / 1e3,
    )


def cell(found: dict[str, Any], neighbour: dict[str, Any] | None) -> dict[str, Any]:
    """What the programs of one mode printed."""
    ahead, ran = offset([*found["compared"], *found["requests"]]), sorted(neighbour["ran"]) if neighbour else []
    if not found["requests"]:
        raise BenchError("no request was made")
    each = [parts(request, ahead, ran) for request in found["requests"]]
    wake = statistics.median(it.wake for it in each)
    if wake > WAKE_US:
        raise BenchError(f"the clocks of host and device were compared wrongly: a host that spins would see a request's end {wake:.0f} µs late, and {WAKE_US:.0f} is the most that is plausible")
    met = [it for it in each if it.stopped is not None and it.switch is not None]
    rates = {"met": len(met) / len(each)} if neighbour else {}
    if met:
        rates |= {"stopped_ms": statistics.median(it.stopped for it in met) / 1e3, "switch_ms": statistics.median(it.switch for it in met) / 1e3}
    made = rounds.cell([(seen - submitted) / 1e6 for submitted, _, _, seen in found["requests"]], **rates)
    return made | {"more_ms": {name: [getattr(it, name) / 1e3 for it in each] for name in ("start", "kernel", "wake")}}


def measure(mode: Gpumux, case: str, name: str, seconds: float, touch: str) -> dict[str, Any]:
    """One mode in one round."""
    every = ["switch", "--period-us", "2000"]
    programs = [(shares.Program("latency"), [*every, "--request-us", str(CASES[case]), "--touch", touch, "--wait", "spin"], seconds)]
    if name != "alone":
        preemption, length = NEIGHBOURS[name]
        neighbour = [*every, "--neighbour", "--preemption", preemption, "--kernel-us", str(LENGTHS_US[length]), *STATE.get(length, [])]
        # It is there until the last request.
        programs.append((shares.BATCH, neighbour, seconds + 0.2))
    found, _ = shares.at_once(mode, programs, common.ANSWER_S)
    return cell(found[0], found[1] if len(found) > 1 else None)


def main() -> int:
    """Runs all rounds that were asked for, or as many as the budget allows."""
    parser = common.parser(
        "What a switch costs a short request, by the neighbour's preemption mode, its kernels' length, registers and shared memory.",
        "  GPUMUX=target/release/gpumux python3 bench/switch.py --rounds 5 --budget 90\n"
        "  python3 bench/switch.py --modes alone,instruction-1ms,thread-block-1ms --quick\n"
        "With --quick, one round. The exit code is 75 when the budget was spent: the same command goes on.",
    )
    rounds.arguments(parser, seconds=0.3)
    parser.add_argument("--touch", default="8MiB", metavar="BYTES", help="memory that a request reads [%(default)s]; 4KiB on the emulated device")
    common.selections(parser, list(CASES), MODES, cases=["300us"], modes=DEFAULT_MODES)
    options = parser.parse_args()
    logs = common.begin(options)
    seconds, most, least = rounds.quick(options)
    results = Results("switch", options.out, list(CASES), MODES)
    with common.mode("gpumux", logs) as mode:
        plan = rounds.Plan(options.cases, options.modes, lambda case, name, _: measure(mode, case, name, seconds, options.touch), least=dict.fromkeys(options.cases, least))
        return rounds.run(plan, results, options.budget, most)


if __name__ == "__main__":
    sys.exit(main())
