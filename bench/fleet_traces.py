"""Public traces, as the lists that `gpumux fleet` reads.

Each source is a set of files with one checksum: the SHA-256 of their SHA-256 sums, in order. `SOURCES` names them. The lists of FGD's experiment
are read as they are; the functions below turn the others into CSV files beside them. Nothing of a trace is part of the repository.
"""

from __future__ import annotations

import csv
import hashlib
import io
import pickle
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RAW = "https://raw.githubusercontent.com/"
FGD = RAW + "hkust-adsl/kubernetes-scheduler-simulator/8f3d6417353c5083c6d56617f255fadd8dc306bc/"
ALIBABA = RAW + "alibaba/clusterdata/7a6c496e4f4b6ce6150be8f881cb051bf2abff42/"
MUXSERVE = RAW + "hao-ai-lab/MuxServe/223148033454e4740f4b4617c72910c370a5604b/"
PRISM = RAW + "Multi-LLM/prism-research/595ec1f170e75a43897a7a2ad58ac5a9820aa2e8/"

NODES = "data/csv/openb_node_list_gpu_node.csv"
PODS = "data/csv/openb_pod_list_{}.csv"
EXPECTED = "experiments/analysis/expected_results/analysis_{}_discrete.csv"
# Inputs of FGD's experiment.
CASES = [
    "default",
    *(f"cpu{percent}" for percent in ("050", "100", "200", "250")),
    *(f"gpushare{percent}" for percent in (40, 60, 80, 100)),
    *(f"gpuspec{percent}" for percent in (10, 20, 25, 33)),
    *(f"multigpu{percent}" for percent in (20, 30, 40, 50)),
]
DLRM = "cluster-trace-gpu-v2025/disaggregated_DLRM_trace.csv"
SPOT_NODES = "cluster-trace-v2026-spot-gpu/node_info_df.csv"
GENAI = "cluster-trace-v2026-GenAI/pod_gpu_{}_anon"
GENAI_WHAT = ("duty_cycle", "memory_used_bytes")
PROFILE = "examples/placement/llama.json"
REQUESTS = "benchmark/multi-model/real_trace.pkl"
# MuxServe's rates are the hours of day 55 of a chat service, made so many times denser.
SCALES = {500: (8, 2), 800: (13, 4), 1200: (19, 6), 1600: (26, 8), 2000: (32, 11)}
MEASURED = ("flexsm", "spatial", "temporal")

# Llama's own numbers: weights as MuxServe counts them (2 GB per billion parameters), bytes of a token's keys and values, and
# the fewest GPUs of MuxServe's profile.
LLAMA = {
    "llama-7b": (14 * 1024, 32 * 4096 * 4, 1),
    "llama-13b": (26 * 1024, 40 * 5120 * 4, 1),
    "llama-30b": (60 * 1024, 60 * 6656 * 4, 2),
    "llama-65b": (130 * 1024, 80 * 8192 * 4, 4),
}
# Mean tokens of a prompt and of an answer in MuxServe's planner.
TOKENS = (161, 337)


def muxserve_workload(scale: int) -> str:
    """Name of one of MuxServe's workloads."""
    most, mean = SCALES[scale]
    return f"requests_over_time_models_days_from_day55_to_day55_condense{scale}_N17_maxrate_{most}_avgrate_{mean}"


def muxserve_rates(scale: int) -> str:
    """The file with a workload's models and rates."""
    return f"benchmark/chatlmsys/yamls/{muxserve_workload(scale)}.yaml"


def muxserve_measured(scale: int, how: str) -> str:
    """The file with what MuxServe's authors measured on 32 A100, and with the placement."""
    name = muxserve_workload(scale)
    return f"benchmark/chatlmsys/merged/merged_{name}_placement_{name}_GPUnum32_{how}.json"


SOURCES: dict[str, tuple[str, list[str], str]] = {
    "fgd": (FGD, [NODES, *map(EXPECTED.format, ("allo", "frag")), *map(PODS.format, CASES)], "b8c09fd91d8d084804cfca40541c1674bf1d43fe5470de16d8db3fa1ea51fcc8"),
    "alibaba": (ALIBABA, [DLRM, SPOT_NODES, *(GENAI.format(what) + ".tar.gz" for what in GENAI_WHAT)], "f3d026525ce25ea9c595c3daec8b2613e2c7dcb32345798fd79f1e57aab2d8f0"),
    "muxserve": (
        MUXSERVE,
        [PROFILE, *map(muxserve_rates, SCALES), *(muxserve_measured(scale, how) for scale in SCALES for how in MEASURED)],
        "f3b85936b262eb9fcbc46c1203bc6dfd258944259c058cd544ca20b1665def46",
    ),
    "prism": (PRISM, [REQUESTS], "cfda6cec74b210a70b3ed9c4ff74360ca4c1d852b4ccca288e4c54c737c5dd8f"),
}


def checksum(folder: Path, names: Iterable[str]) -> str:
    """The checksum of a set of files; those that are missing count as empty."""
    each = ((folder / name).read_bytes() if (folder / name).exists() else b"" for name in names)
    return hashlib.sha256("".join(hashlib.sha256(text).hexdigest() for text in each).encode()).hexdigest()


