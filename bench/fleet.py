"""Fetches the public trace, replays FGD's experiment with `gpumux fleet simulate`, and puts FGD's own figures beside it.

`fetch` downloads the lists of nodes and pods, and FGD's published results, into a folder and checks them. `replay` runs
the command on the seventeen inputs and writes results/fleet-replay.json: per input and policy the mean over the orders of
arrival, and as modes NAME-published the mean of FGD's own ten runs. `size` writes results/fleet-size.json, and
`time` results/fleet-time.json. `lifetimes`, `serving` and `usage` play Alibaba's traces of 2023, 2025 and 2026, MuxServe's
workloads and Prism's requests, and write results/fleet-NAME.json. Needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import common
import fleet_traces as traces

# The made-up lists, in which whole nodes are a tenth of the demand; few tenants, so more orders.
SAMPLE = ("--nodes", common.BENCH.parent / "scenarios/fleet/nodes.csv", "--pods", common.BENCH.parent / "scenarios/fleet/pods.csv")
SAMPLE_SEEDS = 10
# Names in FGD's results.
PUBLISHED = {
    "01-Random": "random",
    "02-DotProd": "dot-product",
    "03-GpuClustering": "gpu-clustering",
    "04-GpuPacking": "gpu-packing",
    "05-BestFit": "best-fit",
    "06-FGD": "fgd",
}
MODES = [*(mode for name in PUBLISHED.values() for mode in (name, f"{name}-published")), "gpumux"]


def fetch(folder: Path, sources: Iterable[str]) -> None:
    """Downloads sources that are not there; fails where a file is not the published one."""
    for source, names, expected in map(traces.SOURCES.__getitem__, sources):
        if traces.checksum(folder, names) == expected:
            continue
        for path in (folder / name for name in names):
            path.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(source + str(path.relative_to(folder)), timeout=60) as answer:
                path.write_bytes(answer.read())
        if (found := traces.checksum(folder, names)) != expected:
            raise common.BenchError(f"the files of {source} have the checksum {found}, not {expected}: look at the source")


def asked(*arguments: str | Path) -> Any:
    """What a `gpumux fleet` command answers."""
    done = subprocess.run([common.gpumux(), "fleet", *map(str, arguments), "--json"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def rounded(values: Mapping[str, float | None], digits: int = 5) -> dict[str, float]:
    """Values to so many digits, without those that are not known."""
    return {name: float(f"{value:.{digits}g}") for name, value in values.items() if value is not None}


def lifetimes(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Rows of the results file with tenants that come and go."""
    lists = folder / "lists"
    dlrm = traces.write(lists / "dlrm.csv", traces.PODS_HEAD, traces.dlrm_pods((folder / traces.DLRM).read_text()))
    nodes = traces.write(lists / "nodes-2026.csv", traces.NODES_HEAD, traces.spot_nodes((folder / traces.SPOT_NODES).read_text()))
    rows = []
    for case, where, what in (("2023", folder / traces.NODES, folder / traces.PODS.format("default")), ("2025", nodes, dlrm)):
        rows += lifetimes_rows(case, asked("size", "--over-time", "--nodes", where, "--pods", what, "--seeds", str(seeds), "--step", "4"), seeds)
        common.say(case)
    return rows + lifetimes_rows("sample", asked("size", "--over-time", *SAMPLE, "--seeds", str(SAMPLE_SEEDS)), SAMPLE_SEEDS)


def lifetimes_rows(case: str, found: dict[str, list[dict[str, Any]]], seeds: int) -> list[dict[str, Any]]:
    """One row per way of sharing: means over the orders of the nodes, and the longest wait of all."""
    rows = []
    for mode, needs in sorted(found.items(), key=lambda it: -statistics.fmean(need["gpus"] for need in it[1])):
        values = {name: statistics.fmean(need[name] for need in needs) for name in ("gpus", "waited", "attained")}
        waits = [need["longest_wait_s"] for need in needs]
        values["longest_wait_s"] = None if None in waits else max(waits)
        rows.append({"case": case, "mode": mode, "values": rounded(values), "samples": seeds})
    return rows


