"""transformers with its key/value cache in elastic memory: it grows with the tokens, and others get what it does not need.

    from gpumux.transformers import ElasticCache

    model.generate(**inputs, past_key_values=ElasticCache(model))

Under `gpumux run` each layer's keys and values lie in an elastic range, one token behind the other, at addresses that stay: a token is written once,
where transformers' own cache copies all tokens for each new one. The memory is given back when the cache and all views of it are gone. What doesn't
fit (another version, a model on the processor, no `gpumux run`) has transformers' own memory, with a warning.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import warnings
import weakref
from typing import Any

try:
    import torch
    import transformers
except ImportError as error:
    raise ImportError(f"gpumux.transformers is for programs that have PyTorch and transformers: {error}") from error
try:
    from transformers import DynamicCache, StoppingCriteria
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise ImportError(
        f"gpumux.transformers is for transformers 5.17 to 5.24, not {transformers.__version__} ({error}): leave past_key_values out (the cache has "
        "transformers' own memory then)"
    ) from error

import gpumux
from gpumux import kv

VERSIONS = tuple(f"5.{minor}." for minor in range(17, 25))
_ALIGN = 128
"""Bytes at which keys and values of a token begin: attention kernels read them in pieces of up to 16 bytes."""
_SPARE = 4
"""Ranges that are kept for later caches: to make one, each of its granules is mapped."""

_spare: list[Any] = []
_later: list[Any] = []
"""Ranges that no cache uses: those without memory, and those that were let go during a capture, when the device can't be awaited."""


class Unfit(Exception):
    """Why a layer has transformers' own memory."""


def _device(states: Any) -> int:
    """The number of the GPU where these are. Raises Unfit."""
    if states.device.type != "cuda":
        raise Unfit(f"the model is on {states.device.type}, not on a GPU")
    return int(states.device.index)


def _first(ranges: list[Any]) -> Any:
    """Takes it, if there is one: other threads take some, too."""
    try:
        return ranges.pop(0)
    except IndexError:
        return None


