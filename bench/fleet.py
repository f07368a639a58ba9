"""Fetches the public trace, replays FGD's experiment with `gpumux fleet simulate`, and puts FGD's own figures beside it.

`fetch` downloads the lists of nodes and pods, and FGD's published results, into a folder and checks them. `replay` runs
the command on the seventeen inputs and writes results/fleet-replay.json: per input and policy the mean over the orders of
arrival, and as modes NAME-published the mean of FGD's own ten runs. `size` writes results/fleet-size.json, and
`time` results/fleet-time.json. `lifetimes`, `serving` and `usage` play Alibaba's traces of 2023, 2025 and 2026, MuxServe's
workloads and Prism's requests, and write results/fleet-NAME.json. `extender` runs the benchmark of the scheduler's extender with cargo and writes
results/fleet-extender.json; it needs no trace. Needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import json
import statistics
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import common
import fleet_traces as traces

SOURCE = "https://raw.githubusercontent.com/hkust-adsl/kubernetes-scheduler-simulator/8f3d6417353c5083c6d56617f255fadd8dc306bc/"
NODES = "data/csv/openb_node_list_gpu_node.csv"
EXPECTED = "experiments/analysis/expected_results/analysis_{}_discrete.csv"
SUMS = {
    "data/csv/openb_node_list_gpu_node.csv": "2beca64b4d3dfa342036a34b56a495c6cef9225db836c81f541282cb1df320b5",
    "experiments/analysis/expected_results/analysis_allo_discrete.csv": "e00aff5923a52d53e47c16ec9d19190de4e788c15334865a77bd46e1bd006ea1",
    "experiments/analysis/expected_results/analysis_frag_discrete.csv": "0d9181864ef9adb2169f232124c6af767579fe2a3c08f940419b4989420c8ce2",
    "data/csv/openb_pod_list_cpu050.csv": "747f43247bffc2b0bb081d7f61f0705ca8d390dafc0b647e642c92f3baf3ba1e",
    "data/csv/openb_pod_list_cpu100.csv": "bec1c33fbdde61fd463877534ec79b393aec73e1cbb22d55fab9f166ac480982",
    "data/csv/openb_pod_list_cpu200.csv": "b7e9d8a1a601da84d6e0b4110b19ef5001be5e4796d33e7b82f166ba95161f87",
    "data/csv/openb_pod_list_cpu250.csv": "134c21ff96d57533df8a37b67632972884fec9396e77cd0898ddc370cc8e607d",
    "data/csv/openb_pod_list_default.csv": "1ee7ed79c27a3b0861cda8ddba86a004c6aba904caafa329a76ae93ca63834a8",
    "data/csv/openb_pod_list_gpushare100.csv": "12dbc07d6a49bf8641e2275a2ff5bf7be74b5df7d148d531e135b140b95f9a3d",
    "data/csv/openb_pod_list_gpushare40.csv": "d83ce79a4eb6987524bedbb0c65e41aed3a36bf6c1b78b86234c3687a07e1d40",
    "data/csv/openb_pod_list_gpushare60.csv": "d31809628128a1f24491086eda4af3e23882b9213d3ef57a56ee2d1af69492fe",
    "data/csv/openb_pod_list_gpushare80.csv": "88b6649369ced40d0fde287d2498ea61ff4b05fccba8bdc95daf6042f2f8431e",
    "data/csv/openb_pod_list_gpuspec10.csv": "2dc7e4cb9480484f08539720b433a9ec9ab5d76b396f3f7557c53a2ff78a7611",
    "data/csv/openb_pod_list_gpuspec20.csv": "6b9b89ab8913c1c074e994e98f548cf1a872fc5f76f2442ca8cd514a478b00a9",
    "data/csv/openb_pod_list_gpuspec25.csv": "9d030679a2ccd7e27a7ec9ff15baff34480d22a0012515691fc187e3f35ee68c",
    "data/csv/openb_pod_list_gpuspec33.csv": "eca4f746db1e5b25864ad021b55ece3943e101a3ebd4574d09dcb95c46117652",
    "data/csv/openb_pod_list_multigpu20.csv": "d9ec6f6c74fb980cc0b81239470c6353fceea077ea9abd610003b604c7cc2b01",
    "data/csv/openb_pod_list_multigpu30.csv": "a5e479c6444b1d83eef848159cf00c3cfa13441b2d1e2c113c391b91f1cc5b11",
    "data/csv/openb_pod_list_multigpu40.csv": "32c9e8731ca07ef96108aa65f2a289bb9aacb47f642ed9e3789f99b242df60eb",
    "data/csv/openb_pod_list_multigpu50.csv": "206f2f5959db30ecb7c44e7f13197c8ec50b7a35558ad3777cc3662ef0fe5373",
}
CASES = [
    "default",
    *(f"cpu{percent}" for percent in ("050", "100", "200", "250")),
    *(f"gpushare{percent}" for percent in (40, 60, 80, 100)),
    *(f"gpuspec{percent}" for percent in (10, 20, 25, 33)),
    *(f"multigpu{percent}" for percent in (20, 30, 40, 50)),
]
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


def pods(case: str) -> str:
    """The list of pods of one input."""
    return f"data/csv/openb_pod_list_{case}.csv"


def checked(path: Path, name: str) -> bool:
    """Whether a file is there and is the one that was published."""
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == SUMS[name]


def fetch(folder: Path) -> None:
    """Downloads what is missing; fails on a file that is not the published one."""
    for name in SUMS:
        path = folder / name
        if not checked(path, name):
            path.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(SOURCE + name, timeout=60) as answer:
                path.write_bytes(answer.read())
            if not checked(path, name):
                raise common.BenchError(f"{SOURCE}{name} has another checksum than {SUMS[name]}: delete {path} and look at the source")


def fetch_more(folder: Path) -> None:
    """As `fetch`, for the traces of `fleet_traces`."""
    for source, names, expected in traces.SOURCES.values():
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


def rounded(values: dict[str, float | None]) -> dict[str, float]:
    """Values to five digits, without those that are not known."""
    return {name: float(f"{value:.5g}") for name, value in values.items() if value is not None}


def lifetimes(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Rows of the results file with tenants that come and go."""
    lists = folder / "lists"
    dlrm = traces.write(lists / "dlrm.csv", traces.PODS_HEAD, traces.dlrm_pods((folder / traces.DLRM).read_text()))
    nodes = traces.write(lists / "nodes-2026.csv", traces.NODES_HEAD, traces.spot_nodes((folder / traces.SPOT_NODES).read_text()))
    rows = []
    for case, where, what in (("2023", folder / NODES, folder / pods("default")), ("2025", nodes, dlrm)):
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
        measured = {how: traces.loaded(folder / traces.muxserve_measured(scale, how)) for how in traces.MEASURED}
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
        for row in csv.DictReader((folder / EXPECTED.format(what)).read_text().splitlines()):
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
    return {name: float(f"{value:.6g}") for name, value in values.items()}, around


