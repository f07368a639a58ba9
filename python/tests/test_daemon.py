"""Tests of what a program asks the daemon about itself, against a server that answers as the daemon, and without one."""

import json
import os
import socket
import socketserver
import sys
import tempfile
import threading
import unittest
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpumux  # noqa: E402
from gpumux import _daemon  # noqa: E402

MEMORY = {"device": "GPU-1", "in_use": 5, "swapped": 0, "pinned": 1, "guaranteed": 4, "limit": None, "above_guarantee": 1}
OWN = {"name": "a b", "class": "latency", "asleep": False, "memory": [MEMORY]}


class Daemon(socketserver.ThreadingUnixStreamServer):
    """Answers as the daemon, and has what was asked."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Answers)
        self.asked: list[str] = []
        self.refusal = ""
        self.dies, self.manages = False, True

    def get_request(self):  # The handler writes the client's address to its log.
        return self.socket.accept()[0], ("", 0)


class Answers(BaseHTTPRequestHandler):
    def answer(self, status: int, body: object = None) -> None:
        self.send_response(status)
        if body is None:
            self.end_headers()
            return
        text = json.dumps(body).encode()
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        if self.path == "/v1/me":
            self.answer(200, {"uid": 0, "tenant": "alice/a b"} if self.server.manages else {"uid": 0})
        elif self.path == "/v1/tenants/alice%2Fa%20b":
            self.answer(200, OWN)
        else:
            self.answer(404, {"error": self.path})

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        if self.server.dies:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if self.server.refusal:
            self.answer(409, {"error": self.server.refusal})
        else:
            self.answer(204)

    def log_message(self, *_arguments: object) -> None:
        pass


class WithDaemon(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.daemon = Daemon(f"{folder.name}/api.sock")
        self.addCleanup(self.daemon.server_close)
        self.addCleanup(self.daemon.shutdown)
        threading.Thread(target=self.daemon.serve_forever, daemon=True).start()
        session = mock.patch.dict(os.environ, GPUMUX_SOCKET=f"{folder.name}/session.sock")
        session.start()
        self.addCleanup(session.stop)

    def test_tenant_is_that_of_this_process(self) -> None:
        found = gpumux.tenant()
        self.assertEqual((found.name, found.class_, found.asleep), ("a b", "latency", False))
        memory = gpumux.Memory(device="GPU-1", in_use=5, swapped=0, pinned=1, guaranteed=4, limit=None)
        self.assertEqual((found.memory, gpumux.limits()), ((memory,), (memory,)))

    def test_sleep_and_wake_are_of_the_own_tenant(self) -> None:
        self.assertTrue(gpumux.sleep() and gpumux.wake())
        self.assertEqual(self.daemon.asked, ["/v1/tenants/alice%2Fa%20b/sleep", "/v1/tenants/alice%2Fa%20b/wake"])

    def test_refusal_is_an_error_with_the_daemon_s_words(self) -> None:
        self.daemon.refusal = "the tenant cannot be moved now: copies do not end"
        with self.assertRaisesRegex(gpumux.DaemonError, "copies do not end"):
            gpumux.sleep()

    def test_answer_that_is_not_the_daemon_s_is_an_error_of_its_own(self) -> None:
        for status, text, why in (
            (200, b"{bad}", "not one of gpumux's daemon: b'{bad}'"), (200, b"[1]", "not one of"), (502, b"bad gateway", "not one of .*b'bad gateway'"),
            (500, b"null", "not one of"), (500, b"", "the daemon answers 500 to GET /v1/me"), (429, b'{"error": "too many"}', "too many"),
        ):  # fmt: skip

            def answer(handler: Answers, status: int = status, text: bytes = text) -> None:
                handler.send_response(status)
                handler.send_header("content-length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            with mock.patch.object(Answers, "do_GET", answer), self.assertRaisesRegex(gpumux.DaemonError, why):
                gpumux.limits()

    def test_daemon_that_ends_meanwhile_is_an_error_of_its_own(self) -> None:
        self.daemon.dies = True
        with self.assertRaisesRegex(gpumux.DaemonError, "no answer to POST .*/sleep: "):
            gpumux.sleep()

    def test_daemon_that_ends_between_two_requests_is_an_error_of_its_own(self) -> None:
        get = Answers.do_GET
        for path, lost in (("/v1/me", "GET /v1/tenants/alice%2Fa%20b"), ("/v1/tenants/alice%2Fa%20b", "POST /v1/tenants/alice%2Fa%20b/wake")):

            def last(handler: Answers, path: str = path) -> None:
                if handler.path == path:
                    os.rename(self.daemon.server_address, f"{self.daemon.server_address}.gone")
                get(handler)

            with mock.patch.object(Answers, "do_GET", last), self.assertRaisesRegex(gpumux.DaemonError, f"no answer to {lost}: "):
                gpumux.wake()
            os.rename(f"{self.daemon.server_address}.gone", self.daemon.server_address)
        self.assertEqual(self.daemon.asked, [])

    def test_daemon_that_does_not_answer_is_an_error_of_its_own(self) -> None:
        stands = threading.Event()
        with mock.patch.object(_daemon, "TIMEOUT_S", 0.05), mock.patch.object(Answers, "do_GET", lambda _: stands.wait(20)):
            with self.assertRaisesRegex(gpumux.DaemonError, "no answer to GET /v1/me: "):
                gpumux.limits()
            stands.set()

    def test_process_of_no_tenant_moves_nothing(self) -> None:
        self.daemon.manages = False
        self.assertEqual((gpumux.tenant(), gpumux.limits(), gpumux.sleep()), (None, (), False))
        self.assertEqual(self.daemon.asked, [])


class WithoutDaemon(unittest.TestCase):
    def test_nothing_is_managed_and_nothing_fails(self) -> None:
        gone = {"GPUMUX_SOCKET": "/nonexistent/session.sock"}
        for environment in ({}, gone):
            with mock.patch.dict(os.environ, environment):
                if not environment:
                    os.environ.pop("GPUMUX_SOCKET", None)
                self.assertEqual((gpumux.tenant(), gpumux.limits()), (None, ()))
                self.assertFalse(gpumux.sleep() or gpumux.wake())


if __name__ == "__main__":
    unittest.main()
