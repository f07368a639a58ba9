"""Traces, the replay of requests, and what counts as good, with an engine that is a fake."""

import argparse
import asyncio
import contextlib
import csv
import datetime
import importlib.metadata
import io
import json
import queue
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import common
import rounds
import serve
import serve_worker
from serve import Request

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,9000,1
2023-11-16 18:17:05.9799600,20,0
"""


class Traces(unittest.TestCase):
    def setUp(self) -> None:
        self.requests = serve.trace(csv.DictReader(io.StringIO(CSV)))

    def test_times_are_from_the_first_and_lengths_fit_the_context(self) -> None:
        self.assertEqual(self.requests, [Request(0.0, 4808, 10), Request(0.5, 8191, 1), Request(2.0, 20, 1)])

    def test_parts_follow_one_another_and_the_trace_begins_anew(self) -> None:
        at = lambda *it: [one.at for one in serve.part(self.requests, *it)]  # noqa: E731
        self.assertEqual(at(1.0, 0.0, 2.5), [0.0, 0.5, 2.0])
        self.assertEqual(at(1.0, 0.4, 2.0), [0.09999999999999998, 1.6])
        self.assertEqual(at(1.0, 2.5, 2.0), [0.5, 1.0], "it is 3 s long: to its last request and a second")
        self.assertEqual(at(2.0, 0.0, 2.0), [0.0, 0.25, 1.0, 1.5, 1.75])

    def test_rounds_begin_where_a_part_has_enough_requests(self) -> None:
        burst = [Request(at + few / 100, 8, 2) for at in (0.0, 6.0, 13.0) for few in range(serve.FEWEST)] + [Request(17.5, 8, 2)]
        self.assertEqual(serve.begins(burst, 1.0, 2.0), [0.0, 6.0, 12.0])
        self.assertEqual(serve.begins(burst, 2.0, 3.0), [0.0, 3.0, 6.0], "in seconds as played")
        self.assertEqual(serve.begins(burst, 1.0, 60.0), [0.0], "a trace that is shorter than a round begins anew")
        self.assertEqual([serve.speed_of(case) for case in serve.CASES[:5]], [0.5, 1.0, 2.0, 4.0, 0.5])
        with self.assertRaisesRegex(common.BenchError, "no 5 s of the trace have 20 requests"):
            serve.begins(self.requests, 1.0, 5.0)


class Prompts(unittest.TestCase):
    def test_prompts_of_all_requests_begin_differently(self) -> None:
        begins = {tuple(serve_worker.prompt_of(f"{turn}-{number}", 16)) for turn in range(3) for number in range(300)}
        self.assertEqual(len(begins), 900)
        self.assertEqual(serve_worker.prompt_of("0-12", 40), serve_worker.prompt_of("0-12", 40))


class Engine:
    """Makes one token of every request in each step of 10 ms."""

    def __init__(self) -> None:
        self.now, self.open, self.dropped = 100.0, dict[str, list[int]](), list[str]()

    def add(self, name: str, prompt: int, output: int) -> None:
        self.open[name] = [0, output]

    def busy(self) -> bool:
        return bool(self.open)

    def step(self) -> list[tuple[str, int]]:
        self.now += 0.01
        for made in self.open.values():
            made[0] += 1
        moved = [(name, made) for name, (made, _) in self.open.items()]
        self.open = {name: it for name, it in self.open.items() if it[0] < it[1]}
        return moved

    def drop(self, names: object) -> None:
        self.dropped = list(names)  # type: ignore[call-overload]

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


class Replay(unittest.TestCase):
    def test_requests_come_at_their_times_and_unfinished_ones_are_dropped(self) -> None:
        engine = Engine()
        order = {"start": 100.0, "stop": 101.0, "requests": [[0.0, 8, 3], [0.5, 8, 1], [0.95, 8, 40], [2.0, 8, 1]]}
        answer = serve_worker.replay(engine, order, lambda: engine.now, engine.sleep)
        self.assertEqual([round(it, 3) if it else it for it in answer["first_s"]], [0.01, 0.51, 0.96, None])
        self.assertEqual(answer["tokens"][:2] + answer["tokens"][3:], [3, 1, 0])
        self.assertAlmostEqual(answer["last_s"][0], 0.03)
        self.assertEqual(engine.dropped, ["0-2"])


class Manager:
    """Continuous batching as transformers has it: results come in a queue, one for each token of a request that streams."""

    def __init__(self) -> None:
        self.results = queue.Queue[Any]()
        self.asked, self.cancelled, self.runs = dict[str, tuple[list[int], int]](), list[str](), True

    def add_request(self, input_ids: list[int], request_id: str, max_new_tokens: int, streaming: bool) -> str | None:
        assert streaming
        self.asked[request_id] = input_ids, max_new_tokens
        return request_id if self.runs else None

    def gives(self, name: str, made: int, error: str | None = None) -> None:
        finished = made >= self.asked[name][1]
        self.results.put(SimpleNamespace(request_id=name, generated_tokens=[*range(made)], error=error, is_finished=lambda: finished))

    def get_result(self, timeout: float) -> Any:
        with contextlib.suppress(queue.Empty):
            return self.results.get(timeout=timeout)

    def cancel_request(self, name: str) -> None:
        self.cancelled.append(name)

    def is_running(self) -> bool:
        return self.runs


class Transformers(unittest.TestCase):
    def setUp(self) -> None:
        self.manager, self.made = Manager(), mock.Mock()
        self.made.batcher.return_value = self.manager
        folder = self.enterContext(tempfile.TemporaryDirectory())
        Path(folder, "config.json").write_text(json.dumps(serve.LLAMA_3_8B))
        self.enterContext(mock.patch.dict("sys.modules", {"generate": self.made}))
        self.enterContext(mock.patch("gc.freeze"))
        self.engine = serve_worker.engine_of(argparse.Namespace(library="transformers", model=folder, engine={"num_blocks": 64}))

    def test_model_has_the_shape_that_is_asked_for(self) -> None:
        shape = self.made.llama.call_args.kwargs
        self.assertEqual((shape["hidden_size"], shape["num_hidden_layers"]), (4096, 32))
        self.assertNotIn("architectures", shape)
        self.assertEqual(self.made.batcher.call_args.kwargs["num_blocks"], 64)

    def test_tokens_are_those_so_far_until_a_request_is_finished(self) -> None:
        self.engine.add("a", [5, 6], 3)
        self.engine.add("b", [7], 1)
        self.assertEqual(self.manager.asked, {"a": ([5, 6], 3), "b": ([7], 1)})
        self.assertEqual(self.engine.step(), [], "none yet")
        for name, made in (("a", 1), ("b", 1), ("a", 2)):
            self.manager.gives(name, made)
        self.assertEqual(self.engine.step(), [("a", 2), ("b", 1)])
        self.assertTrue(self.engine.busy())
        self.manager.gives("a", 3)
        self.assertEqual(self.engine.step(), [("a", 3)])
        self.assertEqual((self.engine.busy(), self.engine.last["a"]), (False, [0, 1, 2]))

    def test_dropped_request_is_cancelled_and_its_late_tokens_do_not_count(self) -> None:
        self.engine.add("a", [5], 3)
        self.engine.drop(["a"])
        self.assertEqual((self.engine.busy(), self.manager.cancelled), (False, ["a"]))
        self.manager.gives("a", 1)
        self.assertEqual(self.engine.step(), [])

    def test_replay_is_that_of_any_engine(self) -> None:
        self.engine.add("warm", [1], 1)  # what an order before has left
        now = [0.0]

        def moment() -> float:
            now[0] += 0.1
            for name in self.manager.asked:
                if name.startswith("3-"):
                    self.manager.gives(name, min(int(now[0] * 10), self.manager.asked[name][1]))
            return now[0]

        order = {"start": 0.0, "stop": 2.0, "requests": [[0.0, 4, 2], [0.5, 4, 500]]}
        answer = serve_worker.replay(self.engine, order, moment, lambda _: None, 3)
        self.assertEqual((answer["tokens"][0], self.manager.cancelled), (2, ["3-1"]))
        self.assertTrue(2 < answer["tokens"][1] < 500)

    def test_what_breaks_in_the_library_is_an_error(self) -> None:
        self.engine.add("a", [5], 3)
        self.manager.gives("a", 1, error="out of memory")
        with self.assertRaisesRegex(RuntimeError, "out of memory"):
            self.engine.step()
        self.manager.runs = False
        with self.assertRaisesRegex(RuntimeError, "has ended"):
            self.engine.step()
        with self.assertRaisesRegex(RuntimeError, "takes no request"):
            self.engine.add("b", [5], 3)


class Scheduled:
    """SGLang's engine, and what makes its tokens: for each request of a message one after the other."""

    def __init__(self, **options: Any) -> None:
        self.options, self.loop, self.tokenizer_manager = options, asyncio.new_event_loop(), self
        self.asked, self.dropped, self.error = list[Any](), list[str](), ""

    async def generate_request(self, asked: Any, _request: None) -> Any:
        self.asked.append(asked)
        for made in range(1, 1 + max(it["max_new_tokens"] for it in asked.sampling_params)):
            if self.error:
                yield {"meta_info": {"id": asked.rid[0], "finish_reason": {"type": "abort", "message": self.error}}}
                return
            for name, sampling in zip(asked.rid, asked.sampling_params, strict=True):
                if made <= sampling["max_new_tokens"]:
                    about = {"id": name, "num_retractions": made // 3, "finish_reason": {} if made < sampling["max_new_tokens"] else {"type": "length"}}
                    yield {"output_ids": [*range(made)], "meta_info": about}
            await asyncio.sleep(0.01)

    def get_server_info(self) -> dict[str, Any]:
        return {"internal_states": [{"bench": {"graphs": "NONE"}}]}

    def abort_request(self, name: str) -> None:
        self.dropped.append(name)


class Sglang(unittest.TestCase):
    def setUp(self) -> None:
        made = SimpleNamespace(Engine=Scheduled)
        modules = {"sglang": made, "sglang.srt.managers.io_struct": SimpleNamespace(GenerateReqInput=SimpleNamespace)}
        self.enterContext(mock.patch.dict("sys.modules", modules))
        self.enterContext(mock.patch.dict("os.environ"))
        self.enterContext(mock.patch("sys.path", [*sys.path]))
        given = argparse.Namespace(library="sglang", model="m", memory=0.5, context=4096, engine={"max_total_tokens": 9}, elastic=True, cold=False)
        self.engine = serve_worker.engine_of(given)
        self.addCleanup(self.end)

    def end(self) -> None:
        self.engine.installed.cleanup()
        if self.engine.tasks:
            self.engine.loop.run_until_complete(asyncio.wait(self.engine.tasks))
        self.engine.loop.close()

    def steps(self) -> list[dict[str, int]]:
        found = []
        while self.engine.busy():
            found += [dict(moved)] if (moved := self.engine.step()) else []
        return found

    def test_engine_has_its_arguments_and_finds_the_plugins(self) -> None:
        self.assertEqual((self.engine.engine.options["max_total_tokens"], self.engine.engine.options["context_length"]), (9, 4096))
        found = {it.name: it.value for it in importlib.metadata.entry_points(group="sglang.srt.plugins")}
        self.assertEqual(found["gpumux"], "gpumux.sglang:plugin")
        self.assertIs(importlib.metadata.EntryPoint("bench", found["bench"], "").load(), serve_worker.plugin)
        self.assertEqual(serve_worker.os.environ["GPUMUX_KV"], "elastic")

    def test_requests_of_one_step_are_one_message(self) -> None:
        answer = serve_worker.greedy(self.engine, [[5, 2], [4, 3]], "salt")
        (asked,) = self.engine.engine.asked
        self.assertEqual((asked.rid, asked.extra_key, [len(it) for it in asked.input_ids]), (["greedy-0", "greedy-1"], ["salt"] * 2, [5, 4]))
        self.assertEqual((answer["tokens"], answer["preempted"], answer["graphs"]), ([[0, 1], [0, 1, 2]], 1, "NONE"))

    def test_tokens_are_those_so_far(self) -> None:
        self.engine.add("a", [5, 6], 3)
        self.engine.add("b", [7], 1)
        found = self.steps()
        self.assertEqual([it["a"] for it in found if "a" in it], [1, 2, 3])
        self.assertEqual([it["b"] for it in found if "b" in it], [1])

    def test_dropped_request_is_cancelled_and_its_late_tokens_do_not_count(self) -> None:
        self.engine.add("a", [5], 3)
        self.engine.step()
        self.engine.drop(["a"])
        self.assertEqual((self.engine.busy(), self.engine.engine.dropped), (False, ["a"]))
        self.engine.add("b", [5], 3)
        self.assertNotIn("a", {name for it in self.steps() for name in it})

    def test_what_breaks_in_the_library_is_an_error(self) -> None:
        self.engine.engine.error = "out of memory"
        self.engine.add("a", [5], 3)
        with self.assertRaisesRegex(RuntimeError, "out of memory"):
            self.steps()

    def test_scheduler_tells_what_became_of_its_cache(self) -> None:
        memory = SimpleNamespace(committed=lambda: 5, losses=lambda: {"taken": 3, "taken_cached": 2, "moved": 1})
        runner = type("DecodeCudaGraphRunner", (), {})()
        scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_runner=runner)))
        answer = SimpleNamespace(internal_state={})
        serve_worker.told(answer, scheduler, None)
        self.assertEqual(answer.internal_state["bench"], {"graphs": "FULL_DECODE_ONLY"})
        scheduler.gpumux = SimpleNamespace(range=memory, slots=SimpleNamespace(refused=4))
        serve_worker.told(answer, scheduler, None)
        self.assertEqual(answer.internal_state["bench"], {"graphs": "FULL_DECODE_ONLY", "refused": 4, "committed": 5, **memory.losses()})


