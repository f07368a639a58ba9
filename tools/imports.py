#!/usr/bin/env python3
"""Checks that the files of a crate import each other in one direction, and draws its layers.

A module is a file. What counts as an import: `use`, and paths in code, that begin with `crate`, `super`, `self`, a child
module, or a name that a `use` brought. A name that is exported on counts for the file that defines it; exporting it on is no import.
Tests (`#[cfg(test)]`) do not count: they may use everything.

It fails as well where `docs/img/layers-*.svg` are not what the imports say: `--update` draws them anew.
`--names` counts the names that files take from other files of their crate. Needs only Python.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?\*/|\s+)
    |(?P<string>b?r(?P<hash>\#*)".*?"(?P=hash)|[bc]?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\])')
    |(?P<life>'\w+)
    |(?P<word>(?:r\#)?[A-Za-z_]\w*)
    |(?P<sign>::|=>|->|.)""",
    re.DOTALL | re.VERBOSE,
)
ITEMS = {"fn", "struct", "enum", "trait", "type", "const", "static", "union"}
OPEN, CLOSE = "{([", "})]"
Path_ = tuple[str, ...]
# Crates whose layers are drawn, and how wide.
DRAWN = ("gpumux-core", "gpumux-shim", "gpumux-daemon")
WIDTH = 1100


@dataclasses.dataclass
class Module:
    """One file, or a module written inside of one."""

    name: Path_
    file: str
    test: bool = False
    items: set[str] = dataclasses.field(default_factory=set)
    children: dict[str, Path_] = dataclasses.field(default_factory=dict)
    # What `use` brings: name, path. Of globs only paths.
    brought: dict[str, Path_] = dataclasses.field(default_factory=dict)
    globs: list[Path_] = dataclasses.field(default_factory=list)
    exported: set[str] = dataclasses.field(default_factory=set)
    paths: set[Path_] = dataclasses.field(default_factory=set)


def tokens(text: str) -> list[str]:
    """The words and signs of a source, without comments, strings and lifetimes."""
    kept = (it for it in TOKEN.finditer(text) if it.lastgroup not in ("skip", "life"))
    return ['""' if it["string"] is not None else it[0].removeprefix("r#") for it in kept]


def closing(source: list[str], at: int) -> int:
    """Where the bracket that opens at this place closes."""
    depth = 0
    for end in range(at, len(source)):
        depth += (source[end] in OPEN) - (source[end] in CLOSE)
        if depth == 0:
            return end
    return len(source) - 1


def tree(source: list[str], at: int, before: Path_ = ()) -> Iterator[tuple[str, Path_]]:
    """The names and paths of a `use`; the name of a glob is `*`. Ends with the token at which the tree ends."""
    path = before
    while True:
        word = source[at]
        if word == "{":
            end, at = closing(source, at), at + 1
            while at < end:
                yield from tree(source, at, path)
                depth = 0
                while at < end and (depth or source[at] != ","):
                    depth += (source[at] in OPEN) - (source[at] in CLOSE)
                    at += 1
                at += 1
            return
        if word == "*":
            yield "*", path
            return
        path = path if word == "self" and path else (*path, word)
        if source[at + 1] != "::":
            yield (source[at + 2] if source[at + 1] == "as" else path[-1]), path
            return
        at += 2


