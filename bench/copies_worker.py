"""A program that copies pinned memory to or from the device all the time, by the driver's calls, for `copies.py`.

`copies_worker.py PIECE`: bytes of a copy. Takes orders on its standard input, a line of JSON each.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections import deque
from typing import Any

AHEAD = 4  # copies queued
DISABLE_TIMING = 2
NON_BLOCKING = 1

cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver."""
    error = getattr(cuda, name)(*arguments)
    if error:
        raise RuntimeError(f"{name}: error {error}")


class Way:
    """Copies in one direction, on a stream of their own."""

    def __init__(self, name: str, piece: int) -> None:
        self.name, self.piece, self.stream = name, piece, ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(self.stream), NON_BLOCKING)
        self.host, self.device = ctypes.c_void_p(), ctypes.c_uint64()
        call("cuMemAllocHost_v2", ctypes.byref(self.host), ctypes.c_size_t(piece))
        call("cuMemAlloc_v2", ctypes.byref(self.device), ctypes.c_size_t(piece))
        self.events = [ctypes.c_void_p() for _ in range(AHEAD)]
        for event in self.events:
            call("cuEventCreate", ctypes.byref(event), DISABLE_TIMING)

    def copy(self) -> None:
        """Queues a copy."""
        size = ctypes.c_size_t(self.piece)
        if self.name == "in":
            call("cuMemcpyHtoDAsync_v2", self.device, self.host, size, self.stream)
        else:
            call("cuMemcpyDtoHAsync_v2", self.host, self.device, size, self.stream)

    def run(self, context: ctypes.c_void_p, start: float, stop: float) -> int:
        """Copies from now on until `stop`; the bytes of copies that ended after `start`."""
        call("cuCtxSetCurrent", context)
        queued: deque[ctypes.c_void_p] = deque()
        done, number = 0, 0
        while time.monotonic() < stop:
            if len(queued) == AHEAD:
                call("cuEventSynchronize", queued.popleft())
                done += self.piece if start <= time.monotonic() < stop else 0
            self.copy()
            event = self.events[number % AHEAD]
            call("cuEventRecord", event, self.stream)
            queued.append(event)
            number += 1
        call("cuStreamSynchronize", self.stream)
        return done


def main() -> None:
    """Answers orders until there are no more."""
    piece = int(sys.argv[1])
    context, device = ctypes.c_void_p(), ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    ways = [Way(name, piece) for name in ("in", "out")]
    for way in ways:
        way.copy()
        call("cuStreamSynchronize", way.stream)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        found: list[int] = []
        chosen = [way for way in ways if order["way"] in (way.name, "both")]
        copy = lambda way: found.append(way.run(context, order["start"], order["stop"]))  # noqa: E731, B023
        threads = [threading.Thread(target=copy, args=(way,)) for way in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(found) < len(chosen):
            print(json.dumps({"error": "a copy failed"}), flush=True)
            continue
        print(json.dumps({"bytes": sum(found), "seconds": order["stop"] - order["start"]}), flush=True)


if __name__ == "__main__":
    main()
