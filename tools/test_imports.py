"""The check of imports finds circles, and only those."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import imports


class Imports(unittest.TestCase):
    """Crates of a few files."""

    def uses(self, **files: str) -> set[tuple[str, str, str]]:
        """Which file takes which name of which, in a crate of these files (`__` for a folder)."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder) / (name.replace("__", "/") + ".rs")
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            found = imports.Crate(Path(folder) / "lib.rs").uses()
            return {(Path(user).stem, Path(of).stem, name) for user, of, name in found}

    def circles(self, **files: str) -> list[list[str]]:
        """The circles of such a crate."""
        return imports.circles(imports.edges(self.uses(**files)))

    def test_planted_circle_is_found(self) -> None:
        files = {"lib": "mod a; mod b; mod c;", "a": "use crate::b::B; pub struct A;", "c": "use crate::a::A;"}
        self.assertEqual(self.circles(**files, b="pub struct B;"), [])
        files["c"] += " pub fn f() {}"
        self.assertEqual(self.circles(**files, b="use crate::c::f; pub struct B;"), [["a", "b", "c"]])

    def test_paths_in_code_count(self) -> None:
        files = {"lib": "mod a; mod b;", "a": "pub fn f() { crate::b::g(1) }"}
        self.assertEqual(self.circles(**files, b="pub fn g(x: u8) { super::a::f() }"), [["a", "b"]])

    def test_child_and_head_that_use_each_other_are_a_circle(self) -> None:
        files = {"lib": "mod a;", "a": "mod b; pub struct Head; fn f() { b::g(); }"}
        self.assertEqual(self.circles(**files, a__b="use super::*; pub fn g() { Head; }"), [["a", "b"]])
        self.assertEqual(self.circles(**files, a__b="pub fn g() {}"), [])

    def test_name_exported_on_counts_for_its_definition(self) -> None:
        files = {"lib": "mod a; mod c;", "a": "mod b; pub use b::{B as Out, self as it};", "a__b": "pub struct B;"}
        self.assertEqual(self.uses(**files, c="use crate::a::Out; fn f() { crate::a::it::g() }"), {("c", "b", "B"), ("c", "b", "g")})

    def test_file_stands_above_all_that_it_uses(self) -> None:
        uses = imports.edges([("b", "a", "A"), ("c", "b", "B"), ("c", "a", "A")])
        self.assertEqual(imports.floors("abcd", uses), [["a", "d"], ["b"], ["c"]])

    def test_tests_comments_and_strings_do_not_count(self) -> None:
        b = 'pub fn g() {} // crate::a::f()\nconst C: &str = "crate::a::f";\n#[cfg(test)] mod tests { use crate::a::f; }'
        files = {"lib": "mod a; mod b;", "a": "pub fn f() { crate::b::g(); }"}
        self.assertEqual(self.circles(**files, b=b), [])
        self.assertEqual(self.circles(**files, b=b + "#[cfg(test)] fn t() { crate::a::f() } fn h() { crate::a::f() }"), [["a", "b"]])

    def test_macros_count(self) -> None:
        files = {"lib": "#[macro_use] mod a; mod b;", "a": "macro_rules! m { () => {} } use crate::b::f;"}
        self.assertEqual(self.circles(**files, b="pub fn f() { m!() }"), [["a", "b"]])

    def test_names_alike_in_other_scopes_do_not_count(self) -> None:
        files = {"lib": "mod a; mod b;", "a": "pub fn f() {} fn g() { crate::b::h() }"}
        self.assertEqual(self.circles(**files, b="pub fn h() { let f = other::a::f(); x.f(S { f: 1 }) }"), [])


if __name__ == "__main__":
    unittest.main()