class Crate:
    """The modules of one crate, from its root file."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[Path_, Module] = {}
        self.macros: dict[str, Path_] = {}
        self.read(root, ("crate",), root.parent, False)

    def read(self, file: Path, name: Path_, folder: Path, test: bool) -> None:
        """Reads a file, and those that it declares."""
        module = self.modules[name] = Module(name, file.as_posix(), test)
        self.block(tokens(file.read_text()), module, folder)

    def block(self, source: list[str], module: Module, folder: Path) -> None:
        """Reads what a module has between its braces."""
        at, depth, test, path = 0, 0, module.test, None
        public = False
        while at < len(source):
            word = source[at]
            if word == "#" and source[at + 1] in ("[", "!"):
                start = at + 1 + (source[at + 1] == "!")
                end = closing(source, start)
                said = "".join(source[start : end + 1])
                if said.startswith(("[cfg(test", "[cfg(all(test")) or said == "[test]":
                    test = True
                at = end + 1
                continue
            if word == "pub":
                public = True
                at += 1
                if source[at] == "(":
                    at = closing(source, at) + 1
                continue
            if word == "mod" and source[at + 2] in (";", "{"):
                child = (*module.name, source[at + 1])
                if not depth:
                    module.children[source[at + 1]] = child
                if source[at + 2] == ";":
                    file = next((it for it in (folder / f"{child[-1]}.rs", folder / child[-1] / "mod.rs") if it.is_file()), None)
                    if file:
                        self.read(file, child, folder / child[-1], test)
                    at += 3
                else:
                    end = closing(source, at + 2)
                    inner = self.modules[child] = Module(child, module.file, test)
                    self.block(source[at + 3 : end], inner, folder / child[-1])
                    at = end + 1
            elif word == "use":
                end = source.index(";", at)
                for name, path in tree(source, at + 1) if not test or module.test else ():
                    if name == "*":
                        module.globs.append(path)
                    else:
                        module.brought[name] = path
                    if public:
                        module.exported.add(name)
                at = end + 1
            elif test and not module.test:
                # An item for tests only: to its end.
                while at < len(source) and source[at] not in ("{", ";"):
                    at = closing(source, at) + 1 if source[at] in "([" else at + 1
                at = closing(source, at) + 1 if at < len(source) and source[at] == "{" else at + 1
            elif word == "macro_rules":
                module.items.add(source[at + 2] + "!")
                self.macros[source[at + 2] + "!"] = module.name
                at += 3
            else:
                if not depth and word in ITEMS and re.match(r"\w", source[at + 1]):
                    name = source[at + 2] if source[at + 1] in ("mut", "unsafe", "fn") and source[at + 2].isidentifier() else source[at + 1]
                    module.items.add(name)
                if word.isidentifier() and source[at - 1] not in ("::", ".") and source[at + 1 : at + 2] != [":"]:
                    path = [word]
                    while source[at + 1 : at + 2] == ["::"] and source[at + 2].isidentifier():
                        at += 2
                        path.append(source[at])
                    if source[at + 1 : at + 2] == ["!"]:
                        path[-1] += "!"
                    module.paths.add(tuple(path))
                depth += (word in OPEN) - (word in CLOSE)
                at += 1
                if depth and test == module.test or word not in (";", "}"):
                    public = False if word != "pub" else public
                    continue
            test, public = module.test, False

    @functools.cache
    def definition(self, path: Path_, seen: frozenset[tuple[Path_, str]] = frozenset()) -> tuple[Path_, str] | None:
        """The module and the name that an absolute path leads to; without a name where it is a module."""
        module = self.modules.get(path[:1])
        if not module:
            return None
        for at, name in enumerate(path[1:], 1):
            if name in module.children:
                module = self.modules.get(module.children[name])
                if not module:
                    return None
                continue
            if name in module.items or (module.name, name) in seen:
                return module.name, name
            seen |= {(module.name, name)}
            ways = [module.brought[name]] if name in module.brought else []
            ways += [(*it, name) for it in module.globs]
            for way in ways:
                whole = self.absolute(module, way)
                found = whole and self.definition(whole, seen)
                if found and (name in module.brought or found[1] in self.modules[found[0]].items or not found[1]):
                    return self.definition((*found[0], *path[at + 1 :]), seen) if not found[1] and path[at + 1 :] else found
            return None if name in module.brought else (module.name, name)
        return module.name, ""

    def absolute(self, module: Module, path: Path_) -> Path_ | None:
        """A path as seen in a module, from the crate's root; none if it leads out of the crate."""
        first, rest = path[0], path[1:]
        if first == "crate":
            return path
        if first == "self":
            return (*module.name, *rest)
        if first == "super":
            parent = self.modules.get(module.name[:-1])
            return (self.absolute(parent, rest) if rest and rest[0] == "super" else (*parent.name, *rest)) if parent else None
        if first in module.children:
            return (*module.children[first], *rest)
        return None

    def uses(self) -> Iterator[tuple[str, str, str]]:
        """File, file that it uses, and name."""
        for module in self.modules.values():
            if module.test:
                continue
            for path in module.paths | {p for n, p in module.brought.items() if n not in module.exported}:
                whole = self.absolute(module, path)
                if path[0] in module.brought and not whole:
                    base = self.absolute(module, module.brought[path[0]])
                    whole = (*base, *path[1:]) if base else None
                for way in [] if whole or path[0] in module.items else module.globs:
                    base = self.absolute(module, (*way, path[0]))
                    found = base and self.definition(base)
                    if found and (not found[1] or found[1] in self.modules[found[0]].items):
                        whole = (*base, *path[1:])
                if not whole and len(path) == 1 and path[0] in self.macros and path[0] not in module.items:
                    whole = (*self.macros[path[0]], path[0])
                found = whole and self.definition(whole)
                if found and found[1] and not self.modules[found[0]].test:
                    if self.modules[found[0]].file != module.file:
                        yield module.file, self.modules[found[0]].file, found[1]


