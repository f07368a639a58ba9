#!/usr/bin/env python3
"""Brings the list of CUDA driver entry points up to the headers of a CUDA release.

    tools/cuda_entry_points.py INCLUDE_DIR            reports what is new or different; exit status 1 if anything is
    tools/cuda_entry_points.py INCLUDE_DIR --write    writes it into the list

INCLUDE_DIR holds cuda.h, cudaTypedefs.h and their neighbours for GL, EGL, VDPAU and the profiler: the wheels
nvidia-cuda-runtime and nvidia-cuda-profiler-api have them in nvidia/cu13/include. Facts are taken from them (names, versions,
kinds of arguments), no text. A new function gets the class `?`: the build refuses it until it has one.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parent.parent / "crates/gpumux-cuda/src/entry_points.txt"
HEADERS = ["cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h", "cudaProfiler.h"]
# Passed by value, 64 bytes each.
STRUCTURES = {"CUipcMemHandle", "CUipcEventHandle", "CUeglFrame"}
# Exported, and named by a macro of cuda.h only.
BESIDES = {("cuGetProcAddress_v2_ptsz", "cuGetProcAddress", 12000)}


def kind(argument):
    """One letter for one argument of a declaration."""
    words = re.sub(r"[*\[]", r" \g<0> ", argument).split()
    if "*" in words or "[" in words:
        return "c" if "CUlaunchConfig" in words else "i"
    words = [word for word in words if word not in ("const", "unsigned")]
    return {"CUstream": "s", "float": "f"}.get(words[0], "b" if words[0] in STRUCTURES else "i")


def read(include):
    """Symbols with their arguments, and versions by name and suffix."""
    arguments, versions = {}, defaultdict(set)
    renamed = set()
    for name in HEADERS:
        text = (include / name).read_text()
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
        for symbol, inside in re.findall(r"CUDAAPI\s+(cu[A-Z]\w*)\s*\(([^;{]*?)\)\s*;", text):
            inside = " ".join(inside.split())
            # The first declaration of a name is of its newest form; the old one has the name itself.
            arguments.setdefault(symbol, []).append(
                "" if inside in ("", "void") else "".join(kind(it) for it in inside.split(","))
            )
        renamed |= set(re.findall(r"#\s*define\s+(cu[A-Z]\w*)\s+(cu[A-Z]\w*)[ \t]*$", text, flags=re.M))
        for suffix, symbol in re.findall(r"__CUDA_API_(PTSZ|PTDS)\((cu\w+)\)", text):
            renamed.add((symbol, f"{symbol}_{suffix.lower()}"))
    for path in include.glob("cuda*Typedefs.h"):
        found = re.findall(r"PFN_(cu[A-Z]\w*?)_v(\d+)(_ptsz|_ptds|)\)", path.read_text())
        for name, version, suffix in found:
            versions[name, suffix].add(int(version))
    symbols = set(arguments) | {new for _, new in renamed}
    return symbols, arguments, renamed, versions


def signature(symbol, arguments, renamed):
    """The arguments of a symbol, by its own declaration or that of the name that it goes by."""
    if symbol in arguments:
        # A name that a macro renames is declared first as the newest form, and last as itself.
        return arguments[symbol][-1]
    names = [old for old, new in renamed if new == symbol]
    plain = re.sub(r"_pt[ds][sz]$", "", symbol)
    for it in [*names, plain, re.sub(r"_v\d+$", "", plain)]:
        if it in arguments:
            return arguments[it][0]
    sys.exit(f"{symbol} is declared nowhere")


def facts(include):
    """Symbol -> name, version, arguments: of a name's versions the n-th belongs to the n-th form."""
    symbols, arguments, renamed, versions = read(include)
    found, number = {}, lambda it: int((re.search(r"_v(\d+)", it) or [0, 1])[1])
    for (name, suffix), known in versions.items():
        forms = [it for it in symbols if re.fullmatch(rf"{name}(_v\d+)?{suffix}", it)]
        if len(forms) != len(known):
            sys.exit(f"{name}{suffix}: versions {sorted(known)} do not fit the forms {sorted(forms)}")
        for version, symbol in zip(sorted(known), sorted(forms, key=number)):
            found[symbol] = (name, version, signature(symbol, arguments, renamed) or "-")
    for symbol, name, version in BESIDES:
        found[symbol] = (name, version, signature(symbol, arguments, renamed))
    return found


def listed():
    """The list's heading, and its lines by symbol."""
    lines = LIST.read_text().splitlines()
    heading = [line for line in lines if line.startswith("#")]
    return heading, {line.split()[0]: line.split()[1:] for line in lines if not line.startswith("#")}


def main():
    include = Path(sys.argv[1])
    found, (heading, known) = facts(include), listed()
    new, different = [], 0
    for symbol, (name, version, arguments) in found.items():
        old = known.get(symbol)
        if old is None:
            plain = known.get(re.sub(r"_pt[ds][sz]$", "", symbol))
            new.append(symbol)
            known[symbol] = [name, str(version), arguments, *(plain[3:] if plain else ["?"])]
        elif old[:3] != [name, str(version), arguments]:
            print(f"different: {symbol} {name} {version} {arguments}, the list has {' '.join(old[:3])}")
            known[symbol][:3] = [name, str(version), arguments]
            different += 1
    for symbol in sorted(new):
        print(f"new: {symbol} {' '.join(known[symbol])}")
    for symbol in sorted(set(known) - set(found)):
        print(f"no longer declared, stays in the list: {symbol}")
    if "--write" in sys.argv[2:]:
        lines = [" ".join([symbol, *known[symbol]]) for symbol in sorted(known)]
        LIST.write_text("\n".join([*heading, *lines]) + "\n")
    elif new or different:
        sys.exit(1)


if __name__ == "__main__":
    main()
