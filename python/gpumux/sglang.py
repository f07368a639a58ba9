"""SGLang with an elastic KV cache, and new tokens as progress for scaling profiles, by hooks of its own registry (`sglang.srt.plugins`).

    GPUMUX_KV=elastic gpumux run -- sglang serve --model-path MODEL

SGLang finds `plugin` by the entry point of the installed package (`pip install` of the wheel that you built) and calls it in every process it starts.
Without `GPUMUX_KV` it only counts tokens; without `gpumux run` it registers nothing.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import gpumux

TARGET = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
VERSIONS = "0.5.15 to 0.5.23"
_unfit = False


def plugin() -> None:
    """Registers the hook. Raises ImportError where SGLang has no registry."""
    if not gpumux.present():
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        raise ImportError(f"gpumux.sglang is for SGLang {VERSIONS}, which have a registry of hooks: {error}") from error
    HookRegistry.register(TARGET, count, HookType.AFTER)
    wish = os.environ.get("GPUMUX_KV") or "fixed"
    if wish not in ("fixed", "elastic"):
        warnings.warn(f"gpumux.sglang: the KV cache has a fixed size: GPUMUX_KV is 'elastic' or 'fixed', not {wish!r}", stacklevel=2)
    if wish == "elastic":
        from gpumux import _sglang

        try:
            _sglang.register(HookRegistry, HookType)
        except (ImportError, _sglang.Unfit) as error:
            warnings.warn(f"gpumux.sglang is for SGLang {VERSIONS}: the KV cache has a fixed size: {error}", stacklevel=2)


def count(_result: Any, scheduler: Any, batch: Any, output: Any) -> None:
    """Counts as SGLang's own throughput does: a token for each request of a decoding step, and drafts that were right. One rank counts for all of its group."""
    global _unfit
    if _unfit:
        return
    try:
        if scheduler.ps.attn_tp_rank or scheduler.ps.pp_rank or not batch.forward_mode.is_decode():
            return
        gpumux.progress(len(batch.reqs) + (output.num_correct_drafts or 0))
    except (AttributeError, TypeError) as error:
        _unfit = True
        warnings.warn(f"gpumux.sglang is for SGLang {VERSIONS}: tokens are not counted ({error})", stacklevel=2)