def edges(uses: Iterable[tuple[str, str, str]]) -> dict[str, set[str]]:
    """The files that each file uses."""
    found = collections.defaultdict(set)
    for user, of, _ in uses:
        found[user].add(of)
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The files that import each other, in groups."""
    order, seen = list[str](), set[str]()

    def visit(start: str, edges: dict[str, set[str]], leave: list[str]) -> None:
        stack = [(start, iter(sorted(edges.get(start, ()))))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            for other in rest:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(sorted(edges.get(other, ())))))
                    break
            else:
                stack.pop()
                leave.append(node)

    for node in sorted(edges):
        if node not in seen:
            visit(node, edges, order)
    back = collections.defaultdict(set)
    for node, others in edges.items():
        for other in others:
            back[other].add(node)
    seen.clear()
    found = []
    for node in reversed(order):
        if node not in seen:
            group = list[str]()
            visit(node, back, group)
            if len(group) > 1:
                found.append(sorted(group))
    return found


def floors(files: Iterable[str], edges: dict[str, set[str]]) -> list[list[str]]:
    """The files of each floor, the lowest first: a file stands above all that it uses. Files in a circle have none."""
    left, found = set(files), list[list[str]]()
    while floor := sorted(it for it in left if not edges.get(it, set()) & left):
        found.append(floor)
        left -= set(floor)
    return found


def drawn(crate: str, all_floors: list[list[str]]) -> str:
    """A picture of the floors, the highest on top."""
    boxes, y = list[str](), 46
    for number, floor in reversed(list(enumerate(all_floors, 1))):
        boxes.append(f'<text class="dim" x="14" y="{y + 14}">{number}</text>')
        x = 40
        for file in floor:
            name = re.sub(r"(/mod)?\.rs$", "", file.split("/src/")[1])
            width = 7 * len(name) + 14
            if x + width > WIDTH - 14:
                x, y = 40, y + 26
            boxes.append(f'<rect x="{x}" y="{y}" width="{width}" height="20" rx="3"/><text x="{x + 7}" y="{y + 14}">{name}</text>')
            x += width + 6
        y += 36
    style = "rect{fill:#e8eef7;stroke:#5b7bb0}text{font:12px monospace;fill:#1c2733}.dim{fill:#6b7683}"
    title = f"The files of {crate}: each stands above all that it uses"
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{title}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{style}</style>\n<rect width="{WIDTH}" height="{y}" style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f'<text x="14" y="26">{title}</text>', *boxes, "</svg>\n"])


def roots() -> Iterator[tuple[str, Path]]:
    """The crates' names and root files."""
    for crate in sorted((ROOT / "crates").iterdir()):
        for root in ("lib.rs", "main.rs"):
            if (crate / "src" / root).is_file():
                yield crate.name, crate / "src" / root


def main() -> None:
    """Prints the circles, and fails if there are any."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--names", action="store_true", help="count the names that files take from each other")
    arguments.add_argument("--update", action="store_true", help="draw the layers anew")
    options = arguments.parse_args()
    bad = total = 0
    for crate, root in roots():
        uses = set(Crate(root).uses())
        total += len(uses)
        if options.names:
            print(f"{crate:18} {sum(map(len, edges(uses).values())):5} imports, {len(uses):5} names")
        for circle in circles(edges(uses)):
            bad += 1
            print(f"{crate}: {len(circle)} files import each other")
            for user, of, name in sorted(uses):
                if user in circle and of in circle:
                    print(f"    {user.split('/src/')[1]} uses {name} of {of.split('/src/')[1]}")
        if crate in DRAWN:
            # A head that only exports its parts uses nothing, and is not used.
            files = {file for user, of, _ in uses for file in (user, of)}
            picture, path = drawn(crate, floors(files, edges(uses))), ROOT / f"docs/img/layers-{crate.removeprefix('gpumux-')}.svg"
            if options.update:
                path.write_text(picture)
            elif not path.is_file() or path.read_text() != picture:
                bad += 1
                print(f"{path.relative_to(ROOT)} is not what the imports say: run `python3 tools/imports.py --update`")
    if options.names:
        print(f"in all {total} names of other files, {bad} circles")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
