#!/usr/bin/env python3
"""Writes what is in gpumux's programs, as CycloneDX 1.5: every crate that is compiled into them, with licence and checksum.

    deploy/sbom.py > gpumux.cdx.json
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SHIPPED = ("gpumux-cli", "gpumux-shim", "gpumux-emu-cuda")
PLATFORM = "x86_64-unknown-linux-gnu"


def cargo_metadata() -> dict[str, Any]:
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", PLATFORM]
    found: dict[str, Any] = json.loads(subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout)
    return found


def compiled(metadata: dict[str, Any]) -> dict[str, list[str]]:
    """The packages that are compiled into what is shipped, each with those that it uses. Those of build scripts, tests and macros
    are not."""
    macros = {it["id"] for it in metadata["packages"] if any("proc-macro" in target["kind"] for target in it["targets"])}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    left = [package["id"] for package in metadata["packages"] if package["name"] in SHIPPED]
    found: dict[str, list[str]] = {}
    while left:
        package = left.pop()
        if package in found:
            continue
        used = [it for it in nodes[package]["deps"] if it["pkg"] not in macros]
        found[package] = sorted(it["pkg"] for it in used if any(kind["kind"] is None for kind in it["dep_kinds"]))
        left += found[package]
    return found


def bill(metadata: dict[str, Any], lock: dict[str, Any], made: datetime.datetime) -> dict[str, Any]:
    """The document. `made` is its time."""
    packages = {package["id"]: package for package in metadata["packages"]}
    checksums = {(it["name"], it["version"]): it.get("checksum") for it in lock["package"]}
    uses = compiled(metadata)
    version = next(it["version"] for it in packages.values() if it["name"] == SHIPPED[0])

    def reference(package: str) -> str:
        it = packages[package]
        return f"pkg:cargo/{it['name']}@{it['version']}"

    def component(package: str) -> dict[str, Any]:
        it = packages[package]
        answer = {
            "type": "library",
            "bom-ref": reference(package),
            "name": it["name"],
            "version": it["version"],
            "purl": reference(package),
        }
        if it["license"]:
            # Cargo accepts the old way to write OR.
            answer["licenses"] = [{"expression": it["license"].replace("/", " OR ")}]
        if checksum := checksums[it["name"], it["version"]]:
            answer["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return answer

    own = f"pkg:generic/gpumux@{version}"
    order = sorted(uses, key=reference)
    depends = [{"ref": reference(it), "dependsOn": sorted({reference(used) for used in uses[it]})} for it in order]
    roots = sorted(reference(it) for it in uses if packages[it]["name"] in SHIPPED)
    name = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(depends))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{name}",
        "version": 1,
        "metadata": {
            "timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "gpumux",
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
            },
        },
        "components": [component(it) for it in order],
        "dependencies": [{"ref": own, "dependsOn": roots}, *depends],
    }


def main() -> None:
    lock = tomllib.loads((REPOSITORY / "Cargo.lock").read_text())
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.timezone.utc)
    made = datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc) if seconds else now
    json.dump(bill(cargo_metadata(), lock, made), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
