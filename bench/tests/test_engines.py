"""What the benchmark of engines takes from one."""

import argparse
import contextlib
import ctypes
import json
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import common
import engines
import serve_worker
import standin
from common import BenchError, Mode
from tests.test_serve import Engine


class Fake:
    """A worker that has its answers."""

    def __init__(self, answers: list) -> None:
        self.answers, self.orders, self.log = answers, [], Path("log")

    def send(self, **order: object) -> None:
        self.orders.append(order)

    def reply(self, _timeout: float) -> dict:
        return self.answers.pop(0)

    def close(self) -> None:
        self.orders.append("close")


def options(**others: object) -> argparse.Namespace:
    given = {"left": engines.Budget(100), "seconds": 9.0, "requests": 2, "cache": 1 << 30, "attention": "X", "graphs": False, "memory": 0.5, "model": Path("m"), "stand_in": False, "ranks": 1, "library": "vllm"}
    return argparse.Namespace(**given | others)


class Cells(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(engines.common, "device_and_driver", lambda: ("a GPU", "1")))

    def loads(self, modes: list[str], **others: object) -> list[tuple[str, str, dict[str, float], dict[str, list[float]]]]:
        results = common.Results("engines", self.folder, ["saturation"], modes)
        return [*engines.loads(["saturation"], modes, self.folder, options(**others), results)]

    def test_saturation_counts_until_the_last_token_and_takes_turns(self) -> None:
        turns: list[str] = []

        class Engine(Fake):
            def __init__(self, name: str, took: float) -> None:
                answer = {"first_s": [0.1, 0.2], "last_s": [1.37, took], "tokens": [128, 128]}
                super().__init__([{"ready": True}, *[answer] * 6, {"tokens": [[1]], "taken": 3, "refused": 0}])
                self.name = name

            def send(self, **order: Any) -> None:
                super().send(**order)
                turns.append(self.name)

        made = {"stock": Engine("stock", 2.0), "elastic": Engine("elastic", 4.0)}
        fake = mock.patch.object(engines, "engine", lambda _mode, name, *_flags, **_more: made[name])
        modes = mock.patch.object(engines, "mode_of", lambda name, _logs: contextlib.nullcontext(name))
        with fake, modes, mock.patch.object(engines, "check"):
            found = {name: (values, around) for _case, name, values, around in self.loads([*made], bursts=5)}
        values, around = found["stock"]
        self.assertEqual((values["tokens_per_s"], values["finished"], values["taken"], values["rounds"]), (128.0, 2, 3, 5))
        self.assertEqual(around["tokens_per_s"], [128.0, 128.0])
        self.assertEqual((found["elastic"][0]["tokens_per_s"], found["elastic"][0]["tokens_rel"]), (64.0, 0.5))
        self.assertNotIn("tokens_rel", values)
        self.assertAlmostEqual(values["tpot_p50_ms"], 10.0)
        self.assertEqual(turns[2:6], ["stock", "elastic", "elastic", "stock"], "another begins each round")
        self.assertEqual([it.orders[-1] for it in made.values()], ["close"] * 2)

    def test_ratio_to_stock_pairs_rounds_so_that_a_slow_host_does_not_count(self) -> None:
        stock, other = ([{"tokens_per_s": it * part} for it in (100.0, 300.0, 50.0)] for part in (1.0, 0.9))
        ratio = engines.means(other, stock)["tokens_rel"]
        self.assertEqual([round(ratio(times), 9) for times in ([1, 1, 1], [3, 0, 0], [0, 1, 2])], [0.9] * 3)
        self.assertNotIn("tokens_rel", engines.means(stock, stock))

    def test_rate_counts_from_each_arrival_and_is_the_same_for_all(self) -> None:
        class Engine(Fake):
            def reply(self, _timeout: float) -> dict:
                requests = self.orders[-1]["requests"]
                return {"first_s": [it[0] + 0.1 for it in requests], "last_s": [it[0] + 0.73 for it in requests], "tokens": [it[2] for it in requests]}

        one, other = Engine([]), Engine([])
        found = [engines.burst(it, options(), 16.0, seed=3) for it in (one, other)]
        self.assertEqual(found[0], found[1])
        self.assertEqual(one.orders[0]["requests"], other.orders[0]["requests"])
        self.assertEqual(found[0]["finished"], found[0]["requests"])
        self.assertTrue(30 < found[0]["requests"] < 100)
        self.assertAlmostEqual(found[0]["ttft_p99_ms"], 100.0)
        self.assertAlmostEqual(found[0]["tpot_p50_ms"], 10.0)

    def test_engine_without_the_memory_of_its_mode_is_refused(self) -> None:
        worker = Fake([])
        worker.name = "kvcached"
        with tempfile.TemporaryDirectory() as folder:
            worker.log = Path(folder) / "log"
            worker.log.write_text("INFO Successfully patched vllm: all\n")
            engines.check("kvcached", worker)
            engines.check("stock", worker)
            with self.assertRaisesRegex(BenchError, "is not elastic"):
                engines.check("elastic", worker)

    def test_launch_runs_the_installation_file_before_the_script(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "kvcached").mkdir()
            (Path(folder) / "kvcached" / "__init__.py").touch()
            (Path(folder) / "kvcached_autopatch.pth").write_text("import sys; sys.patched = True\n")
            script = Path(folder) / "script.py"
            script.write_text("import sys\nprint(getattr(sys, 'patched', False), __name__, sys.argv[1:])\n")
            python, *rest = engines.program("kvcached")
            self.assertEqual(Path(rest[-1]).name, "serve_worker.py")
            with mock.patch.dict("os.environ", {"PYTHONPATH": folder}):
                self.assertEqual(common.run_quietly(python, *rest[:-1], str(script), "a", "b"), "True __main__ ['a', 'b']")

    def test_round_that_is_not_whole_does_not_count(self) -> None:
        class Engine(Fake):
            def __init__(self, bursts: int) -> None:
                answer = {"first_s": [0.1, 0.2], "last_s": [1.37, 2.0], "tokens": [128, 128]}
                super().__init__([{"ready": True}, *[answer] * bursts])

            def reply(self, _timeout: float) -> dict:
                if not self.answers:
                    raise BenchError("it has ended")
                return self.answers.pop(0)

        made = {"stock": Engine(9), "elastic": Engine(3)}
        fake = mock.patch.object(engines, "engine", lambda _mode, name, *_flags, **_more: made[name])
        modes = mock.patch.object(engines, "mode_of", lambda name, _logs: contextlib.nullcontext(name))
        with fake, modes, mock.patch.object(engines, "check"), mock.patch.object(engines.common, "say") as said:
            found = {name: values for _case, name, values, _around in self.loads([*made], bursts=5)}
            self.assertEqual([it["rounds"] for it in found.values()], [2, 2])
            self.assertIn("round 2 does not count: {'saturation elastic': 'it has ended'}", said.call_args.args[0])
            self.assertEqual([it.orders[-1] for it in made.values()], ["close"] * 2)
            made = {"stock": Engine(4), "elastic": Engine(4)}
            found = {name: values for _case, name, values, _around in self.loads([*made], bursts=5)}
            self.assertEqual([it["rounds"] for it in found.values()], [5, 5], "a later call goes on")

    def test_variants_have_their_granules_and_their_layout(self) -> None:
        flags: dict[str, tuple[str, ...]] = {}

        def fake(mode: Mode, name: str, *_: object, elastic: bool, **_more: object) -> Fake:
            flags[name] = (mode.name, *map(str, _[1:]), str(elastic))
            worker = Fake([{"ready": True}, *[{"first_s": [0.1], "last_s": [0.5], "tokens": [9]}] * 9])
            worker.name = name
            return worker

        with mock.patch.object(engines, "engine", fake), mock.patch.object(engines, "Gpumux", Mode), mock.patch.object(engines, "check"):
            self.loads(["elastic-2", "elastic", "kvcached-layers"], bursts=1, requests=1)
        self.assertEqual(flags["elastic-2"], ("gpumux", "--granule", "2", "True"))
        self.assertEqual((flags["elastic"], flags["kvcached-layers"]), (("gpumux", "True"), ("kvcached-layers", "False")))
        layout = {it: engines.mode_of(it, Path(".")).environment().get("KVCACHED_CONTIGUOUS_LAYOUT") for it in ("kvcached", "kvcached-layers")}
        self.assertEqual(layout, {"kvcached": None, "kvcached-layers": "false"})
        self.assertNotIn("compat", engines.program("kvcached-layers")[2])

    def test_engine_that_decodes_without_graphs_although_it_should_is_an_error(self) -> None:
        with mock.patch.object(engines, "Worker") as made:
            engines.engine(Mode("stock", Path(".")), "engine", options(graphs=True))
        self.assertIn("FULL_DECODE_ONLY", made.call_args.args[1][6])
        engines.check_graphs(Fake([]), {"graphs": "FULL_DECODE_ONLY"}, options(graphs=True))
        with self.assertRaisesRegex(BenchError, "has CUDA graphs NONE"):
            engines.check_graphs(Fake([]), {"graphs": "NONE"}, options(graphs=True))

    def test_elastic_mode_has_the_worker_class(self) -> None:
        with mock.patch.object(engines, "Worker") as made:
            engines.engine(Mode("elastic", Path(".")), "engine", options())
            engines.engine(Mode("gpumux", Path(".")), "engine", options(stand_in=True), "--cold")
        given = [call.args[1] for call in made.call_args_list]
        self.assertEqual([("gpumux.vllm.Worker" in it[6]) for it in given], [True, False])
        self.assertEqual(given[1][7:], ["--cold", "--library", "stand-in"])

    def test_engine_of_several_gpus_has_the_executor_of_its_mode(self) -> None:
        with mock.patch.object(engines, "Worker") as made:
            for mode in "stock", "elastic":
                engines.engine(Mode(mode, Path(".")), "engine", options(ranks=2))
        stock, elastic = (json.loads(call.args[1][6]) for call in made.call_args_list)
        self.assertEqual((stock["tensor_parallel_size"], stock["distributed_executor_backend"]), (2, "mp"))
        self.assertEqual((elastic["tensor_parallel_size"], elastic["distributed_executor_backend"]), (2, "gpumux.vllm.Executor"))
        self.assertNotIn("worker_cls", elastic)

    def test_sglang_has_the_same_cache_in_tokens(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(engines, "Worker") as made:
            (Path(folder) / "config.json").write_text(json.dumps(engines.serve.LLAMA_3_8B))
            given = options(library="sglang", model=Path(folder), graphs=True)
            engines.engine(Mode("elastic", Path(".")), "engine", given, "--cold", kv_cache_memory_bytes=1 << 30, **engines.NO_PREFIXES)
            engines.engine(Mode("stock", Path(".")), "engine", options(library="sglang", model=Path(folder)))
        elastic, stock = (call.args[1] for call in made.call_args_list)
        self.assertEqual((elastic[7:], stock[7:]), (["--cold", "--library", "sglang", "--elastic"], ["--library", "sglang"]))
        elastic, stock = (json.loads(it[6]) for it in (elastic, stock))
        self.assertEqual((elastic["max_total_tokens"], elastic["disable_radix_cache"], elastic["cuda_graph_bs_decode"][-1]), (8192, True, 64))
        self.assertEqual((stock["disable_radix_cache"], stock["disable_cuda_graph"], "max_total_tokens" in stock), (False, True, False))

    def test_spent_budget_ends_a_cell(self) -> None:
        with self.assertRaisesRegex(BenchError, "budget"):
            engines.ready(Fake([]), options(left=engines.Budget(1)))

    def test_replay_may_end_before_its_time(self) -> None:
        engine = Engine()
        order = {"start": engine.now, "stop": engine.now + 60, "requests": [[0.0, 5, 3]], "ends": True}
        answer = serve_worker.replay(engine, order, lambda: engine.now, lambda _s: self.fail("it waits"))
        self.assertEqual(answer["tokens"], [3])


class StandIn(unittest.TestCase):
    def setUp(self) -> None:
        given = argparse.Namespace(engine={"kv_cache_memory_bytes": 8 << 20}, cold=False)
        driver = mock.Mock(call=self.call)
        with warnings.catch_warnings(), mock.patch.object(standin.kv, "_Driver", return_value=driver), mock.patch.object(standin.kv, "_backing", self.memory):
            warnings.simplefilter("ignore")
            self.engine = standin.StandIn(given)

    @staticmethod
    def memory(_device: int, size: int, granule: int, _fallback: bool) -> object:
        return standin.kv._Host(size, granule)

    @staticmethod
    def call(name: str, to: object, *rest: object) -> None:
        if name == "cuMemsetD32_v2":
            value, count = rest
            ctypes.memmove(to.value, value.to_bytes(4, "little") * count.value, 4 * count.value)
        elif name == "cuMemcpyDtoH_v2":
            at, size = rest
            ctypes.memmove(to, at.value, size.value)

    def made(self) -> dict:
        return serve_worker.greedy(self.engine, [[20, 5], [33, 8]], "salt")

    def test_tokens_are_the_same_again_and_cost_their_pages(self) -> None:
        first, again = self.made(), self.made()
        self.assertEqual(first["tokens"], again["tokens"])
        self.assertEqual([len(it) for it in first["tokens"]], [5, 8])
        self.assertEqual(first["batches"], [2] * 5 + [1] * 3)
        self.assertEqual(self.engine.pool.limits().in_use, 0)

    def test_one_wrong_byte_makes_other_tokens(self) -> None:
        right = self.made()["tokens"]
        step, steps = self.engine.step, iter(range(100))

        def spoilt() -> list:
            if next(steps) == 3:
                ctypes.memset(self.engine.at(self.engine.open["greedy-1"], 30) + 4095, 0x5A, 1)
            return step()

        with mock.patch.object(self.engine, "step", spoilt):
            found = self.made()["tokens"]
        self.assertEqual((found[0] == right[0], found[1][:3] == right[1][:3], found[1][3:] == right[1][3:]), (True, True, False))

    def test_refused_memory_makes_a_request_wait(self) -> None:
        right = self.made()["tokens"]
        alloc, refusals = self.engine.pool.alloc, iter(range(3))
        with mock.patch.object(self.engine.pool, "alloc", lambda count, wait_s: alloc(count) if next(refusals, None) is None else None):
            self.assertEqual(self.made()["tokens"], right)
        self.assertEqual(self.engine.refused, 3)
