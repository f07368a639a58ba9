"""Statistics, the results file, and the handling of modes and worker processes, without a GPU."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import common
import memory

CHILD = """
import faulthandler, json, signal, sys, time
faulthandler.register(signal.SIGUSR1)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["op"] == "die": sys.exit("of natural causes")
    if order["op"] == "hang": time.sleep(3600)
    if order["op"] == "fail": print(json.dumps({"error": "no luck"}), flush=True)
    if order["op"] == "echo": print(json.dumps({"got": order}), flush=True)
"""


class Quiet(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        silence = contextlib.redirect_stderr(io.StringIO())
        self.stderr = silence.__enter__()
        self.addCleanup(silence.__exit__, None, None, None)


class Gpus(unittest.TestCase):
    """Of a machine with several GPUs, of which programs see one."""

    def ask(self, *command: str) -> str:
        every = {"0": "GPU-a", "1": "GPU-b"}
        if "-i" not in command:
            return "\n".join(every.values())
        which = command[command.index("-i") + 1]
        return every.get(which, which if which in every.values() else "")

    def test_another_gpu_is_not_the_programs_own(self) -> None:
        self.enterContext(mock.patch.object(common, "run_quietly", self.ask))
        for seen, other in (("GPU-a", "GPU-b"), ("GPU-b", "GPU-a"), ("1", "GPU-a"), ("", "GPU-b")):
            with self.subTest(seen=seen), mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": seen}):
                self.assertEqual(common.another_gpu(), other)
        with mock.patch.object(common, "run_quietly", lambda *_: "GPU-a"), self.assertRaises(common.BenchError):
            common.another_gpu()

    def test_memory_is_that_of_the_gpu_that_programs_see(self) -> None:
        library = mock.MagicMock()
        library.nvmlInit_v2.return_value = library.nvmlDeviceGetHandleByUUID.return_value = library.nvmlDeviceGetHandleByIndex_v2.return_value = 0
        with mock.patch.object(memory.ctypes, "CDLL", lambda _name: library):
            for seen, by, which in (("GPU-b", "nvmlDeviceGetHandleByUUID", b"GPU-b"), ("1,0", "nvmlDeviceGetHandleByIndex_v2", 1), ("", "nvmlDeviceGetHandleByIndex_v2", 0)):
                with self.subTest(seen=seen), mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": seen}):
                    memory.Nvml()
                    self.assertEqual(getattr(library, by).call_args.args[0], which)
            library.nvmlDeviceGetHandleByUUID.return_value = 6
            with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "GPU-c"}), self.assertRaisesRegex(common.BenchError, "GPU-c"):
                memory.Nvml()


class Statistics(unittest.TestCase):
    def test_quantile_is_a_value_that_occurred(self) -> None:
        values = [float(it) for it in range(1, 1001)]
        self.assertEqual(common.quantile(values, 0.5), 500)
        self.assertEqual(common.quantile(values, 0.99), 990)
        self.assertEqual(common.quantile(values, 0.999), 999)
        self.assertEqual(common.quantile(values, 1), 1000)
        self.assertEqual(common.quantile([7.0], 0.5), 7)
        self.assertEqual(common.quantile([3.0, 1.0, 2.0], 0), 1)

    def test_nothing_measured_is_an_error_and_not_a_zero(self) -> None:
        with self.assertRaises(common.BenchError):
            common.latency_values([])

    def test_pauses_repeat_and_stay_in_bounds(self) -> None:
        pauses = common.pauses(0.005, 0.02, 10, seed=3)
        self.assertEqual(pauses, common.pauses(0.005, 0.02, 10, seed=3))
        self.assertNotEqual(pauses, common.pauses(0.005, 0.02, 10, seed=4))
        self.assertTrue(all(0.005 <= pause <= 0.02 for pause in pauses))
        self.assertGreaterEqual(sum(pauses), 10)


class ResultsFile(Quiet):
    def make(self) -> common.Results:
        with mock.patch.object(common, "device_and_driver", return_value=("NVIDIA H100 80GB HBM3", "580.1")):
            return common.Results("try", self.folder, ["b", "a"], ["alone", "gpumux"])

    def test_file_is_complete_after_every_row_and_in_order(self) -> None:
        results = self.make()
        self.assertEqual(results.path.name, "try-h100-80gb-hbm3.json")
        results.add("a", "gpumux", {"latency_p50_ms": 1.23456789})
        results.add("a", "alone", {"latency_p50_ms": 1.0})
        results.add("b", "alone", {"latency_p50_ms": 2.0})
        results.add("a", "alone", {"latency_p50_ms": 3.0})
        data = json.loads(results.path.read_text())
        common.check_results(data)
        rows = [(row["case"], row["mode"], row["values"]["latency_p50_ms"]) for row in data["rows"]]
        self.assertEqual(rows, [("b", "alone", 2.0), ("a", "alone", 3.0), ("a", "gpumux", 1.23457)])

    def test_failing_cell_is_reported_and_the_rest_goes_on(self) -> None:
        results = self.make()
        with results.cell("a / alone"):
            raise common.BenchError("it broke")
        results.add("b", "alone", {"wall_s": 1.0})
        self.assertEqual(results.finish(), 1)
        self.assertIn("it broke", self.stderr.getvalue())

    def test_an_interrupt_is_no_failing_cell(self) -> None:
        with self.assertRaises(KeyboardInterrupt), self.make().cell("a"):
            raise KeyboardInterrupt

    def test_wrong_shapes_are_refused(self) -> None:
        good = {key: "" for key in ("bench", "device", "driver", "date", "commit", "command")}
        row = {"case": "a", "mode": "alone", "values": {"x_ms": 1}}
        common.check_results(good | {"rows": [row]})
        for wrong in (
            good,
            good | {"rows": [], "more": ""},
            good | {"rows": [row | {"note": ""}]},
            good | {"rows": [row | {"values": {}}]},
            good | {"rows": [row | {"values": {"x_ms": "1"}}]},
            good | {"rows": [row | {"values": {"x_ms": float("nan")}}]},
            good | {"rows": [], "driver": 580},
        ):
            with self.assertRaises(common.BenchError, msg=str(wrong)):
                common.check_results(wrong)

    def test_command_does_not_tell_where_files_were(self) -> None:
        shown = common.shown_command(
            ["/x/bench/preempt.py", "--out", "/y", "--workloads", "/z/shapes", "--logs=/w", "--quick"]
        )
        self.assertEqual(shown, "python3 bench/preempt.py --workloads shapes --quick")

    def test_committed_results_have_the_shape(self) -> None:
        for path in (common.BENCH / "results").glob("*.json"):
            with self.subTest(path.name):
                data = json.loads(path.read_text())
                common.check_results(data)
                self.assertTrue(path.name.startswith(data["bench"] + "-"))


class WithWorker(Quiet):
    def worker(self, klass: str | None = None, mode: common.Mode | None = None) -> common.Worker:
        worker = common.Worker(
            "child", [], mode or common.Mode("alone", self.folder), klass, [sys.executable, "-c", CHILD]
        )
        self.addCleanup(worker.close)
        self.assertEqual(worker.reply(60), {"ready": True})
        return worker


class Workers(WithWorker):
    def test_orders_are_answered_until_the_end(self) -> None:
        worker = self.worker()
        worker.send(op="echo", start=1.5)
        self.assertEqual(worker.reply(60), {"got": {"op": "echo", "start": 1.5}})
        worker.send(op="fail")
        with self.assertRaisesRegex(common.BenchError, "no luck"):
            worker.reply(60)
        worker.close()
        self.assertIsNotNone(worker.process.poll())

    def test_a_dead_worker_is_noticed_with_its_last_words(self) -> None:
        worker = self.worker()
        worker.send(op="die")
        with self.assertRaisesRegex(common.BenchError, "of natural causes"):
            worker.reply(60)
        with self.assertRaises(common.BenchError):
            worker.send(op="echo")

    def test_a_hanging_worker_says_where_it_is_and_is_ended(self) -> None:
        worker = self.worker()
        worker.send(op="hang")
        with self.assertRaisesRegex(common.BenchError, "(?s)no answer.*most recent call first"):
            worker.reply(0.5)
        self.assertEqual(worker.process.wait(60), -signal.SIGTERM)

    def test_crew_has_exactly_the_members_asked_for(self) -> None:
        original = common.Worker

        def fake(name: str, arguments: list[str], mode: common.Mode, klass: str, program: object) -> common.Worker:
            return original(name, arguments, mode, klass, [sys.executable, "-c", CHILD])

        with mock.patch.object(common, "Worker", fake), common.Crew(common.Mode("alone", self.folder)) as crew:
            crew.have({"a": ([], "latency"), "b": ([], "batch")})
            pid = crew.workers["a"].process.pid
            crew.have({"a": ([], "latency")})
            self.assertEqual([*crew.workers], ["a"])
            self.assertEqual(crew.workers["a"].process.pid, pid)
            before = time.monotonic()
            got = crew.measure(2.0, {"a": {"op": "echo"}})["a"]["got"]
            self.assertAlmostEqual(got["stop"] - got["start"], 2.0)
            self.assertGreater(got["start"], before)
            with self.assertRaises(common.BenchError):
                crew.measure(1.0, {"b": {"op": "echo"}})
            with self.assertRaises(common.BenchError):
                crew.measure(1.0, {"a": {"op": "die"}})
            crew.have({"a": ([], "latency")})
            self.assertNotEqual(crew.workers["a"].process.pid, pid)
            pid = crew.workers["a"].process.pid
            crew.have({"a": (["another"], "latency")})
            self.assertNotEqual(crew.workers["a"].process.pid, pid, "another program of that name")
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)


    def test_mode_without_programs_is_not_checked(self) -> None:
        with mock.patch.object(common.Mps, "_ask", lambda *_: mock.Mock(stdout="")):  # no server, before its first client
            common.Crew(common.Mps("mps", self.folder)).have({})

    def test_workers_of_a_round_have_processors_of_their_own(self) -> None:
        children: list[subprocess.Popen[bytes]] = []
        for _ in "ab":
            # A shell with a child: both belong to the worker.
            made = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
            children.append(made)
            self.addCleanup(made.wait)
            self.addCleanup(os.killpg, made.pid, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while len([*common.threads(made.pid)]) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        with common.Crew(common.Mode("alone", self.folder)) as crew:
            crew.workers = {name: mock.Mock(process=child) for name, child in zip("ab", children, strict=True)}

            def placed(number: int) -> list[set[int]]:
                crew.place(number)
                found = [{frozenset(os.sched_getaffinity(thread)) for thread in common.threads(child.pid)} for child in children]
                self.assertEqual([len(it) for it in found], [1, 1], "all threads of a worker")
                return [set(next(iter(it))) for it in found]

            if len(os.sched_getaffinity(0)) < 2:
                self.skipTest("one processor")
            first, second = placed(0), placed(1)
            self.assertFalse(first[0] & first[1])
            self.assertNotEqual(first, second, "others in the next round")
            self.assertEqual(first, placed(0), "the same for each mode of a round")
            if len(os.sched_getaffinity(0)) > 2:
                crew.started = {"a": (["pair", "--batch", "8"], "latency"), "b": (["train"], "batch")}
                both, one = placed(0)
                self.assertEqual(len(both), 2 * len(one), "two programs in one process")
            crew.workers = {}


FAKE_GPUMUX = """#!{python}
import json, os, socket, sys
words, folder = sys.argv[1:], os.environ["GPUMUX_RUNTIME_DIR"]
if words[0] == "daemon":
    if "--policy" in words: sys.exit("unknown policy")
    api = socket.socket(socket.AF_UNIX)
    api.bind(folder + "/api.sock")
    api.listen()
    while True: api.accept()[0].close()