def replay(folder: Path, cases: list[str], seeds: int) -> list[dict[str, Any]]:
    """Rows of the results file."""
    rows, own = [], published(folder)
    for case in cases:
        command = [common.gpumux(), "fleet", "simulate", "--nodes", str(folder / NODES), "--pods", str(folder / pods(case))]
        done = subprocess.run([*command, "--seeds", str(seeds), "--json"], check=True, capture_output=True, text=True)
        policies = json.loads(done.stdout)["policies"]
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


def write(bench: str, rows: list[dict[str, Any]], note: str, out: Path) -> None:
    """One results file."""
    data = {
        "bench": "fleet",
        "device": "none: a simulation",
        "driver": "none",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": common.commit(),
        "command": common.shown_command(sys.argv),
        "note": note,
        "rows": rows,
    }
    common.check_results(data)
    (out / f"fleet-{bench}.json").write_text(json.dumps(data, indent=1) + "\n")


def size(folder: Path, seeds: int) -> list[dict[str, Any]]:
    """Rows of the results file with the GPUs that the default input needs, and the made-up sample."""
    lists = ("--nodes", folder / NODES, "--pods", folder / pods("default"))
    rows = size_rows("default", asked("size", *lists, "--seeds", str(seeds), "--step", "20"), seeds)
    return rows + size_rows("sample", asked("size", *SAMPLE, "--seeds", str(SAMPLE_SEEDS)), SAMPLE_SEEDS)


