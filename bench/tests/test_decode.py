from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import common
import decode
import peers


class FakeCrew:
    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []

    def measure(self, seconds: float, orders: dict[str, Any], lead: float = 0.5) -> dict[str, Any]:
        self.orders.append(orders)
        answer = {"latencies_ms": [1.0, 2.0], "calls": 8, "seconds": seconds}
        return {name: {"server": answer, "training": answer} if name == "pair" else answer for name in orders}


class Decode(unittest.TestCase):
    def test_every_mode_has_a_stage_and_the_same_orders(self) -> None:
        for name in decode.MODES:
            self.assertIsInstance(peers.mode(peers.stages([name], [name])[name], Path(".")), common.Mode, name)
            crew: Any = FakeCrew()
            made = decode.measure(crew, "eager", name, 3, 2.0)
            orders = crew.orders[0].get("pair", crew.orders[0])
            self.assertEqual(orders["server"], {"op": "tokens", "kind": "eager", "seed": 3}, name)
            self.assertEqual(made["rates"]["token_rate"], 4.0, name)

    def test_streams_are_one_process_with_the_same_training(self) -> None:
        apart = decode.programs_of("eager", "mps", ["eager"], 16)
        one = decode.programs_of("eager", "green", ["eager"], 16)
        self.assertEqual([*one], ["pair"])
        self.assertEqual(one["pair"][0][1:5], apart["training"][0][1:])
        self.assertIn("--green", one["pair"][0])

    def test_streams_without_priorities_are_refused_by_name(self) -> None:
        with self.assertRaisesRegex(common.BenchError, "batching makes its streams itself"):
            decode.programs_of("batching", "streams", ["batching"], 16)


class XSched(unittest.TestCase):
    def setUp(self) -> None:
        self.mode = peers.XSched("xsched", Path("."), 3)
        program = "import sys; print(flush=True); sys.stdin.read()"
        self.program = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"BENCH_PROGRAM": "xsched/server"}
        )
        self.addCleanup(self.program.communicate)
        # Before it runs, its environment cannot be read.
        assert self.program.stdout is not None
        self.program.stdout.readline()

    def check(self, level: int) -> None:
        answer = mock.MagicMock()
        answer.__enter__.return_value.read.return_value = json.dumps({"xqueues": [{"pid": self.program.pid, "level": level}]})
        with mock.patch("urllib.request.urlopen", return_value=answer), mock.patch("time.monotonic", side_effect=[0.0, 10.0]):
            self.mode.check(["server"])

    def test_program_without_queues_of_the_level_is_refused(self) -> None:
        self.check(3)
        with self.assertRaisesRegex(common.BenchError, r"server: \[1\]"):
            self.check(1)

    def test_levels_share_one_server(self) -> None:
        with tempfile.TemporaryDirectory() as root:
            server = Path(root, "bin", "xserver")
            server.parent.mkdir()
            server.touch()
            settings = {"XSCHED": root, "XSCHED_CUDA_LIB": "/libcuda.so.1"}
            with mock.patch.dict("os.environ", settings), mock.patch("subprocess.Popen") as started, mock.patch("common.end") as ended:
                first, second = peers.XSched("xsched", Path(root), 3), peers.XSched("xsched-1", Path(root), 1)
                with first, second:
                    self.assertIn("XSCHED_AUTO_XQUEUE_LEVEL=1", second.command(["x"], "be", "batch"))
                    self.assertIn("BENCH_STREAM=1", second.command(["x"], "be", "batch"))
                self.assertEqual((started.call_count, ended.call_count), (1, 1))