def serving(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Rows of the results file with MuxServe's workloads."""
    lists = folder / "lists"
    hosts = [[f"host-{nth}", 128_000, 1_048_576, 8, "A100", 81_920] for nth in range(4)]
    nodes = traces.write(lists / "a100.csv", traces.NODES_HEAD + ",gpu_memory_mib", hosts)
    rows = []
    for scale in traces.SCALES:
        models = traces.muxserve_models((folder / traces.muxserve_rates(scale)).read_text())
        listed = traces.write(lists / f"models-{scale}.csv", traces.MODELS_HEAD, models)
        measured = {how: json.loads((folder / traces.muxserve_measured(scale, how)).read_text()) for how in traces.MEASURED}
        found, estimated = {}, {}
        for how in ("flexsm", "spatial"):
            placed = traces.write(lists / f"{how}-{scale}.csv", "mesh,gpus,name,percent", traces.muxserve_placement(measured[how]))
            question = ("models", "--nodes", nodes, "--models", listed, "--profile", folder / traces.PROFILE)
            found = asked(*question, "--placement", placed, "--seeds", str(seeds))
            estimated[how] = found["placement"]
        rates = {name: float(rate) for name, _, rate, *_ in models}
        served = {how: traces.muxserve_served(data, rates) for how, data in measured.items()}
        rows += serving_rows(f"{found['rate']:.4g}/s", found["ways"], estimated, served)
    return rows


# Names of MuxServe's ways to place models: its own, GPUs for each model, and equal turns on its own placement.
HOW = {"flexsm": "muxserve", "spatial": "muxserve-dedicated", "temporal": "muxserve-turns"}


def serving_rows(case: str, ways: list[dict[str, Any]], estimated: dict[str, float], served: dict[str, float]) -> list[dict[str, Any]]:
    """One row per way of sharing; those of MuxServe as estimated, and as its authors measured."""
    rows = []
    for way in ways:
        values = {"gpus": way["gpus"], "asked_shares": way["asked"], "asked_memory": way["asked_memory"], "served_on_32": way["served"]}
        rows.append({"case": case, "mode": way["sharing"], "values": rounded(values)})
    for how, percent in estimated.items():
        rows.append({"case": case, "mode": f"{HOW[how]}-estimated", "values": rounded({"served_on_32": percent})})
    for how, percent in served.items():
        rows.append({"case": case, "mode": f"{HOW[how]}-published", "values": rounded({"served_on_32": percent})})
    return rows


def usage(folder: Path) -> list[dict[str, Any]]:
    """Rows of the results file with recorded use."""
    lists = folder / "lists"
    recorded = (traces.in_tar(folder / (traces.GENAI.format(what) + ".tar.gz")) for what in traces.GENAI_WHAT)
    genai = traces.write(lists / "genai.csv", traces.USAGE_HEAD, traces.genai_usage(*recorded))
    requests = traces.prism_requests((folder / traces.REQUESTS).read_bytes())
    prism = traces.write(lists / "prism.csv", traces.REQUESTS_HEAD, requests)
    models = traces.write(lists / "prism-models.csv", traces.MODELS_HEAD, traces.prism_models(requests, "llama-7b"))
    rows = []
    for gib in (48, 80):
        found = asked("usage", "--usage", genai, "--window", str(traces.GENAI_WINDOW), "--card", str(gib * 1024))
        rows += usage_rows(f"images, {gib} GiB", found)
    question = ("--requests", prism, "--models", models, "--profile", folder / traces.PROFILE)
    return rows + usage_rows("chat, 80 GiB", asked("usage", *question, "--window", "10", "--card", str(80 * 1024)))


def usage_rows(case: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per way of sharing, and what is used in the mean."""
    ways = {mode: values for mode, values in found["ways"].items() if values}
    rows = [
        {"case": case, "mode": mode, "values": rounded(values), "samples": found["tenants"]}
        for mode, values in sorted(ways.items(), key=lambda it: -it[1]["gpus"])
    ]
    used = {"case": case, "mode": "in use", "values": rounded({"gpus": found["used_gpus"]}), "samples": found["tenants"]}
    return [*rows, used]


def published(folder: Path) -> dict[tuple[str, str], dict[str, float]]:
    """FGD's own results: means over its ten runs, by input and rule."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for what, value in (("allo", "allocated"), ("frag", "fragments")):
        for row in csv.DictReader((folder / traces.EXPECTED.format(what)).read_text().splitlines()):
            key = (row["workload"].removeprefix("openb_pod_list_"), PUBLISHED[row["sc_policy"]])
            for arrived in ("100", "130"):
                if row[arrived]:
                    found.setdefault(key, {}).setdefault(f"{value}_{arrived}", []).append(float(row[arrived]))
    return {key: {name: statistics.fmean(many) for name, many in values.items()} for key, values in found.items()}


def means(runs: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Values of one input and policy: means over the orders of arrival, and the 95% interval of each mean."""
    many: dict[str, list[float]] = {}
    for run in runs:
        points = {point["arrived"]: point for point in run["points"]}
        for value in ("allocated", "fragments"):
            for arrived in (100, 130):
                many.setdefault(f"{value}_{arrived}", []).append(points[arrived][value])
    values = {name: statistics.fmean(found) for name, found in many.items()}
    around = {}
    if len(runs) > 1:
        for name, found in many.items():
            # Student's t for ten runs; for fewer the interval would have to be wider.
            half = 2.26 * statistics.stdev(found) / len(found) ** 0.5
            around[name] = [float(f"{values[name] - half:.6g}"), float(f"{values[name] + half:.6g}")]
    return rounded(values, 6), around


def inputs(folder: Path, case: str) -> tuple[str | Path, ...]:
    """Arguments that name the nodes and pods of an input of FGD's experiment."""
    return "--nodes", folder / traces.NODES, "--pods", folder / traces.PODS.format(case)


def replay(folder: Path, cases: list[str], seeds: int) -> list[dict[str, Any]]:
    """Rows of the results file."""
    rows, own = [], published(folder)
    for case in cases:
        policies = asked("simulate", *inputs(folder, case), "--seeds", str(seeds))["policies"]
        rows += rows_of(case, {mode: means(runs) for mode, runs in policies.items()}, own, seeds)
        common.say(case)
    return rows


def rows_of(
    case: str,
    found: dict[str, tuple[dict[str, float], dict[str, list[float]]]],
    own: dict[tuple[str, str], dict[str, float]],
    seeds: int,
) -> list[dict[str, Any]]:
    """The rows of one input, FGD's figures below the same rule's."""
    rows = []
    for mode in MODES:
        rule = mode.removesuffix("-published")
        if mode != rule and (case, rule) in own:
            rows.append({"case": case, "mode": mode, "values": {name: round(value, 3) for name, value in own[case, rule].items()}, "samples": 10})
        elif mode in found:
            values, around = found[mode]
            rows.append({"case": case, "mode": mode, "values": values, "interval": around, "samples": seeds})
    return rows


def write(what: str, rows: list[dict[str, Any]], note: str, out: Path) -> None:
    """One results file."""
    common.save(out / f"fleet-{what}.json", common.head("fleet", "none: a simulation", "none") | {"note": note, "rows": rows})


def size(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Rows of the results file with the GPUs that the default input needs, and the made-up sample."""
    rows = size_rows("default", asked("size", *inputs(folder, "default"), "--seeds", str(seeds), "--step", "20"), seeds)
    return rows + size_rows("sample", asked("size", *SAMPLE, "--seeds", str(SAMPLE_SEEDS)), SAMPLE_SEEDS)


def size_rows(case: str, found: dict[str, list[dict[str, Any]]], seeds: int) -> list[dict[str, Any]]:
    """One row per way of sharing: means over the orders."""
    rows = []
    for mode, needs in sorted(found.items(), key=lambda it: -statistics.fmean(need["gpus"] for need in it[1])):
        values = {name: statistics.fmean(need[name] for need in needs) for name in ("gpus", "attained")}
        for at, (used, _) in enumerate(needs[0]["best_effort"]):
            values[f"best_effort_rate_at_{used:.0f}"] = statistics.fmean(need["best_effort"][at][1] for need in needs)
        rows.append({"case": case, "mode": mode, "values": rounded(values), "samples": seeds})
    return rows


def time_rows(folder: Path, gpus: int) -> list[dict[str, Any]]:
    """Rows of the results file with the times of decisions on a large fleet."""
    rows = []
    for case in ("default", "gpuspec33"):
        report = asked("simulate", *inputs(folder, case), "--gpus", str(gpus))
        rows += [one_time(case, mode, report, runs[0]) for mode, runs in report["policies"].items() if mode in ("fgd", "gpumux")]
    return rows


def one_time(case: str, mode: str, report: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The times of one replay."""
    times = {name: run[name] for name in ("place_us_p50", "place_us_p99", "place_us_max", "prepare_ms")}
    values = {"gpus": report["gpus"], "nodes": report["nodes"], "placed": run["placed"]}
    return {"case": case, "mode": mode, "values": values | rounded(times, 3)}


NOTE = (
    "Inputs: Alibaba cluster-trace-gpu-v2023 as published with FGD's simulator (commit 8f3d641). Values are percent of the "
    "fleet's 6,212 GPUs when the arrivals had asked for 100% or 130% of them. Modes NAME-published are FGD's own results."
)


SIZE_NOTE = (
    "default: the list of the replay, GPUs to the next 20. sample: the lists in `scenarios/fleet`, to the next 8. Attained and rates in percent; "
    "means over the orders."
)


TIME_NOTE = "Time per arrival, with the replay's accounting, and time to learn. Seed 42."


LIFETIMES_NOTE = (
    "2023: the list `default` and the nodes of the replay. 2025: the instances with a GPU of Alibaba's cluster-trace-gpu-v2025, on the nodes "
    "of its cluster-trace-v2026-spot-gpu (commit 7a6c496). sample: the lists in `scenarios/fleet`. The smallest fleet on which at most 1% of the tenants find no room when they "
    "come; waited and attained in percent."
)


SERVING_NOTE = (
    "Inputs: rates, profile and results of MuxServe (commit 2231480): 16 models with 7 to 65 billion parameters, nodes of eight A100 with "
    "80 GB. GPUs in whole nodes, mean over ten orders of the models; served in percent of the requests."
)


USAGE_NOTE = (
    "Images: duty cycle and memory of the pods of Alibaba's cluster-trace-v2026-GenAI (commit 7a6c496), in windows of 57 s. Chat: the requests "
    "of Prism's trace (commit 595ec1f) to 27 models, each as a Llama-7B by MuxServe's profile, in windows of 10 s. Percent of the windows in use; "
    "samples: tenants."
)


PLAYS: dict[str, tuple[Callable[[argparse.Namespace], list[dict[str, Any]]], str]] = {
    "replay": (lambda it: replay(it.data, it.cases.split(","), it.seeds), NOTE),
    "size": (lambda it: size(it.data, it.seeds), SIZE_NOTE),
    "time": (lambda it: time_rows(it.data, 10_000), TIME_NOTE),
    "lifetimes": (lambda it: lifetimes(it.data, it.seeds), LIFETIMES_NOTE),
    "serving": (lambda it: serving(it.data, it.seeds), SERVING_NOTE),
    "usage": (lambda it: usage(it.data), USAGE_NOTE),
}


def main() -> int:
    """Fetches, replays or sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fetch", *PLAYS])
    parser.add_argument("--data", type=Path, required=True, help="folder of the trace, outside the repository")
    parser.add_argument("--cases", default=",".join(traces.CASES), help="inputs, separated by commas")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=common.BENCH / "results")
    options = parser.parse_args()
    fetch(options.data, ["fgd"] if options.what in ("replay", "size", "time") else traces.SOURCES)
    if options.what in PLAYS:
        play, note = PLAYS[options.what]
        write(options.what, play(options), note, options.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except common.BenchError as error:
        sys.exit(f"error: {error}")
