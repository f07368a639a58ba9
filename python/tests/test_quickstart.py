"""Runs the program at the beginning of docs/kv.md with the installed package, without a GPU and without a daemon."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import venv
from pathlib import Path

try:
    import tomllib
except ImportError:
    raise unittest.SkipTest("the test of the page's program needs Python 3.11, which reads pyproject.toml") from None

REPOSITORY = Path(__file__).resolve().parents[2]

TORCH = '''"""Stands in for PyTorch where there is none: the part of it that the program uses."""
import ctypes

def from_dlpack(tensor):
    assert tensor.__dlpack_device__()[0] == 1, "host memory"
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    assert pointer(tensor.__dlpack__(), b"dltensor")
    return tensor
'''

AFTER = """
assert len(pages) == 8 and None not in pages, pages
assert tuple(cache.shape) == (pool.pages, 1 << 20), cache.shape
import sys
assert gpumux.__file__.startswith(sys.prefix), gpumux.__file__
print("kind:", pool.kind)
"""


def program() -> str:
    """The first block of the page that uses a pool. Without a GPU all memory of a pool is the host's, which need not have 64 GiB."""
    text = (REPOSITORY / "docs/kv.md").read_text(encoding="utf-8")
    block = next(it for it in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "gpumux.kv.Pool(" in it)
    smaller = block.replace("64 << 30", "64 << 20")
    assert smaller != block, "the page names another size"
    return smaller


class Quickstart(unittest.TestCase):
    def test_program_of_the_page_runs_with_the_installed_package(self) -> None:
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        venv.create(folder, symlinks=True)
        (installed,) = folder.glob("lib/python3*/site-packages")
        # What hatchling puts into the wheel. The library is left out: it has an effect under `gpumux run` only.
        settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
        for package in settings["targets"]["wheel"]["packages"]:
            shutil.copytree(REPOSITORY / package, installed / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
        (installed / "torch.py").write_text(TORCH, encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "GPUMUX_SOCKET")}
        # No GPU, also where there is one.
        environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [folder / "bin/python", "-I", "-c", program() + AFTER], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
        )
        self.assertEqual((done.returncode, done.stdout), (0, "kind: host\n"), done.stderr)
        self.assertIn("all 67108864 bytes of host memory are taken now, and stay: gpumux's library is not loaded", done.stderr)


if __name__ == "__main__":
    unittest.main()
