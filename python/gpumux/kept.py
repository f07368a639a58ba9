"""Device memory that outlives a fault of another member of the program's MPS group.

    import gpumux.kept

    state = gpumux.kept.Buffer("train", 64 << 20)
    weights = torch.from_dlpack(state.tensor((1024, 1024), "float32"))
    step = state.step if state.found else 0   # found: the contents are those of that commit
    if not state.found:
        torch.nn.init.normal_(weights)        # a new buffer is zero
    while True:
        train(weights)                        # in place
        step += 1
        state.commit(step, torch.cuda.current_stream().cuda_stream)

or, for tensors of PyTorch's that are there already (`examples/kept/train.py`):

    state = gpumux.kept.tensors("train", [*model.parameters()])

Under `gpumux run --restart on-collateral --keep-memory` the program that runs again after a fault finds its buffers by their names. A buffer
takes twice its bytes of the device's memory, and stays there. Elsewhere it is ordinary memory: `Buffer.kind` and a warning say so.
"""

from __future__ import annotations

import ctypes
import math
import warnings
from typing import Any, Iterable, Sequence

import gpumux
from gpumux import kv

_DONE, _FOUND, _NOT_KEPT = 0, 3, -5
_NAME, _LARGEST = 128, 1 << 44
"""Most bytes of a name and of a buffer."""
_UNIT = 512
"""Alignment of tensors in a buffer."""
_WHY = {
    1: "another process of the tenant has it, or the device has no room",
    2: "it exceeds the tenant's memory limit, or all other memory is guaranteed",
    -1: "a process has each buffer once",
    -2: "no context of the device is current",
    -3: "gpumux leaves this program's memory to the driver (GPUMUX_MEMORY=native, peer access, or a forked child)",
    -4: "the driver or `gpumux run` refuses",
    _NOT_KEPT: "no supervisor keeps it (start the program with `gpumux run --trust NAME --restart on-collateral --keep-memory`)",
}

_keep = gpumux._function(
    "gpumux_keep", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p
)
_commit = gpumux._function("gpumux_keep_commit", ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)
_end = gpumux._function("gpumux_keep_end", ctypes.c_int, ctypes.c_uint64)


class KeptError(RuntimeError):
    """A buffer cannot be made, committed or ended."""


