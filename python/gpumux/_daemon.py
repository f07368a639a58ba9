"""The daemon's API, as far as a program asks about itself: over its socket, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

TIMEOUT_S = 10.0
"""For an answer that needs no move of memory."""


class DaemonError(RuntimeError):
    """The daemon refuses, with the reason, or does not answer."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a socket of the file system."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def _socket() -> Path | None:
    """Of the daemon that manages this process."""
    session = os.environ.get("GPUMUX_SOCKET")
    return Path(session).with_name("api.sock") if session else None


def ask(method: str, path: str, bounded: bool = True, first: bool = False) -> Any:
    """What the daemon answers; none of the first request where there is no daemon."""
    where = _socket()
    if where is None:
        return None
    connection = _Connection(where, TIMEOUT_S if bounded else None)
    try:
        connection.request(method, path, headers={"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException) as error:
        if first and isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
            return None
        raise DaemonError(f"no answer to {method} {path}: {error}") from None
    finally:
        connection.close()
    try:
        answer = json.loads(text or "{}")
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise DaemonError(f"the answer to {method} {path} is not one of gpumux's daemon: {text[:80]!r}")
    if response.status >= 400:
        raise DaemonError(answer.get("error", f"the daemon answers {response.status} to {method} {path}"))
    return answer


def own() -> tuple[str, dict[str, Any]] | None:
    """This process's tenant: what the API calls it, and what it is. The daemon finds it by the connection: in a container the process has
    another number."""
    name: str = (ask("GET", "/v1/me", first=True) or {}).get("tenant") or ""
    tenant = name and ask("GET", f"/v1/tenants/{quote(name, safe='')}")
    return (name, tenant) if tenant else None


def move(what: str, name: str) -> None:
    """Moves a tenant's memory: `sleep` or `wake`."""
    ask("POST", f"/v1/tenants/{quote(name, safe='')}/{what}", bounded=False)