def size_rows(case: str, found: dict[str, list[dict[str, Any]]], seeds: int) -> list[dict[str, Any]]:
    """One row per way of sharing: means over the orders."""
    rows = []
    for mode, needs in sorted(found.items(), key=lambda it: -statistics.fmean(need["gpus"] for need in it[1])):
        values = {name: statistics.fmean(need[name] for need in needs) for name in ("gpus", "attained")}
        for at, (used, _) in enumerate(needs[0]["best_effort"]):
            values[f"best_effort_rate_at_{used:.0f}"] = statistics.fmean(need["best_effort"][at][1] for need in needs)
        rows.append({"case": case, "mode": mode, "values": {name: float(f"{value:.5g}") for name, value in values.items()}, "samples": seeds})
    return rows


def time_rows(folder: Path, gpus: int) -> list[dict[str, Any]]:
    """Rows of the results file with the times of decisions on a large fleet."""
    rows = []
    for case in ("default", "gpuspec33"):
        command = [common.gpumux(), "fleet", "simulate", "--nodes", str(folder / NODES), "--pods", str(folder / pods(case))]
        done = subprocess.run([*command, "--gpus", str(gpus), "--json"], check=True, capture_output=True, text=True)
        report = json.loads(done.stdout)
        rows += [one_time(case, mode, report, runs[0]) for mode, runs in report["policies"].items() if mode in ("fgd", "gpumux")]
    return rows


def one_time(case: str, mode: str, report: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The times of one replay."""
    times = {name: run[name] for name in ("place_us_p50", "place_us_p99", "place_us_max", "prepare_ms")}
    values = {"gpus": report["gpus"], "nodes": report["nodes"], "placed": run["placed"]}
    return {"case": case, "mode": mode, "values": values | {name: float(f"{value:.3g}") for name, value in times.items()}}


def extender_rows(profile: str) -> list[dict[str, Any]]:
    """The row of the results file with the times of the scheduler's extender."""
    command = ["cargo", "bench", "--profile", profile, "-p", "gpumux-dra", "--bench", "extender"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=common.BENCH.parent)
    return [extender_row(json.loads(done.stdout.splitlines()[-1]))]


def extender_row(found: dict[str, float]) -> dict[str, Any]:
    """The row of one run."""
    names = {"p50_us": "order_us_p50", "p99_us": "order_us_p99", "max_us": "order_us_max", "learn_ms_max": "learn_ms", "allocated_percent": "allocated"}
    values = {names.get(name, name): value for name, value in found.items() if name not in ("requests", "learned")}
    values = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}
    return {"case": "extender", "mode": "prioritize", "values": values, "samples": int(found["requests"])}


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


EXTENDER_NOTE = (
    "Requests of a scheduler that names all nodes with room, from reading the request to the answer's JSON, without the "
    "network; pods of 24 kinds arrive until the GPUs are full. learn: the longest time to learn, beside requests."
)


def main() -> int:
    """Fetches, replays or sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fetch", "replay", "size", "time", "lifetimes", "serving", "usage", "extender"])
    parser.add_argument("--data", type=Path, help="folder of the trace, outside the repository")
    parser.add_argument("--profile", default="bench", help="cargo's profile, for `extender`")
    parser.add_argument("--cases", default=",".join(CASES), help="inputs, separated by commas")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=common.BENCH / "results")
    options = parser.parse_args()
    if options.what == "extender":
        write("extender", extender_rows(options.profile), EXTENDER_NOTE, options.out)
        return 0
    if options.data is None:
        parser.error(f"{options.what} needs --data FOLDER")
    fetch(options.data)
    if options.what in ("fetch", "lifetimes", "serving", "usage"):
        fetch_more(options.data)
    if options.what == "lifetimes":
        write("lifetimes", lifetimes(options.data, options.seeds), LIFETIMES_NOTE, options.out)
    if options.what == "serving":
        write("serving", serving(options.data, options.seeds), SERVING_NOTE, options.out)
    if options.what == "usage":
        write("usage", usage(options.data), USAGE_NOTE, options.out)
    if options.what == "replay":
        write("replay", replay(options.data, options.cases.split(","), options.seeds), NOTE, options.out)
    if options.what == "size":
        write("size", size(options.data, options.seeds), SIZE_NOTE, options.out)
    if options.what == "time":
        write("time", time_rows(options.data, 10_000), TIME_NOTE, options.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except common.BenchError as error:
        sys.exit(f"error: {error}")
