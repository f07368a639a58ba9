"""What a neighbour's fault costs a member of an MPS group that is run again (`gpumux run --restart on-collateral`).

A job works on a state of `--bytes` in steps, in place. After some steps another member of its group faults, and the job runs again.
Cases: sizes of the state. Modes: `restart` (it begins from nothing), `checkpoint` (it reads the last file, which it writes every `--every` steps),
`kept` (`--keep-memory`: it goes on with its device memory, which it commits at each step).
Values, medians of the rounds: `back_ms` from the last step before the fault to the end of the first one after it; of these `imports_ms` (from the new process's
first line until its imports are done) and `restore_ms` (from there until the state is there). `lost_steps`, and `lost_ms` of work that is to be done anew. `step_ms` and `save_ms`, of one
step. `wrong`: states that were not those of their step, of all rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
from common import BenchError, Results, Worker
from peers import Space

WORKER = Path(__file__).resolve().parent / "kept_worker.py"
SIZES = {"64MiB": 64 << 20, "1GiB": 1 << 30, "8GiB": 8 << 30}
MODES = ["restart", "checkpoint", "kept"]
PATIENCE_S = 120.0
STEPS = 130


class Job:
    """The job, and what it has reported."""

    def __init__(self, mode: Space, case: str, way: str, file: Path, options: Any) -> None:
        command = [sys.executable, str(WORKER), way, "--bytes", str(SIZES[case]), "--file", str(file)]
        command += ["--every", str(options.every), "--step-ms", f"{options.step_ms:g}"]
        command += ["--no-torch"] if options.no_torch else []
        again = ["--restart", "on-collateral", *(["--keep-memory"] if way == "kept" else [])]
        self.worker = Worker("job", [], mode, "batch", command, again)
        self.steps: list[dict[str, Any]] = []

    def until(self, event: str, count: int = 1) -> dict[str, Any]:
        """Waits for so many more of an event; the last one."""
        while True:
            found = self.worker.reply(PATIENCE_S)
            if found["event"] == "step":
                self.steps.append(found)
            elif found["event"] == "began" and event != "began":
                raise BenchError("the job was run again too soon")
            count -= found["event"] == event
            if not count:
                return found


def fault(mode: Space) -> None:
    """A member that faults once it has worked for a moment."""
    command = [mode.binary, "workload", "fault", "--kind", "illegal-address", "--seconds", "0.3"]
    member = Worker("faulty", [], mode, "batch", command)
    try:
        member.process.wait(PATIENCE_S)
    finally:
        member.close(2.0)


def measure(mode: Space, case: str, way: str, folder: Path, options: Any) -> dict[str, float]:
    """One round."""
    job = Job(mode, case, way, folder / "state", options)
    try:
        job.until("began")
        wrong = job.until("checked")["wrong"]
        mode.check(["job"])
        job.until("step", options.steps)
        fault(mode)
        began, last = job.until("began"), job.steps[-1]
        found, checked = job.until("found"), job.until("checked")
        before = len(job.steps)
        first = job.until("step")
        # A step may be committed before it is reported.
        lost = max(0, last["step"] - found["step"])
        own = job.steps[10:before]
        step_ms = statistics.median(it["step_ms"] for it in own)
        save_ms = statistics.fmean(it["save_ms"] for it in own)
        # To see whether the state is right is no part of going on.
        checking = checked["at"] - found["at"]
        return {
            "back_ms": (first["at"] - last["at"] - checking) * 1000,
            "imports_ms": (began["at"] - began["began"]) * 1000,
            "restore_ms": (found["at"] - began["at"]) * 1000,
            "lost_steps": lost,
            "lost_ms": lost * step_ms,
            "step_ms": step_ms,
            "save_ms": save_ms,
            "wrong": wrong + checked["wrong"],
        }
    finally:
        job.worker.close(2.0)
        (folder / "state").unlink(missing_ok=True)


def main() -> int:
    """Runs all cells that were asked for."""
    parser = common.parser(
        "What a neighbour's fault costs a member that is run again: time and work, with and without kept memory.",
        "  GPUMUX=target/release/gpumux python3 bench/kept.py     (about 6 min)\n"
        "  target/release/gpumux emu -- python3 bench/kept.py --no-torch --cases 64MiB --rounds 1 --out /tmp     (needs no GPU)",
    )
    common.selections(parser, list(SIZES), MODES)
    parser.add_argument("--rounds", type=int, default=5, help="faults of each cell [%(default)s]")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps before a fault [%(default)s]")
    parser.add_argument("--every", type=int, default=100, help="steps between two files [%(default)s]")
    parser.add_argument("--step-ms", type=float, default=20.0, help="length of a step, with PyTorch [%(default)s]")
    parser.add_argument("--no-torch", action="store_true", help="a step sets the state, by the driver's calls")
    options = parser.parse_args()
    logs = common.begin(options)
    results = Results("kept", options.out, list(SIZES), MODES)
    rounds = max(1, options.rounds // (4 if options.quick else 1))
    for case in options.cases:
        for way in options.modes:
            with results.cell(f"{case} / {way}"), Space(way, logs) as mode:
                found = []
                for _ in range(rounds):
                    found.append(measure(mode, case, way, logs, options))
                    time.sleep(1.0)  # The next job finds the group as it was.
                values = {name: statistics.median(it[name] for it in found) for name in found[0]}
                values["wrong"] = sum(it["wrong"] for it in found)
                results.add(case, way, values)
                if values["wrong"]:
                    raise BenchError(f"{values['wrong']:.0f} states were not those of their step")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