class Buffer:
    """So many bytes of one device's memory, at an address that stays while the process lives.

    With `fallback=False` it is an error where nothing keeps it.
    """

    def __init__(self, name: str, nbytes: int, *, device: int = 0, fallback: bool = True) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a name is text, not {name!r}")
        try:
            fits = 0 < len(name.encode()) <= _NAME and "\0" not in name
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise ValueError(f"a name has 1 to {_NAME} bytes of UTF-8 and no zero, not {name!r}")
        nbytes, device = gpumux._whole("nbytes", nbytes, _LARGEST, 1), gpumux._whole("device", device, gpumux._INT_MAX)
        self.name, self.nbytes, self.device = name, nbytes, device
        self.kind = "kept"
        """`kept`, or `device`: ordinary memory, that ends with the process."""
        self.found = False
        """Its contents are those of a commit before a fault; else all of it is zero."""
        self.step = 0
        """The step of the last commit."""
        self._closed = False
        try:
            self._driver = kv._Driver(device)
        except kv.PoolError as error:
            raise KeptError(f"{nbytes} bytes named {name!r} on device {device}: {error}") from None
        address, step = ctypes.c_uint64(), ctypes.c_uint64()
        answer = _NOT_KEPT
        if _keep:
            with self._driver.current():
                answer = _keep(name.encode(), device, nbytes, ctypes.byref(address), ctypes.byref(step))
        if answer in (_DONE, _FOUND):
            self.address = int(address.value)
            self.found, self.step = answer == _FOUND, int(step.value)
            return
        why = f"{nbytes} bytes named {name!r} on device {device} are not kept over a fault: {_WHY.get(answer, answer)}"
        if not fallback or answer not in (_NOT_KEPT, -3):
            raise KeptError(why)
        self.kind = "device"
        try:
            self.address = self._driver.alloc(nbytes)
            with self._driver.current():
                self._driver.call("cuMemsetD8_v2", ctypes.c_uint64(self.address), 0, ctypes.c_size_t(nbytes))
                # A non-blocking stream of the program does not wait for the default stream.
                self._driver.call("cuStreamSynchronize", None)
        except kv.PoolError as error:
            raise KeptError(f"{why}; {error}") from None
        warnings.warn(f"gpumux.kept: {why}", stacklevel=2)

    def commit(self, step: int, stream: int = 0) -> None:
        """Commits what the buffer has once the stream (a `CUstream`, as `torch.cuda.Stream.cuda_stream`) has come so far; returns at once.
        After a fault, the contents are those of the last commit that the device had done."""
        self._check_open()
        step, stream = gpumux._whole("step", step, gpumux._U64_MAX), gpumux._whole("stream", stream, gpumux._U64_MAX)
        if self.kind == "kept" and (answer := _commit(self.address, step, stream)):
            raise KeptError(f"step {step} of {self.name!r} is not committed: {_WHY.get(answer, answer)}")
        self.step = step

    def tensor(self, shape: Sequence[int] | None = None, dtype: str = "uint8", offset: int = 0) -> kv.Tensor:
        """A part of it, for `torch.from_dlpack` and others: all bytes, or as it is said."""
        _code, bits = kv._dtype(dtype)
        offset = gpumux._whole("offset", offset, 1 << 62, -(1 << 62))
        if offset * 8 % bits:
            raise ValueError(f"{dtype} begins at a multiple of its {bits // 8} bytes, not at {offset}")
        shape = tuple(kv._numbers("a length", shape)) if shape is not None else ((self.nbytes - offset) * 8 // bits,)
        size = math.prod(shape) * bits // 8
        if offset < 0 or any(it < 0 for it in shape) or offset + size > self.nbytes:
            raise ValueError(f"{shape} of {dtype} at {offset} is more than {self.nbytes} bytes")
        return kv.Tensor(self, shape, dtype, offset)

    def end(self) -> None:
        """Frees it, also for the program's next start. Tensors of it must not be used any more."""
        self._check_open()
        self._closed = True
        if self.kind == "device":
            try:
                self._driver.free(self.address)
            except kv.PoolError as error:
                raise KeptError(f"{self.name!r} cannot be freed: {error}") from None
        elif answer := _end(self.address):
            raise KeptError(f"{self.name!r} cannot be freed: {_WHY.get(answer, answer)}")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the buffer has ended")


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of so many bytes are in a buffer, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _UNIT) * _UNIT
    return offsets, end


def tensors(name: str, originals: Iterable[Any], *, fallback: bool = True) -> Buffer:
    """Has PyTorch's tensors of one device in a kept buffer: each gets its memory there, by `tensor.data`. Contents are those of the last commit
    before a fault (`Buffer.found`), else what the tensors have. Commit the buffer on a stream that is ordered behind all that writes to them.
    """
    import torch  # Only programs that have it use this.

    originals = list(originals)
    places = {it.device for it in originals}
    if [it.type for it in places] != ["cuda"]:
        raise ValueError(f"kept tensors are of one CUDA device, not of {', '.join(sorted(map(str, places))) or 'none'}")
    (place,) = places
    if any(not it.is_contiguous() for it in originals):
        raise ValueError("kept tensors are contiguous")
    offsets, size = layout(it.numel() * it.element_size() for it in originals)
    device = place.index if place.index is not None else torch.cuda.current_device()
    with torch.cuda.device(device):
        buffer = Buffer(name, max(1, size), device=device, fallback=fallback)
        whole = torch.from_dlpack(buffer.tensor())
        for original, offset in zip(originals, offsets):
            bytes_of = original.numel() * original.element_size()
            view = whole[offset : offset + bytes_of].view(original.dtype).view(original.shape)
            if not buffer.found:
                view.copy_(original.data)
            original.data = view
        # Other streams may use the tensors at once, and the memory that they had before.
        torch.cuda.current_stream().synchronize()
    return buffer
