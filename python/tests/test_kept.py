"""Tests of `gpumux.kept` that need neither a device nor the library."""

import contextlib
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_kv import Driver  # noqa: E402

from gpumux import kept  # noqa: E402


class Library:
    """Stands in for the library, whose buffer has the contents of a commit or none."""

    def __init__(self, answer: int, step: int = 0) -> None:
        self.answer, self.step, self.commits, self.ended = answer, step, [], []  # type: ignore[var-annotated]
        self.driver, self.devices = Driver(0), []  # type: ignore[var-annotated]

    def keep(self, _name: bytes, _device: int, _bytes: int, address: Any, step: Any) -> int:
        self.devices.append(self.driver.device())
        address._obj.value, step._obj.value = 1 << 31, self.step
        return self.answer

    def commit(self, address: int, step: int, stream: int) -> int:
        self.commits.append((address, step, stream))
        return 0

    def end(self, address: int) -> int:
        self.ended.append(address)
        return 0


class Buffers(unittest.TestCase):
    def with_library(self, library: "Library | None") -> None:
        functions = (library.keep, library.commit, library.end) if library else (None, None, None)
        for name, function in zip(("_keep", "_commit", "_end"), functions):
            patch = mock.patch.object(kept, name, function)
            patch.start()
            self.addCleanup(patch.stop)
        self.driver = Driver(2, 0)
        patch = mock.patch.object(kept.kv.ctypes, "CDLL", return_value=self.driver)
        patch.start()
        self.addCleanup(patch.stop)
        if library:
            library.driver = self.driver

    def test_buffer_has_what_was_committed(self) -> None:
        library = Library(kept._FOUND, step=1 << 40)
        self.with_library(library)
        buffer = kept.Buffer("a", 100)
        self.assertEqual((buffer.kind, buffer.found, buffer.step, buffer.address), ("kept", True, 1 << 40, 1 << 31))
        buffer.commit(7, 9)
        self.assertEqual((library.commits, buffer.step), ([(1 << 31, 7, 9)], 7))
        buffer.end()
        self.assertEqual(library.ended, [1 << 31])
        with self.assertRaisesRegex(ValueError, "has ended"):
            buffer.commit(8)

    def test_ordinary_memory_takes_its_place_where_nothing_keeps_it(self) -> None:
        for library in (None, Library(kept._NOT_KEPT), Library(-3)):
            self.with_library(library)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                buffer = kept.Buffer("a", 100)
            self.assertEqual((buffer.kind, buffer.found, buffer.address), ("device", False, 1 << 30))
            self.assertIn("not kept over a fault", str(warned[0].message))
            buffer.commit(3)
            buffer.end()
            calls = ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuStreamSynchronize", "cuMemFree_v2"]
            self.assertEqual(self.driver.calls, [(name, 0) for name in calls])
            with self.assertRaises(kept.KeptError):
                kept.Buffer("a", 100, fallback=False)

    def test_ordinary_memory_that_cannot_be_freed_is_an_error_of_its_own(self) -> None:
        self.with_library(None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            buffer = kept.Buffer("a", 100)
        self.driver.failing["cuMemFree_v2"] = 201
        with self.assertRaisesRegex(kept.KeptError, "'a' cannot be freed: cuMemFree_v2 answers CUDA_ERROR_INVALID_CONTEXT"):
            buffer.end()

    def test_buffer_on_another_device_changes_no_current_device(self) -> None:
        for library in (None, Library(kept._DONE), Library(2)):
            self.with_library(library)
            with warnings.catch_warnings(), contextlib.suppress(kept.KeptError):
                warnings.simplefilter("ignore")
                kept.Buffer("a", 100, device=1).end()
            self.assertEqual(self.driver.device(), 0)
            self.assertEqual({device for _name, device in self.driver.calls}, set() if library else {1})
            if library:
                self.assertEqual(library.devices, [1])

    def test_buffer_that_is_in_use_or_too_large_is_an_error(self) -> None:
        for answer, why in ((1, "another process"), (2, "limit"), (-1, "once"), (-4, "refuses")):
            self.with_library(Library(answer))
            with self.assertRaisesRegex(kept.KeptError, why):
                kept.Buffer("a", 100)
        with self.assertRaises(ValueError):
            kept.Buffer("a", 0)

    def test_wrong_sizes_and_steps_are_refused(self) -> None:
        library = Library(kept._DONE)
        self.with_library(library)
        with self.assertRaises(TypeError):
            kept.Buffer("a", 64e6)
        # The library would take the lower 64 bits, or a name up to its first zero.
        for name, size, device, why in (
            ("a", (1 << 64) + 64, 0, "nbytes is a whole number from"), ("a", (1 << 44) + 1, 0, "nbytes is a whole number from 1 to 17592186044416, not"), ("a", 64, "cuda:0", "device is a whole number, not 'cuda:0'"),
            ("a", 64, 1 << 32, "device is a whole number from"), ("a\0b", 64, 0, "128 bytes of UTF-8 and no zero, not 'a.x00b'"),
            ("", 64, 0, "not ''"), ("ü" * 65, 64, 0, "not 'üü"), (None, 64, 0, "not None"), (b"a", 64, 0, "not b'a'"), ("\udc80", 64, 0, "not '"),
        ):  # fmt: skip
            with self.assertRaisesRegex((TypeError, ValueError), why):
                kept.Buffer(name, size, device=device)
        self.assertEqual(library.devices, [])
        buffer = kept.Buffer("a", 64)
        for stream in (-1, 1 << 64, 1.5, object()):
            with self.assertRaisesRegex((TypeError, ValueError), "stream is a whole number"):
                buffer.commit(1, stream)
        for step, error in ((-1, ValueError), (1 << 64, ValueError), (1.5, TypeError)):
            with self.assertRaises(error):
                buffer.commit(step)
        self.assertEqual((library.commits, buffer.step), ([], 0))

    def test_failure_of_the_driver_is_an_error_of_the_buffer(self) -> None:
        self.with_library(None)
        no_driver = mock.patch.object(kept.kv, "_Driver", side_effect=kept.kv.PoolError("there is no CUDA driver"))
        no_room, not_set, not_done = (
            mock.patch.dict(self.driver.failing, {name: 2}) for name in ("cuMemAlloc_v2", "cuMemsetD8_v2", "cuStreamSynchronize")
        )
        for failure, why in (
            (no_driver, "64 bytes named 'a' on device 0: there is no"),
            (no_room, "cuMemAlloc_v2 .*OUT_OF_MEMORY"),
            (not_set, "cuMemsetD8_v2"),
            (not_done, "cuStreamSynchronize"),
        ):
            with failure, self.assertRaisesRegex(kept.KeptError, why):
                kept.Buffer("a", 64)

    def test_tensors_lie_in_their_buffer(self) -> None:
        self.with_library(Library(kept._DONE))
        buffer = kept.Buffer("a", 1024)
        tensor = buffer.tensor((2, 4), "float32", 512)
        self.assertEqual((tensor.__dlpack_device__(), tensor.offset), ((2, 0), 512))
        self.assertEqual(buffer.tensor(dtype="int32").shape, (256,))
        for shape, offset in (((257,), 0), ((1,), 1024), ((-1,), 0), ((1,), -4), ((1,), 2), (None, 1022)):
            with self.assertRaises(ValueError):
                buffer.tensor(shape, "float32", offset)
        for shape, offset, why in (((1.0,), 0, "length"), ((1,), 0.0, "offset"), ((1,), None, "offset")):
            with self.assertRaisesRegex(TypeError, f"{why} is a whole number"):
                buffer.tensor(shape, "float32", offset)

    def test_tensors_are_handed_out_with_their_contents(self) -> None:
        self.with_library(Library(kept._DONE))
        torch, original = mock.MagicMock(), mock.MagicMock()
        original.device.type, original.device.index = "cuda", 0
        original.numel.return_value, original.element_size.return_value = 4, 2
        with mock.patch.dict(sys.modules, {"torch": torch}):
            # As `model.parameters()` is: once.
            buffer = kept.tensors("a", iter([original, original]))
        self.assertEqual((buffer.nbytes, original.numel.call_count > 2), (1024, True))
        calls = [name for name, _arguments, _options in torch.mock_calls]
        *_, copy = (it for it, name in enumerate(calls) if name.endswith(".copy_"))
        self.assertIn("cuda.current_stream().synchronize", calls[copy:])

    def test_no_tensors_are_an_error(self) -> None:
        with mock.patch.dict(sys.modules, {"torch": mock.MagicMock()}), self.assertRaisesRegex(ValueError, "not of none$"):
            kept.tensors("a", iter([]))

    def test_error_names_the_devices_of_tensors_elsewhere(self) -> None:
        class Device(str):
            type, index = "cpu", None

        for names in (["cpu"], ["cpu", "cuda:1"]):
            tensors = [mock.Mock(device=Device(name)) for name in names]
            with mock.patch.dict(sys.modules, {"torch": mock.MagicMock()}), self.assertRaisesRegex(ValueError, f"CUDA device, not of {', '.join(names)}$"):
                kept.tensors("a", tensors)

    def test_layout_aligns_tensors(self) -> None:
        self.assertEqual(kept.layout([4, 512, 513, 0]), ([0, 512, 1024, 2048], 2048))


if __name__ == "__main__":
    unittest.main()
