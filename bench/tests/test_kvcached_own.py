"""Tests of how kvcached's own benchmarks are read; no GPU needed."""

import contextlib
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import kvcached_own
from common import BenchError

ALLOC = "     k    iters     us/alloc+free\n     1    50000            12.34\n     4    50000            45.60\n"
FRAG = "kept=1024 blocks of 16384 allocated, page=2MB, block=16384B\n\n stride   kept   held GB  pinned GB   waste\n      1   1024      0.50       0.50    1.0x\n     16   1024      0.50       8.00   16.0x\n"
MAP = """
========== Serial case (1 proc maps N pages) ==========
| Metric          | ms          |
| mean wall       |      52.083 |
| p95 wall        |      56.886 |

========== Parallel case (4 procs map N/P each) ==========
| mean wall       |      26.650 |
"""


class Tables(unittest.TestCase):
    def test_tables_are_read(self) -> None:
        self.assertEqual(kvcached_own.found("alloc", ALLOC), {"alloc_free_1_us": 12.34, "alloc_free_4_us": 45.6})
        self.assertEqual(kvcached_own.found("frag", FRAG), {"held_1_gb": 0.5, "held_16_gb": 8.0})
        self.assertEqual(kvcached_own.found("map", MAP), {"serial_ms": 52.083, "parallel_ms": 26.65})

    def test_nothing_printed_is_an_error(self) -> None:
        for case in kvcached_own.SCRIPTS:
            with self.assertRaises(BenchError):
                kvcached_own.found(case, "an error\n")

    def test_argument_of_another_version_is_renamed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tree, made = Path(folder, "tree"), Path(folder, "made")
            script, interfaces = tree / "benchmarks" / kvcached_own.SCRIPTS["alloc"][0], tree / "kvcached/integration/vllm/interfaces.py"
            with self.assertRaises(BenchError):
                kvcached_own.adapted(tree, "alloc", made)
            for path in (script.parent, interfaces.parent, made):
                path.mkdir(parents=True)
            script.write_text("init_kvcached(tp_rank=0, tp_size=2)")
            for names, asked in (("world_size: int = 1", "world_size=2"), ("tp_size: int = 1", "tp_size=2")):
                interfaces.write_text(names)
                self.assertIn(asked, kvcached_own.adapted(tree, "alloc", made).read_text())

    def test_mode_that_fails_is_left_out_and_the_other_goes_on(self) -> None:
        results, calls = mock.MagicMock(), list[str]()
        results.cell = lambda _what: contextlib.suppress(BenchError)

        def measure(mode: str, *_: object) -> dict[str, float]:
            calls.append(mode)
            if mode == "kvcached":
                raise BenchError("ended with -11")
            return {"serial_ms": 2.0 * calls.count(mode)}

        options = SimpleNamespace(modes=kvcached_own.MODES, rounds=2, quick=False)
        with mock.patch.object(kvcached_own, "measure", measure), mock.patch.object(kvcached_own.engines, "mode_of", lambda name, _logs: contextlib.nullcontext(name)):
            kvcached_own.compare(results, "map", Path(), Path(), mock.Mock(), options)  # type: ignore[arg-type]
        self.assertEqual((calls.count("kvcached"), calls.count("kvcached-gpumux")), (1, 2))
        case, mode, values, _around = results.add.call_args.args
        self.assertEqual((case, mode, values), ("map", "kvcached-gpumux", {"serial_ms": 3.0, "rounds": 2}))


if __name__ == "__main__":
    unittest.main()
