"""Tests of `gpumux.vllm` with vLLM's own scheduler, block pool and layouts, on the processor. They need a vLLM that can be imported, with PyTorch:

PYTHONPATH=DIR python3 -m unittest discover -s python/tests -p test_vllm_wheel.py

DIR has what is in vLLM's wheel, and its dependencies; of its libraries none is needed.
"""

import contextlib
import copy
import importlib
import importlib.util
import json
import os
import random
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace as Some
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_blocks import Device, Range  # noqa: E402

from gpumux import _blocks, kv  # noqa: E402

MIB = 1 << 20
LAYERS, HEADS, DIM, BLOCK = 4, 8, 128, 16
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip


def there() -> bool:
    return bool(importlib.util.find_spec("vllm") and importlib.util.find_spec("torch"))


@unittest.skipUnless(there(), "vLLM is not installed")
class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
        cls.module = importlib.import_module("gpumux.vllm")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        Path(folder.name, "config.json").write_text(json.dumps(MODEL))
        cls.model = folder.name

    def config(self, asynchronous: bool) -> object:
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

        made = VllmConfig(
            model_config=ModelConfig(model=self.model, skip_tokenizer_init=True, dtype="float16", max_model_len=1024, enforce_eager=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024, enable_chunked_prefill=True, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
        )
        made.scheduler_config.async_scheduling = asynchronous
        made.parallel_config.distributed_executor_backend = "uni"
        return made

    def planned(self, config: object, worker: object, memory: int) -> object:
        """What vLLM's engine plans for so much memory."""
        import torch
        from vllm.v1.core import kv_cache_utils as utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float16)
        specs = {f"model.layers.{it}.self_attn.attn": spec for it in range(LAYERS)}
        if hasattr(spec, "indexes_kv_by_block_stride"):
            for of in specs.values():
                object.__setattr__(of, "indexes_kv_by_block_stride", True)
            return utils.get_kv_cache_configs(config, [specs], [memory])[0]
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

        resolve_kv_cache_layout(config, [worker.get_supported_kv_cache_layouts()], specs.values())
        groups = []
        if importlib.util.find_spec("vllm.v1.core.kv_cache_planning"):
            utils = importlib.import_module("vllm.v1.core.kv_cache_planning")
            groups = [utils.get_kv_cache_groups(config, dict(specs))]
        made = utils.get_kv_cache_configs(config, [specs], [memory], *groups)[0]
        made.kv_cache_layout = config.cache_config.kv_cache_layout
        return made

    def worker(self, config: object, of: str = "Worker") -> object:
        """One that has its KV cache, in memory of the host."""
        import torch

        worker = object.__new__(getattr(self.module, of))
        worker.vllm_config, worker.device, worker.gpumux = config, Some(index=0), None
        worker.cache_config, worker.model_config = config.cache_config, config.model_config

        def allocate(given: object, kv_cache_allocation_context: object = None) -> None:
            if hasattr(given, "kv_cache_layout"):
                from vllm.v1.worker.utils import allocate_kv_cache

                views = allocate_kv_cache(given, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), [BLOCK])
            else:
                from vllm.v1.worker.gpu.attn_utils import _allocate_kv_cache

                views = _allocate_kv_cache(given, {}, torch.device("cpu"))
            worker.views = {name: it[0] if isinstance(it, tuple) else it for name, it in views.items()}
            worker.model_runner.kv_caches = list(worker.views.values())

        worker.model_runner = Some(initialize_kv_cache=allocate)
        self.assertIn(self.module.GpuWorker, type(worker).__mro__)
        return worker

    def executor(self, config: object, workers: list) -> object:
        """vLLM's, of workers in this process."""
        of = f"{self.module.GpuWorker.__module__}.{self.module.GpuWorker.__qualname__}"
        config.parallel_config.worker_cls = of
        executor = object.__new__(self.module.Executor)
        executor.vllm_config, executor.parallel_config = config, config.parallel_config

        def call(method: str, args: tuple = ()) -> list:
            if method == "compile_or_warm_up_model":
                return []
            each = [(it,) for it in args[0]] if method == "initialize_from_config" else [args] * len(workers)
            return [getattr(it, method)(*own) for it, own in zip(workers, each)]

        executor.collective_rpc = call
        with mock.patch.object(self.module.MultiprocExecutor, "_init_executor"):
            executor._init_executor()
        self.assertEqual(config.parallel_config.worker_cls, "gpumux.vllm.Rank")
        return executor

    def start(self, asynchronous: bool = False, memory: int = 64 * MIB, ranks: int = 1) -> tuple:
        """Workers and their scheduler."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.structured_output import StructuredOutputManager

        config = self.config(asynchronous)
        configs = [config] if ranks == 1 else [copy.deepcopy(config) for _ in range(ranks)]
        workers = [self.worker(it, "Worker" if ranks == 1 else "Rank") for it in configs]

        is_of = self.module.Memory.is_of

        def taken_from(of: object, tensor: object) -> bool:
            of.given, of.range.address = True, tensor.untyped_storage().data_ptr()
            return is_of(of, tensor)

        class Host(Range):
            def __init__(self, *arguments: int) -> None:
                super().__init__(*arguments)
                self.header = Some(bytes=arguments[1])

        device, layouts = Device(), ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]
        base = self.module.GpuWorker
        with (
            contextlib.ExitStack() as stack,
            mock.patch.object(_blocks, "_GRANULE", 2 * MIB),
            mock.patch.object(kv, "_Elastic", Host),
            mock.patch.object(kv, "_Driver"),
            mock.patch.object(self.module.gpumux, "present", lambda: True),
            mock.patch.object(base, "get_supported_kv_cache_layouts", lambda _self: layouts, create=True),
            mock.patch.object(self.module, "allocator"),
            mock.patch.object(self.module.torch.cuda, "MemPool", create=True),
            mock.patch.object(self.module.torch.cuda, "use_mem_pool", mock.MagicMock(), create=True),
            mock.patch.object(self.module.Memory, "is_of", taken_from),
            mock.patch.object(self.module.torch.cuda, "current_stream", lambda: None),
        ):
            given = self.planned(config, workers[0], memory)
            for of in configs:
                of.cache_config = config.cache_config
            stack.enter_context(set_current_vllm_config(config))
            if ranks == 1:
                workers[0].initialize_from_config(given)
                workers[0].gpumux.fence = device.fence
            else:
                self.executor(config, workers).initialize_from_config([copy.deepcopy(given) for _ in workers])
            config.cache_config.num_gpu_blocks = given.num_blocks
            self.assertNotIn(None, [it.gpumux for it in workers], "the KV cache has a fixed size")
            scheduler = config.scheduler_config.scheduler_cls(
                vllm_config=config, kv_cache_config=given, structured_output_manager=StructuredOutputManager(config), block_size=BLOCK,
                hash_block_size=BLOCK, log_stats=True,
            )  # fmt: skip
        return workers, scheduler, device

    def test_vllm_has_what_is_used_of_it(self) -> None:
        self.module.check()

    def test_layers_of_a_block_lie_together(self) -> None:
        if self.module.get_kv_cache_layout:
            self.skipTest("vLLM up to 0.28 makes views of its attention's backends, which need a GPU")
        worker = self.start()[0][0]
        views = list(worker.views.values())
        self.assertEqual([it.data_ptr() - views[0].data_ptr() for it in views], [2 * BLOCK * HEADS * DIM * 2 * it for it in range(LAYERS)])
        self.assertEqual({it.stride(0) * it.element_size() for it in views}, {worker.gpumux.stride})

    def test_contents_stay_while_others_take_granules(self) -> None:
        for asynchronous in (False, True):
            with self.subTest(asynchronous=asynchronous):
                self.serve(asynchronous)

    def test_contents_of_two_workers_stay_while_others_take_granules_of_each(self) -> None:
        for asynchronous in (False, True):
            with self.subTest(asynchronous=asynchronous):
                self.serve(asynchronous, ranks=2)

    def serve(self, asynchronous: bool, ranks: int = 1) -> None:
        """Requests with common prefixes run to their end, and each step reads what earlier ones wrote, as attention does."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        workers, scheduler, device = self.start(asynchronous, ranks=ranks)
        stride, memories, random_ = workers[0].gpumux.stride, [it.gpumux.range for it in workers], random.Random(1)
        granule, each = memories[0].granule, [it.gpumux.bytes for it in workers]
        settle = getattr(scheduler.gpumux.memory, "there") if ranks > 1 else lambda _granules: None
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        prefixes = [[random_.randrange(900) for _ in range(150)] for _ in range(3)]
        tables: dict[str, list[int]] = {}
        known: dict[str, list[int]] = {}
        left = {}
        for number in range(60):
            prompt = random_.choice(prefixes) + [random_.randrange(900) for _ in range(random_.randrange(1, 200))]
            parameters = SamplingParams(max_tokens=random_.randrange(1, 40), ignore_eos=True, temperature=0)
            if hasattr(parameters, "update_from_generation_config"):
                parameters.update_from_generation_config({}, None)
            left[str(number)] = Request(str(number), prompt, parameters, None, block_hasher=hasher)
        waiting, taken, hits = list(left.values()), 0, 0

        def cell(name: str, position: int) -> int:
            return tables[name][position // BLOCK] * stride + position % BLOCK

        for step in range(5000):
            if not left:
                break
            while waiting and random_.random() < 0.1:
                scheduler.add_request(waiting.pop())
            # What others take is theirs: they write there.
            settle([])
            for memory, cells in zip(memories, each):
                for it in range(len(memory.words)):
                    if random_.random() < 0.3 and memory.take(it):
                        cells[it * granule : (it + 1) * granule] = 77
                        taken += 1
                memory.room = random_.choice((1, 2, 3, 100))
            given = scheduler.schedule()
            device.given += 1
            for new in given.scheduled_new_reqs:
                tables[new.req_id], known[new.req_id] = list(new.block_ids[0]), list(new.prompt_token_ids)
                hits += new.num_computed_tokens
            cached = given.scheduled_cached_reqs
            for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
                if name in getattr(cached, "resumed_req_ids", ()):
                    tables[name] = []
                    hits += computed
                tables[name] += blocks[0] if blocks else []
            computed = {it.req_id: it.num_computed_tokens for it in given.scheduled_new_reqs}
            computed.update(zip(cached.req_ids, cached.num_computed_tokens))
            sampled = []
            for name, count in given.num_scheduled_tokens.items():
                there = computed[name]
                for block in tables[name][: -(-(there + count) // BLOCK)]:
                    self.assertEqual({it.state(block * stride // granule) for it in memories}, {kv.IN_USE})
                for cells in each:
                    for position in range(there):
                        self.assertEqual(int(cells[cell(name, position)]), known[name][position] % 100, f"request {name}, step {step}")
                    for position in range(there, there + count):
                        cells[cell(name, position)] = known[name][position] % 100
                done = there + count >= len(known[name])
                sampled.append([known[name][-1] * 7 % 900] if done else [])
                known[name] += sampled[-1]
            names = list(given.num_scheduled_tokens)
            if random_.random() < 0.7:
                device.done = device.given
            scheduler.update_from_output(given, ModelRunnerOutput(req_ids=names, req_id_to_index={it: i for i, it in enumerate(names)}, sampled_token_ids=sampled))
            for name in [it for it, request in left.items() if request.is_finished()]:
                del left[name]
        self.assertEqual(left, {})
        self.assertGreater(taken, 20)
        self.assertGreater(hits, 100)
        device.done = device.given
        # The first granule has the block that is never free.
        settle([])
        for memory in memories:
            self.assertTrue(all(memory.state(it) != kv.IN_USE for it in range(1, len(memory.words))))


if __name__ == "__main__":
    unittest.main()
