"""Tests of `gpumux.torch` with a stand-in for PyTorch, which takes and frees segments as PyTorch does: by the addresses of two functions."""

import ctypes
import importlib
import subprocess
import sys
import unittest
import warnings
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)

from gpumux import kv  # noqa: E402

MIB = 1 << 20


class Range:
    """Stands in for an elastic range of gpumux's."""

    made: list = []

    def __init__(self, device: int, size: int, granule: int) -> None:
        Range.made.append(self)
        self.device, self.closed = device, False

    def close(self) -> None:
        self.closed = True


FREED: list = []


@ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
def segment(size: int, device: int, _stream: object) -> int:
    return size << 8 | device


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
def range_free(address: int) -> int:
    FREED.append(address)
    return 0


def loaded(**of_cuda: object) -> tuple[ModuleType, mock.MagicMock]:
    """`gpumux.torch` and the stand-in for what it imports."""
    torch = mock.MagicMock(__version__="2.9.0")
    torch.cuda.current_device.return_value = 1
    torch._C._cuda_customAllocator = lambda give, free: (give, free)
    torch.cuda.MemPool = lambda allocator=None: allocator
    torch.cuda.configure_mock(**of_cuda)
    with mock.patch.dict(sys.modules, {"torch": torch}):
        sys.modules.pop("gpumux.torch", None)
        return importlib.import_module("gpumux.torch"), torch


class Pools(unittest.TestCase):
    def setUp(self) -> None:
        Range.made.clear()
        FREED.clear()
        for name, value in (("_Elastic", Range), ("_segment", segment), ("_range_free", range_free)):
            patch = mock.patch.object(kv, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.module, self.torch = loaded()

    def test_segments_are_taken_and_freed_by_the_library_s_own_functions(self) -> None:
        give, free = self.module.mem_pool()
        taking = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(give)
        freeing = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(free)
        self.assertEqual(taking(20 * MIB, 3, None), 20 * MIB << 8 | 3)
        freeing(5 << 40, 20 * MIB, 3, None)
        self.assertEqual(FREED, [5 << 40])

    def test_older_library_is_named(self) -> None:
        with mock.patch.object(kv, "_segment", None), self.assertRaisesRegex(kv.PoolError, "library is older"):
            self.module.mem_pool(fallback=False)

    def test_range_that_shows_whether_it_works_is_freed(self) -> None:
        self.module.mem_pool()
        self.assertEqual([(it.device, it.closed) for it in Range.made], [(1, True)])

    def test_pools_have_one_allocator(self) -> None:
        self.assertIs(self.module.mem_pool(), self.module.mem_pool())

    def test_pool_without_the_library_has_pytorch_s_memory(self) -> None:
        with mock.patch.object(kv, "_Elastic", side_effect=kv._NotElastic("no library")):
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                self.assertIsNone(self.module.mem_pool())
            self.assertEqual(given[0].filename, __file__)
            self.assertIn("PyTorch's own memory: no library", str(given[0].message))
            with self.assertRaisesRegex(kv.PoolError, "no library"):
                self.module.mem_pool(fallback=False)

    def test_full_device_is_an_error(self) -> None:
        with mock.patch.object(kv, "_Elastic", side_effect=kv.PoolError("no room")), self.assertRaisesRegex(kv.PoolError, "no room"):
            self.module.mem_pool()

    def test_no_gpu_is_an_error_that_names_the_way_out(self) -> None:
        module, _torch = loaded(is_available=lambda: False)
        with self.assertRaisesRegex(kv.PoolError, "no GPU.*gpumux.kv.Pool"):
            module.mem_pool()

    def test_pytorch_without_pools_is_named(self) -> None:
        module, torch = loaded()
        del torch.cuda.MemPool
        with self.assertRaisesRegex(kv.PoolError, "PyTorch 2.9.0 has no torch.cuda.MemPool: use 2.5"):
            module.mem_pool()

    def test_import_without_pytorch_says_what_is_missing(self) -> None:
        with mock.patch.dict(sys.modules, {"torch": None}):
            sys.modules.pop("gpumux.torch", None)
            with self.assertRaisesRegex(ImportError, "gpumux.torch is for programs that have PyTorch"):
                importlib.import_module("gpumux.torch")
        for module, said in (
            ("gpumux.vllm", "gpumux.vllm is for programs that have PyTorch and vLLM"),
            ("gpumux.transformers", "gpumux.transformers is for programs that have PyTorch and transformers"),
            ("gpumux.compat.kvcached", "gpumux.compat.kvcached is for programs that have PyTorch"),
        ):
            program = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(ROOT)!r}); import {module}"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            self.assertIn(f"ImportError: {said}: ", done.stderr)


if __name__ == "__main__":
    unittest.main()
