#!/usr/bin/env python3
"""Checks the words of the project: README, docs, help texts, errors, logs, comments, names of tests and of code.

- `tools/words/banned.txt` has words that do not come back, each with what to write instead. `docs/glossary.md` has the terms.
- `tools/words/left.txt` counts what is left in texts that are not mended yet. A count may only fall: `--update` writes smaller ones.
- In the book a sentence has at most 25 words. `tools/words/left.txt` counts the longer ones, too.
- `codespell`, where it is installed, checks spelling.

`--list PATH...` prints every finding in these files. Needs only Python and git.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tools/words"
KINDS = {".md", ".rs", ".py", ".toml", ".sh", ".html", ".yaml", ".yml", ".tpl", ".h", ".service", ".cu", ".c", ".txt", ".css", ".js"}
# Made by programs out of texts that are checked, texts of others, and the lists of this check.
SKIPPED = re.compile(
    r"^(docs/commands\.md|docs/emulated-functions\.md|LICENSE|tools/words|tools/(test_)?words\.py|bench/results/|bench/corpus/|tests/cuda/"
    r"|.*/proptest-regressions/|crates/gpumux-cuda/src/entry_points\.txt|crates/gpumux-dra/proto/|.*/snapshots/)"
)
LONGEST = 25
# Not prose: code, links' targets, sources of numbers, tables, headings.
HIDDEN = re.compile(r"^```.*?^```|<!-- (\w+):begin -->.*?<!-- \1:end -->|<!--.*?-->", re.DOTALL | re.MULTILINE)


def files() -> list[str]:
    """All files with text that people write."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = (it for it in listed.splitlines() if (ROOT / it).is_file() and not SKIPPED.match(it))
    return sorted(it for it in found if Path(it).suffix in KINDS or it == ".ci/run")


def area(path: str) -> str:
    """What is counted together: a crate, the benchmarks, or a single file. So code may move within its crate."""
    parts = path.split("/")
    if parts[0] == "crates":
        return "/".join(parts[:2])
    return parts[0] if len(parts) > 1 and parts[0] != "docs" else path


def banned() -> list[tuple[re.Pattern[str], str, str]]:
    """Pattern, what to write instead, and the kind of file (or `*`) of every line."""
    found = []
    for line in (FOLDER / "banned.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            kind, pattern, instead = (it.strip() for it in line.split("\t"))
            found.append((re.compile(pattern), instead, kind))
    return found


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs and list items of a page, with their lines."""
    text = HIDDEN.sub(lambda it: "\n" * it[0].count("\n"), text)
    at, lines = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        begins = re.match(r"\s*([-*]|\d+\.) |\s*[|]|#", line)
        if lines and (begins or not line.strip()):
            yield at, " ".join(lines)
            lines = []
        if line.strip() and not line.strip().startswith("|") and not line.startswith("#"):
            at = at if lines else number
            lines.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line.strip()))


def words(sentence: str) -> int:
    """How many words a sentence has; code counts as one."""
    sentence = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", sentence))
    return len([it for it in sentence.split() if re.search(r"\w", it)])


def findings(path: str, rules: list[tuple[re.Pattern[str], str, str]]) -> Iterator[tuple[int, str]]:
    """What is wrong in a file, with its lines."""
    text = (ROOT / path).read_text(errors="replace")
    kind = Path(path).suffix.removeprefix(".")
    # Sources of numbers and names of code are no prose: names are checked where they are defined.
    shown = re.sub(r"<!--.*?-->|`[^`\n]*`", "", HIDDEN.sub(lambda it: "\n" * it[0].count("\n"), text)) if kind == "md" else text
    for number, line in enumerate(shown.splitlines(), 1):
        # Names are words, too: `who_waits`.
        plain = line.replace("_", " ")
        for pattern, instead, of in rules:
            if of in ("*", kind):
                for match in pattern.finditer(plain):
                    yield number, f"`{match[0].strip()}`: {instead}"
    if path == "README.md" or path.startswith("docs/"):
        for number, paragraph in prose(text):
            for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`*“\[])|(?<=[:;])\s+|(?<=[.:?!]\*)\s+|(?<=[.:?!]\*\*)\s+", paragraph):
                if (count := words(sentence)) > LONGEST:
                    yield number, f"{count} words in a sentence, at most {LONGEST}: {sentence[:60]}…"


def spelling(paths: list[str]) -> int:
    """Codespell's exit status; 0 where it is not installed."""
    if not importlib.util.find_spec("codespell_lib"):
        print("SKIPPED: spelling, since codespell is not installed (`pip install codespell`)")
        return 0
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words", str(FOLDER / "spelling.txt"), *paths]
    return subprocess.run(command, cwd=ROOT).returncode


def main() -> int:
    """Compares the findings with what may be left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write smaller counts to tools/words/left.txt")
    parser.add_argument("--list", nargs="+", metavar="PATH", help="print all findings below these paths")
    options = parser.parse_args()
    rules, paths = banned(), files()
    if options.list:
        for path in paths:
            if path.startswith(tuple(options.list)):
                for number, text in sorted(findings(path, rules)):
                    print(f"{path}:{number}: {text}")
        return 0
    counts, found = collections.Counter[str](), collections.defaultdict[str, list[str]](list)
    for path in paths:
        for number, text in findings(path, rules):
            counts[area(path)] += 1
            found[area(path)].append(f"{path}:{number}: {text}")
    lines = (line.split() for line in (FOLDER / "left.txt").read_text().splitlines() if not line.startswith("#"))
    left = {name: int(count) for count, name in lines}
    if options.update:
        kept = {name: min(count, left.get(name, 0)) for name, count in sorted(counts.items())}
        head = "# Findings that are left, by crate or file. A count may only fall; `python3 tools/words.py --update` writes smaller ones.\n"
        (FOLDER / "left.txt").write_text(head + "".join(f"{count} {name}\n" for name, count in kept.items() if count))
        left = kept
    failed = False
    for name, count in counts.items():
        if count > left.get(name, 0):
            failed = True
            print(f"{name}: {count} findings, {left.get(name, 0)} may be left; `tools/words.py --list {name}` shows all", file=sys.stderr)
            if not left.get(name):
                print("\n".join(found[name]), file=sys.stderr)
    return int(bool(spelling(paths)) or failed)


if __name__ == "__main__":
    sys.exit(main())