class Good(unittest.TestCase):
    def test_goodput_counts_requests_that_met_both_limits(self) -> None:
        came = [Request(0.0, 8, 2), Request(0.0, 8, 2), Request(0.0, 8, 2), Request(1.0, 8, 1), Request(1.0, 8, 1)]
        answer = {
            "first_s": [0.5, 1.5, 0.5, None, 1.2],  # the second one is late
            "last_s": [0.52, 1.52, 0.6, None, 1.2],  # the third one's next token is
            "tokens": [2, 2, 2, 0, 1],
        }
        cell = serve.cell(came, answer, 2.0, batch_rate=3.0)
        self.assertEqual(cell["latencies_ms"], [500.0, 1500.0, 500.0, 1000.0, 200.0], "without a token: as long as it has waited")
        self.assertEqual(cell["more_ms"]["tpot"], [20.0, 20.0, 100.0])
        expected = {"tokens_per_s": 3.5, "requests_per_s": 2.0, "goodput_per_s": 1.0, "attainment": 0.4, "batch_rate": 3.0}
        self.assertEqual(cell["rates"], expected)

    def test_unfinished_request_is_judged_by_what_is_due_at_the_end(self) -> None:
        def attained(at: float, first: float | None, tokens: int, output: int = 100) -> float | None:
            last = None if first is None else 1.95
            return serve.cell([Request(at, 8, output)], {"first_s": [first], "last_s": [last], "tokens": [tokens]}, 2.0)["rates"].get("attainment")

        # Tokens from 1 s on: 20 of them are due at 2 s.
        self.assertEqual([attained(0.5, 1.0, tokens) for tokens in (20, 19)], [1.0, 0.0])
        self.assertEqual(attained(0.5, 1.0, 19, output=19), 0.0, "it is finished, and took 53 ms a token")
        self.assertEqual(attained(0.5, 1.6, 99), 0.0, "the first one was late")
        self.assertEqual(attained(0.5, None, 0), 0.0)
        self.assertIsNone(attained(1.5, 1.6, 99), "its time for the first one is not over")

    def test_first_token_is_measured_of_the_same_requests_in_every_mode(self) -> None:
        came = [Request(0.0, 8, 2), Request(0.9, 8, 2), Request(1.5, 8, 2)]
        for first in ([0.1, 1.0, 1.6], [0.1, 1.0, None], [0.1, None, None]):
            answer = {"first_s": first, "last_s": first, "tokens": [int(it is not None) for it in first]}
            self.assertEqual(serve.cell(came, answer, 2.0)["latencies_ms"], [100.0, 100.0 if first[1] else 1100.0])

    def test_rows_have_both_times(self) -> None:
        one = rounds.cell([1.0] * 400) | {"more_ms": {"tpot": [2.0] * 400}}
        found = [{"case": "1x", "round": at, "noise": 1.0, "failed": {}, "cells": {"alone": one, "gpumux": one}} for at in range(5)]
        values = rounds.row("1x", "gpumux", found)["values"]
        self.assertEqual((values["latency_p99_ms"], values["tpot_p99_ms"], values["tpot_p50_rel"]), (1.0, 2.0, 1.0))