def write(path: Path, head: str, rows: Iterable[Iterable[Any]]) -> Path:
    """A list as a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head.split(","))
        writer.writerows(rows)
    return path


# --- tenants that come and go ---------------------------------------------------------------------

NODES_HEAD = "sn,cpu_milli,memory_mib,gpu,model"
PODS_HEAD = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,creation_time,deletion_time"


def dlrm_pods(text: str) -> list[list[Any]]:
    """Alibaba's recommendation models of 2025: the instances with a GPU. Those that ran before the trace began come first."""

    def row(it: dict[str, str]) -> list[Any]:
        at = [int(float(it[when])) if it[when] else "" for when in ("creation_time", "deletion_time")]
        return [it["instance_sn"], int(it["cpu_request"]) * 1000, 0, it["gpu_request"], 1000, "", "LS", at[0] or 0, at[1]]

    return [row(it) for it in csv.DictReader(text.splitlines()) if it["role"] == "HN"]


def spot_nodes(text: str) -> list[list[Any]]:
    """Alibaba's nodes of 2026; the list does not tell of their memory."""
    rows = csv.DictReader(text.splitlines())
    return [[it["node_name"], int(it["cpu_num"]) * 1000, 0, it["gpu_capacity_num"], it["gpu_model"]] for it in rows]


# --- models that serve --------------------------------------------------------------------------

MODELS_HEAD = "name,model,rate,prompt_tokens,output_tokens,weights_mib,kv_bytes,fewest_gpus"


def muxserve_models(text: str) -> list[list[Any]]:
    """A workload's models with their rates."""
    found = re.findall(r"name: (\S+)\s+model: \S+/(llama-\w+)\s+rate: ([\d.]+)", text)
    return [[name, model, rate, *TOKENS, *LLAMA[model]] for name, model, rate in found]


def measured_models(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured of each model; the file has totals beside them."""
    return {name: it for name, it in data.items() if isinstance(it, dict)}


def muxserve_placement(data: dict[str, Any]) -> list[list[Any]]:
    """The placement that was measured: groups of GPUs, and each model's percent of them while it decodes."""

    def row(name: str, it: dict[str, Any]) -> list[Any]:
        found = re.search(r"mesh_size(\d+)_idx(\d+)", it["origin_file"])
        if not found:
            raise ValueError(f"{it['origin_file']} names no group of GPUs")
        return [found[2], found[1], name, it["mps"][1]]

    return [row(name, it) for name, it in measured_models(data).items()]


def muxserve_served(data: dict[str, Any], rates: dict[str, float]) -> float:
    """Requests that were served while they came, in percent of those that came."""
    served = sum(min(it["throughput"], rates[name]) for name, it in measured_models(data).items())
    return served * 100 / sum(rates.values())


# --- recorded use ---------------------------------------------------------------------------------

USAGE_HEAD = "tenant,window,gpu_milli,memory_mib"
REQUESTS_HEAD = "name,at_s,prompt_tokens,output_tokens"
# Alibaba's monitoring of 2026 takes a sample so often, in seconds.
GENAI_WINDOW = 57


def in_tar(path: Path) -> str:
    """The CSV file in an archive."""
    with tarfile.open(path) as archive:
        name = next(it.name for it in archive if it.name.endswith(".csv") and not Path(it.name).name.startswith("._"))
        file = archive.extractfile(name)
        if file is None:
            raise ValueError(f"{path} holds no CSV file")
        return io.TextIOWrapper(file).read()


def genai_usage(duty: str, memory: str) -> list[list[Any]]:
    """Duty cycle and GPU memory of the pods of an image generation service: a pod has one GPU."""

    def samples(text: str) -> dict[tuple[str, float], float]:
        return {(it["container_ip"], float(it["timestamp_anon"])): float(it["value"]) for it in csv.DictReader(text.splitlines())}

    used, held = samples(duty), samples(memory)
    begin = min(at for _, at in used)
    both = sorted(set(used) & set(held))
    return [[pod, round((at - begin) / GENAI_WINDOW), round(used[pod, at] * 10), round(held[pod, at] / 2**20)] for pod, at in both]


class OneRequest:
    """What a pickled request of Prism's trace is read as."""

    adapter_dir: str
    req_time: float
    prompt_len: int
    output_len: int


class Reader(pickle.Unpickler):
    """Reads a pickle that may hold requests and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The only class."""
        if (module, name) != ("trace", "Request"):
            raise pickle.UnpicklingError(f"the trace holds a {module}.{name}: only trace.Request is read")
        return OneRequest


def prism_requests(data: bytes) -> list[list[Any]]:
    """Requests to 27 models of a chat service, in order of arrival."""
    _, requests = Reader(io.BytesIO(data)).load()
    rows = [[it.adapter_dir.rpartition("-")[2], it.req_time, it.prompt_len, it.output_len] for it in requests]
    return sorted(rows, key=lambda row: row[1])


def prism_models(rows: list[list[Any]], model: str) -> list[list[Any]]:
    """Each model of the requests, as if it were this one; requests have lengths of their own, and no rate is needed."""
    names = sorted({row[0] for row in rows}, key=int)
    return [[name, model, 1, *TOKENS, *LLAMA[model]] for name in names]
