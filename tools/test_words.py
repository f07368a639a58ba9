"""The checks of words and links find what they are for."""

import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import links
import words


class Words(unittest.TestCase):
    """Words that were replaced, and sentences that are too long."""

    def found(self, name: str, text: str) -> list[str]:
        """The findings in a file of this name and text."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            root, words.ROOT = words.ROOT, Path(folder)
            try:
                return [found for _, found in words.findings(name, words.banned())]
            finally:
                words.ROOT = root

    def test_banned_word_in_a_comment_is_found(self) -> None:
        self.assertEqual(len(self.found("a.rs", "// Nobody listens.\n")), 1)

    def test_banned_word_in_a_name_is_found(self) -> None:
        self.assertEqual(len(self.found("a.rs", "fn who_waits_is_served() {}\n")), 1)

    def test_user_nobody_in_quotes_is_allowed(self) -> None:
        self.assertEqual(self.found("a.rs", 'run_as("nobody");\n'), [])

    def test_code_in_a_page_is_not_prose(self) -> None:
        self.assertEqual(self.found("docs/a.md", "`nobody`\n```text\nsomebody\n```\n"), [])

    def test_long_sentence_of_a_page_is_found(self) -> None:
        self.assertEqual(len(self.found("docs/a.md", "one " * 26 + ".\n")), 1)
        self.assertEqual(self.found("docs/a.md", "one " * 25 + ".\n"), [])

    def test_table_rows_are_no_sentences(self) -> None:
        self.assertEqual(self.found("docs/a.md", "| " + "one " * 30 + "|\n"), [])

    def test_counts_are_per_crate_and_per_page(self) -> None:
        areas = [words.area(it) for it in ("crates/a/src/b.rs", "docs/c.md", "bench/d.py", "README.md")]
        self.assertEqual(areas, ["crates/a", "docs/c.md", "bench", "README.md"])


class Links(unittest.TestCase):
    """Links and anchors that lead nowhere, and pages outside the summary."""

    def problems(self, **pages: str) -> list[str]:
        """What is wrong with a book of these pages."""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve()
            (root / "docs").mkdir()
            for name, text in pages.items():
                (root / "docs" / f"{name}.md").write_text(text)
            return links.problems(root)

    def test_book_without_faults_has_none(self) -> None:
        self.assertEqual(self.problems(SUMMARY="- [A](a.md)\n", a="# One two\n[here](#one-two)\n"), [])

    def test_missing_page_anchor_and_entry_are_found(self) -> None:
        found = self.problems(SUMMARY="- [A](a.md)\n", a="[x](none.md) [y](#none)\n", b="# B\n")
        self.assertEqual([bool(re.search(it, "\n".join(found))) for it in ("none.md is not there", "#none is no heading", "list docs/b.md")], [True] * 3)

    def test_missing_test_is_found(self) -> None:
        table = "| guarantee | test |\n|---|---|\n| It `holds`. | `a::none_such`, `x` |\n\n`no_table`\n"
        found = self.problems(SUMMARY="- [A](a.md)\n", a=table)
        self.assertEqual(found, [f"docs/a.md: no test is called {name}" for name in ("none_such", "x")])

    def test_link_out_of_the_book_is_found(self) -> None:
        found = self.problems(SUMMARY="- [A](a.md)\n", a="[x](../out.md)\n", **{"../out": "# Out\n"})
        self.assertEqual(found, ["docs/a.md: ../out.md is outside the book: name it by its address"])


if __name__ == "__main__":
    unittest.main()
