"""Tests of the elastic memory benchmark's own logic; no GPU needed."""

import contextlib
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import kv
import kv_worker


class Cases(unittest.TestCase):
    def test_parts_are_all_there(self) -> None:
        self.assertEqual(set(kv.PARTS), set(kv.RUN))

    def test_sizes_are_read(self) -> None:
        self.assertEqual((kv.bytes_of("20GiB"), kv.bytes_of("64MiB")), (20 << 30, 64 << 20))
        self.assertTrue(all(kv.bytes_of(case) % (2 << 20) == 0 for case in kv.PARTS["granules"][0]))

    def test_orders_are_methods_of_the_worker(self) -> None:
        for order in ("granules", "fill", "get", "release", "verify", "shuffle", "lock", "work"):
            self.assertTrue(callable(getattr(kv_worker.Worker, order)))

    def test_machine_with_one_gpu_has_no_cells_of_two_ranks(self) -> None:
        for gpus, modes in (1, ["1"]), (2, ["1", "2"]):
            with mock.patch.object(kv, "Nvml", lambda gpus=gpus: SimpleNamespace(count=lambda: gpus)):
                self.assertEqual(kv.usual("ranks")[1], modes)

    def test_first_round_of_a_row_is_its_own(self) -> None:
        nothing = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
        rows, options = mock.Mock(), SimpleNamespace(guarantee="1GiB", no_torch=True, page=1)
        with contextlib.ExitStack() as stack:
            for name in ("cell", "Gpumux", "pool"):
                stack.enter_context(mock.patch.object(kv, name, nothing))
            stack.enter_context(mock.patch.object(kv, "Nvml", lambda: SimpleNamespace(memory=lambda: SimpleNamespace(total=100))))
            stack.enter_context(mock.patch.object(kv, "one", mock.Mock(side_effect=[{"first_ms": 9.0}, {"first_ms": 4.0}])))
            kv.guarantee(rows, ["free"], ["cooperates", "locked"], Path(), options)  # type: ignore[arg-type]
        self.assertEqual([it.args[2]["first_ms"] for it in rows.add.call_args_list], [9.0, 4.0])

    def test_answer_of_fill_has_what_the_benchmark_asks_for(self) -> None:
        left = [1, 1, 1, 0]
        alloc = lambda count, wait_s: list(range(min(count, left.pop(0)))) or None  # noqa: E731
        pool = SimpleNamespace(pages=9, page_bytes=1 << 30, alloc=alloc, free=lambda _pages: None)
        worker = kv_worker.Worker.__new__(kv_worker.Worker)
        worker.pool, worker.kept, worker.salt, worker.contents = pool, [], 1, SimpleNamespace(write=lambda *_: None)
        answers = {"fill": worker.fill("free", keep=1 << 30), "get": {"ms": 5.0, "wrong": 0}, "verify": {"wrong": 0, "verified_gib": 1.0, "taken": 0}}
        options = SimpleNamespace(rounds=1, keep="1GiB", guarantee="1GiB")
        with mock.patch.object(kv, "order", lambda _process, do, **_: answers.get(do, {})), mock.patch.object(kv, "moves", lambda *_: 0):
            found = kv.one(None, None, None, "free", "cooperates", options)  # type: ignore[arg-type]
        self.assertEqual((found["holder_gib"], found["ms"], len(worker.kept)), (3.0, 5.0, 1))
