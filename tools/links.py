#!/usr/bin/env python3
"""Checks the book: every relative link and anchor of all pages leads somewhere, every test that a table names exists, and the summary lists every
page once.

Needs only Python. `mdbook build docs`, where mdbook is installed, builds the book itself (`.ci/run`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors that mdBook and forges make of a page's headings."""
    found = set[str]()
    for head in re.findall(r"^#+ +(.+?) *#*$", CODE.sub("", text), re.MULTILINE):
        head = re.sub(r"\]\([^)]*\)|[`*\[\]]|<!--.*?-->", "", head).strip().lower()
        plain = re.sub(r"[^\w\- ]", "", head).replace(" ", "-")
        number = 0
        while (name := plain if not number else f"{plain}-{number}") in found:
            number += 1
        found.add(name)
    return found


def tests_named(text: str) -> set[str]:
    """The tests in the last column of a page's tables, where its head is `test`."""
    found, inside = set[str](), False
    for line in text.splitlines():
        last = line.strip().strip("|").split(" | ")[-1].strip()
        if inside and line.startswith("|"):
            found.update(re.findall(r"`(?:\w+::)*(\w+)`", last))
        inside = line.startswith("|") and (inside or last == "test")
    return found


def problems(root: Path) -> list[str]:
    """What is wrong with the pages below this folder."""
    pages = sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("bench/*.md"), *root.glob("examples/**/*.md")])
    found, texts = list[str](), {page: page.read_text() for page in pages}
    for page, text in texts.items():
        for target in LINK.findall(re.sub(r"`[^`\n]*`", "", CODE.sub("", text))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                found.append(f"{page.relative_to(root)}: {target} is not there")
            elif page.is_relative_to(root / "docs") and not file.is_relative_to(root / "docs"):
                found.append(f"{page.relative_to(root)}: {target} is outside the book: name it by its address")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
                found.append(f"{page.relative_to(root)}: {target} is no heading there")
    code = [*root.glob("crates/**/*.rs"), *root.glob("tests/**/*.rs")]
    there = {name for file in code for name in re.findall(r"\b(?:fn|mod) (\w+)", file.read_text())}
    for page, text in texts.items():
        found += [f"{page.relative_to(root)}: no test is called {name}" for name in sorted(tests_named(text) - there)]
    summary = root / "docs/SUMMARY.md"
    listed = [(summary.parent / it).resolve() for it in LINK.findall(summary.read_text())]
    found += [f"docs/SUMMARY.md lists {page.relative_to(root)} {listed.count(page)} times" for page in set(listed) if listed.count(page) > 1]
    book = {page.resolve() for page in (root / "docs").glob("**/*.md")} - {summary.resolve()}
    found += [f"docs/SUMMARY.md does not list {page.relative_to(root)}" for page in sorted(book - set(listed))]
    return found


if __name__ == "__main__":
    wrong = problems(ROOT)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    sys.exit(bool(wrong))
