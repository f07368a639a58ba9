"""Tests of what a program says to the library, which stands in for itself by functions of C's types."""

import ctypes
import io
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpumux  # noqa: E402

INT, UNSIGNED, U64 = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
FUNCTIONS: "dict[str, tuple[Any, ...]]" = {
    "_hint": (INT, INT, UNSIGNED), "_end": (None, U64), "_progress": (None, U64), "_advise": (INT, U64, U64, INT),
}  # fmt: skip


class Index:
    """A whole number that is not Python's, such as numpy's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Said(unittest.TestCase):
    def setUp(self) -> None:
        self.said: "list[tuple[Any, ...]]" = []

    def with_library(self, there: bool) -> None:
        for name, (result, *arguments) in FUNCTIONS.items():

            def note(*values: int, name: str = name) -> int:
                self.said.append((name, *values))
                return 0

            patch = mock.patch.object(gpumux, name, ctypes.CFUNCTYPE(result, *arguments)(note) if there else None)
            patch.start()
            self.addCleanup(patch.stop)

    def test_wrong_arguments_are_refused_and_not_made_others(self) -> None:
        wrong = {
            gpumux.hint: ((1 << 32, 0), (-(1 << 32), 0), (None, 0), ("0", 0), (0, 1.5), (0, float("nan")), (0, None)),
            gpumux.advise: ((-1, 4, 2), (1 << 64, 4, 2), (8, -1, 2), (8, (1 << 64) + 4, 2), (8, 4, 1 << 32), (None, 4, 2), (8, 4.0, 2)),
            gpumux.end: ((-1,), (1 << 64,), (None,), (1.5,)),
            gpumux.progress: ((1 << 64,), (1.5,), (None,), ("1",), (float("inf"),)),
        }
        for there in (True, False):
            self.with_library(there)
            for function, all_of in wrong.items():
                for arguments in all_of:
                    with self.subTest(function=function.__name__, arguments=arguments, library=there):
                        value = "|".join(str(it).replace("+", r"\+") for it in arguments)
                        with self.assertRaisesRegex((TypeError, ValueError), f"is a whole number.* not .*({value})"):
                            function(*arguments)
        self.assertEqual(self.said, [])

    def test_whole_numbers_of_any_kind_are_said(self) -> None:
        self.with_library(True)
        gpumux.hint(Index(1), Index(300))
        gpumux.hint(-1, 1 << 40)
        gpumux.hint(0, -5)
        gpumux.advise(Index(1 << 63), Index(4), Index(2))
        for units in (Index(7), 0, -3):
            gpumux.progress(units)
        self.assertEqual(
            self.said,
            [("_hint", 1, 300), ("_hint", -1, (1 << 31) - 1), ("_hint", 0, 0), ("_advise", 1 << 63, 4, 2), ("_progress", 7)],
        )

    def test_reclaimer_always_answers_a_number(self) -> None:
        given: "list[Any]" = []

        def kept(function: Any, _user: Any) -> int:
            given.append(function)
            return 0

        def leave(_device: int, _missing: int) -> int:
            sys.exit(3)

        error = io.StringIO()
        with mock.patch.object(gpumux, "_on_reclaim", kept), mock.patch.object(gpumux, "_reclaimers", []), mock.patch("atexit.register"):
            for function in (lambda _device, missing: missing + 1, lambda *_: 1 << 70, lambda *_: -1, lambda *_: None, leave):
                self.assertTrue(gpumux.on_reclaim(function))
            call = ctypes.CFUNCTYPE(U64, INT, U64, ctypes.c_void_p)
            with mock.patch("sys.stderr", error):
                answers = [call(it.value)(0, 5, None) for it in given]
        self.assertEqual(answers, [6, (1 << 64) - 1, 0, 0, 0])
        self.assertIn("giving memory back failed: SystemExit(3)", error.getvalue())


if __name__ == "__main__":
    unittest.main()