class _Range:
    """An elastic range that is used by one cache after another."""

    def __init__(self, device: int, size: int, granule: int) -> None:
        try:
            self.range: Any = kv._Elastic(device, size, granule)
        except kv.PoolError as error:
            raise Unfit(str(error)) from None
        self.kind, self.device, self.address = self.range.kind, device, self.range.address
        self.granule, self.bytes = granule, size

    def _check_open(self) -> None:
        pass  # Its tensors keep it.

    def release(self) -> None:
        """No tensor of it is left: its memory is others', once the device has done what used it. Any thread may come here, at any time."""
        if sys.is_finalizing():
            return
        _later.append(self)
        if self.kind == "elastic" and torch.cuda.is_current_stream_capturing():
            return
        while it := _first(_later):
            if it.kind == "elastic":
                torch.cuda.synchronize(it.device)
            it.range.decommit(0, it.bytes // it.granule)
            _spare.append(it)
        while len(_spare) > _SPARE and (it := _first(_spare)):
            it.range.close()


class _Arena:
    """An elastic range in which layers of one cache lie, and one tensor of all of it, which keeps it."""

    def __init__(self, device: int, each: int, layers: int) -> None:
        granule = kv._granule_of(each * layers)
        size = math.ceil(each / granule) * granule * layers
        self.memory = next(filter(None, (self._reuse(it, device, size, granule) for it in list(_spare))), None) or _Range(device, size, granule)
        self.granule, self.used = granule, 0
        with torch.inference_mode(False):
            self.tensor = torch.from_dlpack(kv.Tensor(self.memory, (self.memory.bytes,), "uint8", released=self.memory.release))

    @staticmethod
    def _reuse(it: _Range, device: int, size: int, granule: int) -> _Range | None:
        if (it.device, it.granule) != (device, granule) or not size <= it.bytes <= 2 * size:
            return None
        try:
            _spare.remove(it)
        except ValueError:  # Another thread has it.
            return None
        return it

    def take(self, size: int) -> int | None:
        """Addresses for a layer: where they begin."""
        at, end = self.used, self.used + math.ceil(size / self.granule) * self.granule
        if end > self.memory.bytes:
            return None
        self.used = end
        return at


class _Rows:
    """A layer's place in an arena: a row for each token, with its keys and values."""

    def __init__(self, arena: _Arena, offset: int, size: int, keys: Any, values: Any) -> None:
        self.arena, self.first, self.size = arena, offset // arena.granule, size
        self.offset, self.committed = offset, 0
        self.shape(keys, values)

    def shape(self, keys: Any, values: Any) -> None:
        """What a row has: of each sequence and head so many numbers."""
        self.row = _row_bytes(keys, values)
        self.most = self.size // self.row
        item = keys.element_size()
        area = self.arena.tensor[self.offset : self.offset + self.most * self.row].view(keys.dtype).view(self.most, self.row // item)
        split = _padded(keys) // item
        self.keys, self.values = _rows_of(area, 0, keys), _rows_of(area, split, values)

    def reserve(self, tokens: int, wait_s: float) -> None:
        """Has memory behind so many rows."""
        lacking = math.ceil(tokens * self.row / self.arena.granule) - self.committed
        if lacking <= 0:
            return
        if self.arena.memory.range.commit(self.first + self.committed, lacking, wait_s):
            raise torch.cuda.OutOfMemoryError(
                f"gpumux: {lacking * self.arena.granule >> 20} MiB for the key/value cache of {tokens} tokens were not to be had on device "
                f"{self.arena.memory.device} within {wait_s:g} s: use a smaller batch, or raise the tenant's guarantee or limit (`gpumux memory` lists the "
                "memory of all tenants)"
            )
        self.committed += lacking

    def write(self, at: int, keys: Any, values: Any) -> None:
        end = at + keys.shape[-2]
        self.keys[at:end].copy_(keys.permute(2, 0, 1, 3))
        self.values[at:end].copy_(values.permute(2, 0, 1, 3))

    def views(self, tokens: int) -> tuple[Any, Any]:
        """As transformers has them: sequence, head, token, number."""
        return self.keys[:tokens].permute(1, 2, 0, 3), self.values[:tokens].permute(1, 2, 0, 3)

    def has(self, keys: Any, values: Any) -> bool:
        """Whether these are its first rows."""
        own = self.views(keys.shape[-2])
        pairs = ((keys, own[0]), (values, own[1]))
        return all(it.data_ptr() == mine.data_ptr() and it.shape == mine.shape and it.stride() == mine.stride() for it, mine in pairs)


def _padded(states: Any) -> int:
    """Bytes of one token's keys or values."""
    batch, heads, _tokens, numbers = states.shape
    return int(math.ceil(batch * heads * numbers * states.element_size() / _ALIGN) * _ALIGN)


def _row_bytes(keys: Any, values: Any) -> int:
    return _padded(keys) + _padded(values)


def _rows_of(area: Any, begin: int, states: Any) -> Any:
    batch, heads, _tokens, numbers = states.shape
    return area[:, begin : begin + batch * heads * numbers].unflatten(1, (batch, heads, numbers))


class _Memory:
    """The elastic memory of one cache's layers."""

    def __init__(self, layers: int, max_length: int, wait_s: float) -> None:
        self.whole = self.layers = layers
        self.max_length, self.wait_s = max_length, wait_s
        # The layers in it keep an arena.
        self.arenas: list[weakref.ref[_Arena]] = []
        self.unfit: Unfit | None = None

    def __deepcopy__(self, _memo: Any) -> _Memory:
        return _Memory(self.whole, self.max_length, self.wait_s)

    def rows(self, keys: Any, values: Any) -> _Rows:
        """A place for one layer. Raises Unfit."""
        if self.unfit:
            raise self.unfit
        try:
            return self._rows(keys, values)
        except Unfit as why:
            self.unfit = why
            raise

    def _rows(self, keys: Any, values: Any) -> _Rows:
        device = _device(keys)
        size = max(self.max_length, keys.shape[-2]) * _row_bytes(keys, values)
        for arena in filter(None, (it() for it in self.arenas)):
            at = arena.take(size) if arena.memory.device == device else None
            if at is not None:
                break
        else:
            arena = _Arena(device, size, max(1, self.layers))
            self.arenas.append(weakref.ref(arena))
            at = arena.take(size) or 0
        self.layers -= 1
        return _Rows(arena, at, size, keys, values)


class ElasticLayer(DynamicLayer):  # type: ignore[misc,unused-ignore]
    """transformers' layer of a cache that grows, with elastic memory."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory
        self._rows: Any = None
        self.keys: Any
        self.values: Any

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        super().lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling() or key_states.requires_grad:
            return
        try:
            self._rows = self._memory.rows(key_states, value_states)
        except Unfit as why:
            _warn(str(why))

    def __deepcopy__(self, memo: Any) -> ElasticLayer:
        """The next update puts the copied tokens into a range of the copy's own."""
        made = copy.copy(self)
        memo[id(self)], made._rows = made, None
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                # Without what lies beside it in the range.
                setattr(made, name, value.clone())
            elif name != "_rows":
                setattr(made, name, copy.deepcopy(value, memo))
        if self._rows is not None and self.is_initialized:
            with contextlib.suppress(Unfit):
                made._rows = made._memory.rows(made.keys, made.values)
        return made

    def update(self, key_states: Any, value_states: Any, *arguments: Any, **options: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._rows is None:
            return super().update(key_states, value_states, *arguments, **options)
        there = self.get_seq_length()
        end = there + key_states.shape[-2]
        if key_states.requires_grad or not self._keep(there, key_states, value_states) or end > self._rows.most:
            # The memory is others' once all layers have left it, and all views of it are gone.
            self._rows = None
            return super().update(key_states, value_states, *arguments, **options)
        self._rows.reserve(end, self._memory.wait_s)
        self._rows.write(there, key_states, value_states)
        self.keys, self.values = self._rows.views(end)
        return self.keys, self.values

    def _keep(self, tokens: int, key_states: Any, value_states: Any) -> bool:
        """Has all tokens in elastic memory: another method may have put others in their place, such as those of a beam search. Whether they fit."""
        if not tokens:
            self._rows.shape(key_states, value_states)
            return True
        if self._rows.has(self.keys, self.values):
            return True
        # They may be some of its own rows.
        keys, values = self.keys.clone(), self.values.clone()
        self._rows.shape(keys, values)
        if tokens > self._rows.most:
            return False
        self._rows.reserve(tokens, self._memory.wait_s)
        self._rows.write(0, keys, values)
        return True


def _before(layer: Any) -> Any:
    """What a layer has before a step: so many tokens, or, of a sliding window, its tensors, which a step replaces."""
    return layer.get_seq_length() if isinstance(layer, ElasticLayer) else vars(layer).copy()


def _set_back(layer: Any, before: Any) -> None:
    if not isinstance(layer, ElasticLayer):
        vars(layer).clear()
        vars(layer).update(before)
    elif layer.get_seq_length() > before:
        layer.keys, layer.values = layer.keys[..., :before, :], layer.values[..., :before, :]


class ElasticCache(DynamicCache):  # type: ignore[misc,unused-ignore]
    """A cache for one model, or its configuration.

    Layers with full attention have elastic memory; others, such as those with a sliding window, have transformers' own. `max_length` tokens are
    addresses only, by default as many as the model has positions for; a longer cache goes on in transformers' own memory. Memory that others have is
    awaited for `wait_s`; then torch.cuda.OutOfMemoryError is raised, and layers with full attention and sliding windows are as before.
    """

    def __init__(self, model: Any, max_length: int | None = None, *, wait_s: float = 30.0) -> None:
        if max_length is not None:
            max_length = gpumux._whole("max_length", max_length, 1 << 40, 1)
        wait_s = float(wait_s)
        config = getattr(model, "config", model)
        # Of the layers that have a step's tokens already: what they had before.
        self._step: dict[int, Any] = {}
        super().__init__(config=config)
        if not transformers.__version__.startswith(VERSIONS):
            _warn(f"transformers {transformers.__version__} is not one of {VERSIONS[0]}x to {VERSIONS[-1]}x")
            return
        text = config.get_text_config(decoder=True)
        own = [number for number, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        memory = _Memory(len(own), max_length or getattr(text, "max_position_embeddings", None) or 32768, wait_s)
        for number in own:
            self.layers[number] = ElasticLayer(memory)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, layer_idx, *arguments, **options)
        if layer_idx in self._step:  # Another step begins.
            self._step = {}
        self._step[layer_idx] = _before(self.layers[layer_idx])
        try:
            found = super().update(key_states, value_states, layer_idx, *arguments, **options)
        except BaseException:  # Memory was refused, or the wait for it was interrupted.
            for number, before in self._step.items():
                _set_back(self.layers[number], before)
            self._step = {}
            raise
        if layer_idx == len(self.layers) - 1:
            self._step = {}
        return found

    @property
    def elastic(self) -> bool:
        """Whether there are tokens in elastic memory."""
        return any(getattr(layer, "_rows", None) is not None for layer in self.layers)

    @property
    def committed(self) -> int:
        """Bytes of memory behind its tokens."""
        arenas = {id(it._rows.arena): it._rows.arena for it in self.layers if getattr(it, "_rows", None)}
        return sum(arena.memory.range.committed() for arena in arenas.values())


class Tokens(StoppingCriteria):  # type: ignore[misc,unused-ignore]
    """Reports new tokens as progress, for scaling profiles: `model.generate(…, stopping_criteria=[gpumux.transformers.Tokens()])`. It stops nothing.

    Each call of `generate` has one of its own. The first step counts as one token, also where an assistant guessed more. With beams, each candidate of a
    step counts, of which there are two or more for a beam.
    """

    _length = 0

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        sequences, length = input_ids.shape
        # How long the prompt is, is not known.
        new = length - self._length if 0 < self._length < length else 1
        self._length = length
        gpumux.progress(sequences * new)
        return torch.zeros(sequences, dtype=torch.bool, device=input_ids.device)


def _warn(why: str) -> None:
    warnings.warn(f"gpumux: the key/value cache has transformers' own memory: {why}", stacklevel=2)
