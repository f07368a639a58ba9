#!/usr/bin/env python3
"""Tests of kvcached_tests.py with a tree that has what is used of kvcached's."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kvcached_tests  # noqa: E402

SCRIPT = """
import subprocess, sys
import kvcached.vmm_ops
def test_it(tensors):
    print("Results: 1 passed in 1 s")
if __name__ == "__main__":
    child = "import kvcached.vmm_ops; print(kvcached.vmm_ops.__file__)"
    found = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert found.stdout.strip() == kvcached.vmm_ops.__file__, found.stderr
    assert kvcached.vmm_ops.__file__.endswith("_vmm_ops.py")
    test_it(0)
"""


class Files(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree = Path(folder.name)
        (self.tree / "kvcached").mkdir()
        (self.tree / "kvcached" / "__init__.py").write_text("")
        (self.tree / "kvcached" / "manager.py").write_text("from kvcached.vmm_ops import PageAllocator\n")
        (self.tree / "torch.py").write_text("")

    def file(self, text: str = SCRIPT) -> Path:
        file = self.tree / "test_it.py"
        file.write_text(text)
        return file

    def test_script_runs_and_its_processes_have_gpumux_s_module(self) -> None:
        self.assertEqual(kvcached_tests.run(self.tree, self.file()), (0, "Results: 1 passed in 1 s"))

    def test_script_that_fails_is_reported(self) -> None:
        code, words = kvcached_tests.run(self.tree, self.file(SCRIPT.replace("test_it(0)", "sys.exit('no page')")))
        self.assertEqual((code, words), (1, "no page"))

    def test_file_without_functions_is_a_script_whose_error_counts(self) -> None:
        self.assertEqual(kvcached_tests.run(self.tree, self.file("print('all passed')")), (0, "all passed"))
        bad = "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\n"
        self.assertEqual(kvcached_tests.run(self.tree, self.file(bad)), (1, "ZeroDivisionError: division by zero"))

    def test_engines_are_patched_as_where_kvcached_is_installed(self) -> None:
        (self.tree / "patch.pth").write_text("import sys; sys.patched = True\n")
        self.assertEqual(kvcached_tests.run(self.tree, self.file("import sys\nprint(sys.patched)")), (0, "True"))

    def test_only_tests_whose_arguments_the_file_gives_are_scripts(self) -> None:
        self.assertTrue(kvcached_tests.is_script(self.file()))
        for text in (
            SCRIPT.replace("(tensors)", "()"),
            SCRIPT.replace("import kvcached.vmm_ops\n", "import kvcached.vmm_ops, pytest\n", 1),
            SCRIPT.replace("import kvcached.vmm_ops\n", "from pytest import fixture\n", 1),
            SCRIPT.partition("if __name__")[0],
            SCRIPT.replace("test_it", "check"),
        ):
            self.assertFalse(kvcached_tests.is_script(self.file(text)))


if __name__ == "__main__":
    unittest.main()
