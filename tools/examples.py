#!/usr/bin/env python3
"""Checks examples/autoscaling against the schemas and sources of the tools, where they are given: each path is of a file or checkout of the tool's.

python3 tools/examples.py --keda keda/config/crd/bases/keda.sh_scaledobjects.yaml \\
    --aibrix aibrix/config/crd/autoscaling/autoscaling.aibrix.ai_podautoscalers.yaml \\
    --dynamo dynamo/deploy/operator/config/crd/bases/nvidia.com_dynamographdeploymentscalingadapters.yaml \\
    --planner FOLDER-OF-ai-dynamo --llm-d llm-d-router --metrics SCRAPE-OF-PORT-9400

Needs PyYAML, and for the planner what it imports. `cargo test -p gpumux-dra --test dra autoscalers` checks the examples without any of these.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples/autoscaling"
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def misfits(value: Any, schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """What is wrong with a value by a schema of Kubernetes, which drops unknown fields without a word."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)):
            yield f"{place}: {value!r} is neither an integer nor a string"
        return
    of = TYPES.get(schema.get("type", ""))
    if of and (not isinstance(value, of) or isinstance(value, bool) and of is not bool):
        yield f"{place}: {value!r} is no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if not schema.get("minimum", value) <= value <= schema.get("maximum", value) if isinstance(value, (int, float)) else False:
        yield f"{place}: {value} is outside of its bounds"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from misfits(item, schema.get("items", {}), f"{place}[{index}]")
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        # What the API server knows of every object is not in the schema.
        free = schema.get("x-kubernetes-preserve-unknown-fields") or not known
        yield from (f"{place}.{name} is missing" for name in schema.get("required", []) if name not in value)
        for name, item in value.items():
            if name not in known and not free and not others:
                yield f"{place}.{name} is unknown"
            yield from misfits(item, known.get(name) or (others if isinstance(others, dict) else {}), f"{place}.{name}")


def documents(path: Path) -> list[Any]:
    import yaml  # type: ignore[import-untyped,unused-ignore]

    return [it for it in yaml.safe_load_all(path.read_text(encoding="utf-8")) if it]


def of_crd(path: Path) -> Iterator[str]:
    """The examples that are of a custom resource definition's kind."""
    (definition,) = documents(path)
    kind, group = definition["spec"]["names"]["kind"], definition["spec"]["group"]
    versions = {f"{group}/{it['name']}": it["schema"]["openAPIV3Schema"] for it in definition["spec"]["versions"]}
    count = 0
    for file in sorted(FOLDER.glob("*.yaml")):
        for found in documents(file):
            if found.get("kind") != kind:
                continue
            count += 1
            schema = versions.get(found["apiVersion"])
            yield from misfits(found, schema, f"{file.name}: {kind}") if schema else [f"{file.name}: no version {found['apiVersion']} of {kind}"]
    if not count:
        yield f"no example is a {kind}"


def of_planner(folder: Path) -> Iterator[str]:
    sys.path.insert(0, str(folder))
    from dynamo.planner.config.planner_config import PlannerConfig  # type: ignore[import-not-found,unused-ignore]

    (given,) = documents(FOLDER / "dynamo-planner.yaml")
    yield from (f"dynamo-planner.yaml: {name} is unknown" for name in given if name not in PlannerConfig.model_fields)
    try:
        PlannerConfig.model_validate(given)
    except ValueError as error:
        yield f"dynamo-planner.yaml: {error}"


def names(parameters: Any) -> Iterator[str]:
    """The fields of parameters, at all depths."""
    for name, value in parameters.items() if isinstance(parameters, dict) else ():
        yield name
        yield from names(value)


def of_router(folder: Path) -> Iterator[str]:
    """Plugins and their parameters, by the sources."""
    source = "".join(it.read_text(encoding="utf-8") for it in folder.rglob("*.go") if not it.name.endswith("_test.go"))
    (given,) = documents(FOLDER / "llm-d.yaml")
    for plugin in given["plugins"]:
        if f'"{plugin["type"]}"' not in source:
            yield f"llm-d.yaml: no source names the plugin {plugin['type']}"
        parameters = plugin.get("parameters", {})
        tags = (f'json:"{name}' in source for name in names(parameters))
        yield from (f"llm-d.yaml: {plugin['type']}: no parameter {name}" for name, known in zip(names(parameters), tags) if not known)
        if "attributeKey" in parameters and f'NewDataKey("{parameters["attributeKey"]}"' not in source:
            yield f"llm-d.yaml: nothing produces {parameters['attributeKey']}"
    if '"DCGM_FI_DEV_GPU_UTIL"' not in source:
        yield "llm-d.yaml: no source reads DCGM_FI_DEV_GPU_UTIL"


def of_scrape(path: Path) -> Iterator[str]:
    """What the router's extractor looks for."""
    text = path.read_text(encoding="utf-8")
    if "# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n" not in text or not re.search(r'^DCGM_FI_DEV_GPU_UTIL\{[^}]*\bpod="[^"]+"', text, re.MULTILINE):
        yield f"{path}: no gauge DCGM_FI_DEV_GPU_UTIL with a label pod"


CHECKS = {"keda": of_crd, "aibrix": of_crd, "dynamo": of_crd, "planner": of_planner, "llm-d": of_router, "metrics": of_scrape}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CHECKS:
        parser.add_argument(f"--{name}", type=Path, metavar="PATH")
    given = {name: path for name, path in vars(parser.parse_args()).items() if path}
    if not given:
        parser.error("name at least one path")
    found = [line for name, path in given.items() for line in CHECKS[name.replace("_", "-")](path)]
    print("\n".join(found) or f"{', '.join(given)}: the examples fit")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
