#!/usr/bin/env python3
"""Runs kvcached's own tests with gpumux's memory in the place of its native module, also in processes that they start, each file in a process of its own.

python3 tools/kvcached_tests.py KVCACHED [FILE...]                  # those that need no GPU
gpumux run -- python3 tools/kvcached_tests.py KVCACHED [FILE...]    # all

KVCACHED is a tree of kvcached's, such as its unpacked source distribution. Its tests need pytest and PyTorch; some need vLLM or SGLang. Where these or a
GPU are missing, a file fails or is skipped: the last column has pytest's words for it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent / "python"
LONGEST_S = 600
CHILD = """
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "kvcached.vmm_ops":
            sys.meta_path.remove(Finder)
            import gpumux.compat.kvcached
            return importlib.util.find_spec(name)
sys.meta_path.insert(0, Finder)
import site
site.addsitedir({tree!r})
"""
"""`sitecustomize` of each Python: one that imports kvcached's module has gpumux's. Engines are patched as where kvcached is installed."""


def last(text: str) -> str:
    """What pytest counts."""
    lines = [it.strip("= ") for it in text.splitlines() if re.search(r"\bin \d+(\.\d+)?s", it)]
    return lines[-1] if lines else (text.strip().splitlines() or ["no output"])[-1]


def is_script(file: Path) -> bool:
    """Whether pytest would find no test in it, or not give the tests what they take."""
    top = ast.parse(file.read_text(encoding="utf-8")).body
    tests = [node for node in ast.walk(ast.Module(top, [])) if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    guarded = any(isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in top)
    if not tests:
        return not guarded
    imported = {it.name for node in top if isinstance(node, ast.Import) for it in node.names}
    imported |= {node.module for node in top if isinstance(node, ast.ImportFrom) and node.module}
    takes = any(it in top and it.args.args for it in tests)
    return takes and "pytest" not in imported and guarded


def run(tree: Path, file: Path) -> tuple[int, str]:
    """The code of pytest or of a script, and its last line."""
    script = is_script(file)
    command = [str(file)] if script else ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    command = [sys.executable, "-m", "gpumux.compat.kvcached", *command]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(CHILD.format(tree=str(tree)), encoding="utf-8")
        path = os.pathsep.join([folder, str(tree), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            return 1, f"not done after {LONGEST_S} s"
    # A script may print an error and go on.
    if script and ended.returncode == 0 and "Traceback (most recent call last)" in ended.stderr:
        return 1, last(ended.stderr)
    return ended.returncode, last(ended.stdout + ended.stderr if ended.returncode not in (0, 5) else ended.stdout)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    tree = Path(arguments[0]).resolve()
    files = [tree / "tests" / it for it in arguments[1:]] or sorted(tree.glob("tests/test_*.py"))
    if not files or not (tree / "kvcached").is_dir():
        sys.exit(f"{tree} is no tree of kvcached's: it has no kvcached/ and tests/test_*.py")
    bad = 0
    for file in files:
        code, words = run(tree, file)
        # 5: pytest has found no test.
        bad += code not in (0, 5)
        print(f"{'ok' if code in (0, 5) else 'FAILED':<6} {file.name:<44} {words}", flush=True)
    print(f"{len(files) - bad} passed, {bad} failed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
