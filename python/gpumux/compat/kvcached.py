"""kvcached on gpumux's elastic memory: its own Python code, with `gpumux.compat._vmm_ops` in the place of `kvcached.vmm_ops`.

    import gpumux.compat.kvcached     # before kvcached, vllm or sglang

    gpumux run -- python -m gpumux.compat.kvcached SCRIPT ARGUMENTS    # the same, without a change of the program
    gpumux run -- python -m gpumux.compat.kvcached -m MODULE ARGUMENTS

Processes that `multiprocessing` starts use it too. Without the library that `gpumux run` preloads, kvcached keeps its native module, if
that was built.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing.spawn
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any, Iterator, Sequence

import gpumux
from gpumux.compat import _vmm_ops

NAME = "kvcached.vmm_ops"


class _Finder:
    """Finds gpumux's module by the name of kvcached's."""

    @staticmethod
    def find_spec(name: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, _vmm_ops.__file__) if name == NAME else None


class _Register:
    """Registers in the process that unpickles it."""

    def __reduce__(self) -> Any:
        return register, ()


def _prepare(name: str) -> dict[str, Any]:
    return {**_preparation(name), "gpumux": _Register()}


_preparation = multiprocessing.spawn.get_preparation_data


def register() -> bool:
    """Whether kvcached has gpumux's memory. Raises ImportError where kvcached is missing, was imported before, or does not fit."""
    if _Finder in sys.meta_path:
        return True
    if NAME in sys.modules:
        raise ImportError("kvcached is imported already: import gpumux.compat.kvcached before kvcached, vllm and sglang")
    found = importlib.util.find_spec("kvcached")
    if found is None or not found.submodule_search_locations:
        raise ImportError("kvcached is not installed: pip install kvcached")
    folders = list(found.submodule_search_locations)
    missing = {name for folder in folders for name in _used(Path(folder)) if not hasattr(_vmm_ops, name)}
    if missing:
        raise ImportError(
            f"kvcached {_version()} does not fit: it uses {', '.join(sorted(missing))} of {NAME}, which gpumux "
            f"{gpumux.__version__} does not have; it fits {_vmm_ops.FITS}"
        )
    if not gpumux.present() and _is_built(folders):
        warnings.warn("kvcached uses its own memory: gpumux's library is not loaded (use `gpumux run`)", stacklevel=3)
        return False
    sys.meta_path.insert(0, _Finder)
    multiprocessing.spawn.get_preparation_data = _prepare
    return True


def _is_built(folders: list[str]) -> bool:
    """Whether there is a native module. Since 0.1.6 that is `kvcached._C`, and `vmm_ops.py` hands its names on."""
    found = importlib.machinery.PathFinder.find_spec(NAME, folders)
    if found and str(found.origin).endswith(".py"):
        found = importlib.machinery.PathFinder.find_spec("kvcached._C", folders)
    return found is not None


def _used(folder: Path) -> Iterator[str]:
    """What kvcached's code uses of its native module."""
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        modules = {"vmm_ops"}
        # An import comes before what is deeper in the tree.
        for node in ast.walk(ast.parse(text)) if "vmm_ops" in text else ():
            if isinstance(node, ast.ImportFrom) and node.module == NAME:
                yield from (it.name for it in node.names)
            elif isinstance(node, ast.Import):
                modules.update(it.asname for it in node.names if it.asname and it.name == NAME)
            elif isinstance(node, ast.Attribute) and _last(node.value) in modules:
                yield node.attr
            elif isinstance(node, ast.Call) and _last(node.func) == "getattr" and len(node.args) > 1:
                owner, name = node.args[:2]
                if _last(owner) in modules and isinstance(name, ast.Constant):
                    yield str(name.value)


def _last(node: ast.expr) -> str:
    """The name of a variable, or of an attribute."""
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def _version() -> str:
    try:
        return importlib.metadata.version("kvcached")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def main(arguments: Sequence[str]) -> None:
    """Runs a script or, after `-m`, a module, as Python does."""
    module = arguments[:1] == ["-m"]
    if len(arguments) < 1 + module:
        sys.exit("usage: python -m gpumux.compat.kvcached SCRIPT|-m MODULE [ARGUMENT...]")
    register()
    sys.argv = list(arguments[module:])
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # There shall be one of this module, by its own name.
    from gpumux.compat import kvcached

    kvcached.main(sys.argv[1:])
else:
    register()