if words[0] == "run":
    name = words[words.index("--name") + 1]
    open(f"{{folder}}/tenant-{{name}}-{{words[words.index('--class') + 1]}}", "w").close()
    program = words[words.index("--") + 1 :]
    os.execv(program[0], program)
if words[0] == "ps":
    names = [it.split("-", 1)[1].rpartition("-")[0] for it in os.listdir(folder) if it.startswith("tenant")]
    print(json.dumps({{"tenants": [{{"name": name, "domains": [{{}}]}} for name in names]}}))
"""


class GpumuxMode(WithWorker):
    def setUp(self) -> None:
        super().setUp()
        binary = self.folder / "gpumux"
        binary.write_text(FAKE_GPUMUX.format(python=sys.executable))
        binary.chmod(0o755)
        patch = mock.patch.dict(os.environ, {"GPUMUX": str(binary)})
        patch.__enter__()
        self.addCleanup(patch.__exit__, None, None, None)

    def test_programs_run_as_tenants_of_a_daemon_of_our_own(self) -> None:
        with common.Gpumux("gpumux", self.folder) as mode:
            daemon, folder = mode.daemon, mode.folder
            self.worker("latency", mode)
            mode.check(["child"])
            self.assertTrue((folder / "tenant-child-1-latency").exists())
            self.assertEqual(mode.command(["x"], "child", None)[-2:], ["--", "x"])
        self.assertIsNotNone(daemon.poll())
        self.assertFalse(folder.exists())

    def test_a_daemon_that_does_not_start_is_an_error(self) -> None:
        with self.assertRaisesRegex(common.BenchError, "unknown policy"):
            with common.mode("fixed", self.folder):
                self.fail("it started")


class Parts(unittest.TestCase):
    EVERY: dict[str, common.Part] = {"a": (["x", "y"], ["m", "n"]), "b": (["z"], ["m"])}

    def ran(self, *words: str, **more: Any) -> list[Any]:
        parser, found = common.parser("", ""), list[Any]()
        common.parts(parser, self.EVERY)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            options = parser.parse_args([*words, "--out", folder])
            common.run_parts(parser, options, self.EVERY, lambda part, results, *chosen: found.append((part, results.path.name[:4], *chosen)), "p-", **more)
        return found

    def test_each_part_has_its_cases_modes_and_results(self) -> None:
        self.assertEqual(self.ran("all"), [("a", "p-a-", ["x", "y"], ["m", "n"]), ("b", "p-b-", ["z"], ["m"])])
        self.assertEqual(self.ran("a", "--cases", "y"), [("a", "p-a-", ["y"], ["m", "n"])])
        self.assertEqual(self.ran("all", usual=lambda part: ([], []) if part == "b" else (["x"], ["n"])), [("a", "p-a-", ["x"], ["n"])])

    def test_wrong_selections_are_refused(self) -> None:
        for words in (["all", "--cases", "x"], ["b", "--cases", "x"], ["c"]):
            with self.assertRaises(SystemExit):
                self.ran(*words)

    def test_all_modes_are_those_that_are_not_set_apart(self) -> None:
        parser = common.parser("", "")
        common.selections(parser, ["a"], ["m", "changing"], ["changing"], modes=["m"])
        for words, expected in (([], ["m"]), (["--modes", "all"], ["m"]), (["--modes", "changing"], ["changing"])):
            self.assertEqual(parser.parse_args(words).modes, expected)
