#!/usr/bin/env python3
"""Runs kvcached's own tests with gpumux's memory in the place of its native module, each file in a process of its own.

python3 tools/kvcached_tests.py KVCACHED [FILE...]                  # those that need no GPU
gpumux run -- python3 tools/kvcached_tests.py KVCACHED [FILE...]    # all

KVCACHED is a tree of kvcached's, such as its unpacked source distribution. Its tests need pytest and PyTorch; some need vLLM or SGLang. Where these or a
GPU are missing, a file fails or is skipped: the last column has pytest's words for it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent / "python"
LONGEST_S = 600


def last(text: str) -> str:
    """What pytest counts."""
    lines = [it.strip("= ") for it in text.splitlines() if re.search(r"\bin \d+(\.\d+)?s", it)]
    return lines[-1] if lines else (text.strip().splitlines() or ["no output"])[-1]


def run(tree: Path, file: Path) -> tuple[int, str]:
    """pytest's code and its last line."""
    path = os.pathsep.join([str(tree), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "gpumux.compat.kvcached", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return 1, f"not done after {LONGEST_S} s"
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
