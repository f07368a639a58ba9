"""Tests of what a program says to the library, which stands in for itself by functions of C's types."""

import ctypes
import io
import os
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

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


class Lock:
    """Counts the threads that want it."""

    def __init__(self) -> None:
        self.lock, self.tries = threading.RLock(), 0

    def __enter__(self) -> None:
        self.tries += 1
        self.lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self.lock.release()


class Reclaimers(unittest.TestCase):
    def setUp(self) -> None:
        self.registered: "list[Any]" = []
        self.answer = 0

        def register(function: Any, _user: Any) -> int:
            if not self.answer:
                self.registered.append(function)
            return self.answer

        self.error = io.StringIO()
        for patch in (
            mock.patch.object(gpumux, "_on_reclaim", register), mock.patch.object(gpumux, "_reclaimers", []), mock.patch.object(gpumux, "_serving", 0),
            mock.patch("atexit.register"), mock.patch("sys.stderr", self.error),
        ):  # fmt: skip
            patch.start()
            self.addCleanup(patch.stop)

    def missing(self, count: int) -> int:
        """What the library receives, which calls each function that it has while something is missing."""
        freed = 0
        for it in self.registered:
            if freed < count:
                freed += ctypes.CFUNCTYPE(U64, INT, U64, ctypes.c_void_p)(it.value)(0, count - freed, None)
        return freed

    def test_wrong_answer_of_one_is_none_of_the_others(self) -> None:
        def leave(_device: int, _missing: int) -> int:
            sys.exit(3)

        for function in (lambda *_: -1, lambda *_: None, leave, lambda _device, missing: missing // 2):
            self.assertTrue(gpumux.on_reclaim(function))
        self.assertEqual(self.missing(8), 4)
        self.assertIn("giving memory back failed: SystemExit(3)", self.error.getvalue())
        self.assertTrue(gpumux.on_reclaim(lambda *_: 1 << 70))
        self.assertEqual(self.missing(8), (1 << 64) - 1)

    def test_threads_register_one_function_with_the_library(self) -> None:
        from test_kv import reached

        lock, register, answers = Lock(), gpumux._on_reclaim, list[bool]()
        second = threading.Thread(target=lambda: answers.append(gpumux.on_reclaim(print)), daemon=True)

        def late(function: Any, user: Any) -> int:
            if not second.ident:
                second.start()
                reached(lambda: lock.tries == 2 or bool(self.registered))
            return register(function, user)

        with mock.patch.object(gpumux, "_on_reclaim", late), mock.patch.object(gpumux, "_locks", {os.getpid(): lock}, create=True):
            answers.append(gpumux.on_reclaim(print))
            second.join(20)
        self.assertEqual((len(self.registered), answers, len(gpumux._reclaimers)), (1, [True, True], 2))

    def test_forked_child_waits_for_no_thread_of_the_parent(self) -> None:
        program = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(gpumux.__file__).parents[1])!r})
import gpumux
within, ends = threading.Event(), threading.Event()
own = os.getpid()
def register(_function, _user):
    if os.getpid() != own:
        return -1
    within.set()
    ends.wait(20)
    return 0
gpumux._on_reclaim = register
thread = threading.Thread(target=gpumux.on_reclaim, args=(print,))
thread.start()
within.wait(20)
child = os.fork()
if not child:
    signal.alarm(10)
    print(gpumux.on_reclaim(print), flush=True)
    os._exit(0)
status = os.waitpid(child, 0)[1]
ends.set()
thread.join()
print(status, gpumux.on_reclaim(print))
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout, "False\n0 True\n", done.stderr)

    def test_functions_are_called_until_enough_is_free(self) -> None:
        calls: "list[tuple[int, int]]" = []
        for freed in (3, 5, 7):
            gpumux.on_reclaim(lambda device, missing, freed=freed: calls.append((device, missing)) or freed)
        self.assertEqual((self.missing(8), calls), (8, [(0, 8), (0, 5)]))

    def test_refused_function_is_never_called(self) -> None:
        self.answer = -1
        self.assertFalse(gpumux.on_reclaim(lambda *_: 8))
        self.answer = 0
        self.assertTrue(gpumux.on_reclaim(lambda *_: 1))
        self.assertEqual(self.missing(8), 1)

    def test_pools_that_are_closed_leave_room_for_others(self) -> None:
        from test_kv import MIB, made

        calls: "list[int]" = []
        for number in range(100):
            with made(4 * MIB, MIB, granule_bytes=2 * MIB) as pool:
                self.assertTrue(pool.on_reclaim(lambda _missing, number=number: calls.append(number)))
                self.assertEqual(len(self.registered), 1)
                self.missing(8)
        self.missing(8)
        self.assertEqual((calls, gpumux._reclaimers), ([*range(100)], []))
        with made(4 * MIB, MIB) as last:
            self.assertTrue(last.on_reclaim(print))
            gpumux._serve_no_more()
        with self.assertRaisesRegex(ValueError, "closed"):
            pool.on_reclaim(print)

    def test_objects_of_the_program_end_with_it(self) -> None:
        program = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(gpumux.__file__).parents[1])!r})
import gpumux
class Open:
    def __del__(self):
        print("closed")
gpumux._on_reclaim = lambda function, _user: print("registered" if function else "ended") or 0
gpumux.on_reclaim(lambda *_: 0)
it = Open()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout, "registered\nended\nclosed\n", done.stderr)

    def test_what_is_no_function_is_refused(self) -> None:
        from test_kv import MIB, made

        for function in (gpumux.on_reclaim, made(4 * MIB, MIB).on_reclaim):
            with self.assertRaisesRegex(TypeError, "takes a function, not None"):
                function(None)


if __name__ == "__main__":
    unittest.main()
