"""What a wheel has beside the Python module: the program, the libraries, the header, the man pages.

Of the tree in the folder that GPUMUX_TREE names (deploy/package.sh), or of one made here with cargo (`pip install .`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}
"""Those that every system with a C library as new as the wheel's tag has (PEP 600), beside the dynamic linker."""


class Tree(BuildHookInterface):
    """Puts the tree into the wheel and gives it the tag of the systems that it runs on."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        given = os.environ.get("GPUMUX_TREE")
        self.made = None if given else tempfile.mkdtemp()
        tree = Path(given or self.made or "")
        if not given:
            self.build(tree)
        program, libraries = tree / "bin/gpumux", sorted((tree / "lib/gpumux").iterdir())
        build_data["shared_scripts"] = {str(program): "gpumux"}
        # Below the prefix of the Python environment, where the program looks for its libraries.
        files = [*libraries, *sorted((tree / "include").iterdir()), *sorted((tree / "share/man").rglob("*.gz"))]
        build_data["shared_data"] = {str(file): str(file.relative_to(tree)) for file in files}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{self.platform([program, *libraries])}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.made:
            shutil.rmtree(self.made)

    def build(self, tree: Path) -> None:
        """What packages have, from source."""
        packages = [word for name in ("cli", "shim", "emu-cuda") for word in ("-p", f"gpumux-{name}")]
        if not shutil.which("cargo"):
            raise SystemExit("gpumux: no cargo: install Rust (https://rustup.rs), or install a wheel that is built already")
        subprocess.run(["cargo", "build", "--release", "--locked", *packages], cwd=self.root, check=True)
        target = Path(os.environ.get("CARGO_TARGET_DIR", Path(self.root, "target")), "release")
        subprocess.run([Path(self.root, "deploy/tree.sh"), "--from", target, "--to", tree], check=True)

    def platform(self, programs: list[Path]) -> str:
        """The tag, from what the programs themselves need."""

        def elf(what: str, *files: Path) -> list[str]:
            command = [Path(self.root, "deploy/elf.sh"), what, *files]
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()

        needed = [name for name in elf("needed", *programs) if not name.startswith("ld-linux-")]
        foreign = sorted(set(needed) - LIBRARIES)
        if foreign:
            raise SystemExit(f"gpumux: no wheel can have what needs {', '.join(foreign)}, which not all systems have")
        glibc, machine = elf("glibc", *programs)[0], elf("machine", programs[0])[0]
        return f"manylinux_{glibc.replace('.', '_')}_{machine}"