class Used(unittest.TestCase):
    def test_busy_part_of_each_second_from_the_beginning(self) -> None:
        since = datetime.datetime(2026, 11, 28, 4, 0, 1).timestamp()
        stamps = ("00.900, 0, 1024", "01.100, 50, 2048", "01.900, 100, 2048", "02.000, 10, 3072", "03.000, 100, 9216", "02.2")
        found = serve.used_of((f"2026/11/28 04:00:{it}" for it in stamps), since, since + 2)
        self.assertEqual(found.busy, {0: 0.75, 1: 0.1}, "neither before nor after")
        self.assertEqual({name: round(value, 3) for name, value in found.means.items()}, {"gpu_busy": 0.533, "memory_gib": 2.333})
        self.assertEqual(serve.used_of([], since, since + 2), serve.Used({}, {}))

    def test_series_of_a_row_is_that_of_its_rounds(self) -> None:
        cells = [rounds.cell([1.0]) | {"series": {"gpu_busy": {str(at): 0.5}}} for at in (0, 12)]
        found = [{"case": "1x", "round": at, "noise": 1.0, "failed": {}, "cells": {"alone": it}} for at, it in enumerate(cells)]
        row = rounds.row("1x", "alone", found)
        self.assertEqual(row["series"], {"gpu_busy": {"0": 0.5, "12": 0.5}})
        common.check_results({"bench": "", "device": "", "driver": "", "date": "", "commit": "", "command": "", "rows": [row]})
