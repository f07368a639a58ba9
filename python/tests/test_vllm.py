"""Tests of `gpumux.vllm` with stand-ins for PyTorch and vLLM. test_vllm_wheel.py compares them with vLLM's own classes."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import types
import unittest
from pathlib import Path
from types import SimpleNamespace as Some
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_blocks import Block, Device, Range  # noqa: E402

from gpumux import kv  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20


class Queue:
    """vLLM's list of free blocks."""

    def __init__(self, blocks: list) -> None:
        self.blocks = blocks

    def get_all_free_blocks(self) -> list:
        return self.blocks

    def iter_blocks_after(self) -> None:
        """Newer versions have it."""


def with_attributes(name: str, attributes: str) -> type:
    """A class of vLLM's of which only these names are looked at."""
    return type(name, (), dict.fromkeys(attributes.split()))


class Tensor(Some):
    """vLLM's description of a KV cache tensor."""

    size = offset = block_stride = 0


class Scheduler:
    """vLLM's: a step takes as many blocks as it may, up to `wish`."""

    num_lookahead_tokens, max_num_scheduled_tokens, max_num_running_reqs = 0, 512, 8

    def __init__(self, kv_cache_config: Some, blocks: int) -> None:
        self.kv_cache_config, self.running, self.waiting = kv_cache_config, [], []
        # Each version has one of the two.
        self.skipped_waiting = []
        every = [Block(number) for number in range(blocks)]
        pool = Some(blocks=every, free_block_queue=Queue(every[1:]), evict_blocks=lambda _numbers: None)
        self.kv_cache_manager, self.wish = Some(block_pool=pool, watermark_blocks=0), 0

    def schedule(self) -> list:
        queue = self.kv_cache_manager.block_pool.free_block_queue
        return queue.popleft_n(min(self.wish, queue.num_free_blocks))

    def update_from_output(self, freed: list) -> dict:
        self.kv_cache_manager.block_pool.free_block_queue.prepend_n(freed)
        # Of each client, what requests have: the first is still in its prompt.
        return {0: Some(outputs=[Some(new_token_ids=[]), Some(new_token_ids=[5])]), 1: Some(outputs=[Some(new_token_ids=[7, 8])])}

    def make_stats(self, there: bool = True) -> Some:
        return Some(kv_cache_usage=-1) if there else None


class GpuWorker:
    """vLLM's: the KV cache is what its memory pool gives."""

    def __init__(self, vllm_config: Some) -> None:
        self.vllm_config, self.device = vllm_config, Some(index=0)

    def initialize_from_config(self, config: Some) -> None:
        self.given = config
        with self._maybe_get_memory_pool_context("kv_cache"):
            size = max(it.size for it in config.kv_cache_tensors)
            address = Pool.active.give(size, 0, None) if Pool.active else 1
        self.model_runner = Some(kv_caches=[Some(device=0, untyped_storage=lambda: Some(data_ptr=lambda: address))])

    def _maybe_get_memory_pool_context(self, _tag: str) -> Some:
        return mock.MagicMock()

    def get_supported_kv_cache_layouts(self) -> list:
        return ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]


class MultiprocExecutor:
    """vLLM's: workers have copies of the configuration."""

    def __init__(self, vllm_config: Some) -> None:
        self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
        self._init_executor()

    def _init_executor(self) -> None:
        name = self.parallel_config.worker_cls.rpartition(".")[2]
        self.workers = [getattr(module, name)(copy.deepcopy(self.vllm_config)) for _ in range(2)]

    def initialize_from_config(self, configs: list) -> None:
        for worker, given in zip(self.workers, configs):
            worker.initialize_from_config(given)

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        return [getattr(it, method)(*args) for it in self.workers]


class Pool:
    """PyTorch's memory pool that is in use: it takes from what has `give`."""

    active = None


def loaded() -> types.ModuleType:
    """`gpumux.vllm`, with stand-ins for what it imports."""
    torch = mock.MagicMock()
    torch._C._cuda_customAllocator = lambda give, _free: give
    names = {
        "vllm": Some(__version__="0.24.0"),
        "vllm.v1.attention.backends.utils": Some(get_kv_cache_layout=lambda: "NHD"),
        "vllm.v1.core.block_pool": Some(BlockPool=with_attributes("BlockPool", "blocks free_block_queue evict_blocks")),
        "vllm.v1.core.kv_cache_manager": Some(KVCacheManager=with_attributes("KVCacheManager", "block_pool watermark_blocks")),
        "vllm.v1.core.kv_cache_utils": Some(FreeKVCacheBlockQueue=Queue, KVCacheBlock=Block),
        "vllm.v1.kv_cache_interface": Some(KVCacheTensor=Tensor),
        "vllm.v1.request": Some(Request=with_attributes("Request", "num_tokens num_tokens_with_spec num_computed_tokens num_output_placeholders")),
        "vllm.v1.core.sched.async_scheduler": Some(AsyncScheduler=Scheduler),
        "vllm.v1.core.sched.scheduler": Some(Scheduler=Scheduler),
        "vllm.v1.executor.multiproc_executor": Some(MultiprocExecutor=MultiprocExecutor),
        "vllm.v1.worker.gpu_worker": Some(Worker=GpuWorker),
        "torch": torch,
    }
    with mock.patch.dict(sys.modules, names):
        return importlib.import_module("gpumux.vllm")


module = loaded()


def configuration() -> Some:
    return Some(
        parallel_config=Some(world_size=1, distributed_executor_backend="uni", worker_cls="gpumux.vllm.Worker"),
        model_config=Some(enable_cumem_allocator=False),
        kv_transfer_config=None,
        scheduler_config=Some(scheduler_cls=None, async_scheduling=True),
    )


def cache(blocks: int = 128, layers: int = 16, elastic: bool = True) -> Some:
    spec = Some(block_size=16, indexes_kv_by_block_stride=elastic)
    tensors = [Tensor(size=blocks * 32 * KIB, offset=0, block_stride=0) for _ in range(layers)]
    return Some(num_blocks=blocks, kv_cache_groups=[Some(kv_cache_spec=spec)], kv_cache_tensors=tensors)


def placed(stride: int = 512 * KIB, aligned: int | None = None, **of_spec: object) -> Some:
    """As vLLM 0.29 and newer lay it out: two kinds of layers."""
    spec = Some(**{"block_size": 16, "head_size": 128, "block_stride_alignment": aligned} | of_spec)
    tensors = [Tensor(size=128 * 512 * KIB, layers=[it], layer_stride=32 * KIB, block_stride=stride, offset=it * 256 * KIB) for it in (0, 1)]
    return Some(num_blocks=128, kv_cache_layout="BLNHC", kv_cache_groups=[Some(kv_cache_spec=spec)], kv_cache_tensors=tensors)


class Ranged(Range):
    """With a description, as one of gpumux's."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.header = Some(bytes=arguments[1])

    def close(self) -> None:
        pass


DRIVER = mock.MagicMock()


def started(config: Some, given: Some) -> object:
    """A worker that has its KV cache."""
    worker = module.Worker(config)

    def pool(_memory_pool: object) -> object:
        Pool.active = worker.gpumux
        return mock.MagicMock(__exit__=lambda *_: setattr(Pool, "active", None))

    with (
        mock.patch.object(kv, "_Elastic", Ranged),
        mock.patch.object(kv, "_Driver", lambda _device: DRIVER),
        mock.patch.object(module.torch.cuda, "use_mem_pool", pool),
    ):
        worker.initialize_from_config(given)
    return worker


class Workers(unittest.TestCase):
    def test_several_processes_have_vllm_s_own_cache_and_scheduler(self) -> None:
        for workers, executor in ((2, "mp"), (1, "mp"), (2, None), (4, "external_launcher")):
            config, given = configuration(), cache()
            config.parallel_config = Some(world_size=workers, distributed_executor_backend=executor)
            with self.assertLogs("vllm.gpumux", "WARNING") as logs:
                worker = started(config, given)
            self.assertRegex(logs.output[0], f"fixed size: vLLM has {workers} workers of executor {executor}.*backend uni")
            self.assertIs(worker.given, given)
            self.assertEqual(given.kv_cache_tensors[1].offset, 0)
            self.assertIsNone(worker.gpumux)
            self.assertIsNone(config.scheduler_config.scheduler_cls)

    def test_cache_is_packed_into_an_elastic_range(self) -> None:
        config, given = configuration(), cache()
        worker = started(config, given)
        self.assertEqual([it.offset for it in given.kv_cache_tensors[:3]], [0, 32 * KIB, 64 * KIB])
        self.assertEqual({(it.size, it.block_stride) for it in given.kv_cache_tensors}, {(64 * MIB, 512 * KIB)})
        self.assertTrue(issubclass(config.scheduler_config.scheduler_cls, Scheduler))
        self.assertEqual(worker.gpumux.range.committed(), 16 * MIB)

    def test_what_pytorch_takes_beside_the_cache_is_device_memory(self) -> None:
        give = started(configuration(), cache()).gpumux.give
        DRIVER.alloc.side_effect = [1 << 31, kv.PoolError("no room")]
        self.assertEqual([give(2 * MIB, 0, None) for _ in range(2)], [1 << 31, 0])

    def test_what_does_not_fit_has_vllm_s_own_memory(self) -> None:
        connector, sleeping, other = configuration(), configuration(), configuration()
        connector.kv_transfer_config = Some()
        sleeping.model_config.enable_cumem_allocator = True
        other.scheduler_config.scheduler_cls = "another"
        for config, given in ((connector, cache()), (sleeping, cache()), (other, cache()), (configuration(), cache(elastic=False))):
            before, chosen = given.kv_cache_tensors[1].size, config.scheduler_config.scheduler_cls
            with self.assertLogs("vllm.gpumux", "WARNING") as logs:
                started(config, given)
            self.assertIn("fixed size", logs.output[0])
            self.assertEqual(given.kv_cache_tensors[1].size, before)
            used = config.scheduler_config.scheduler_cls
            self.assertTrue(used == chosen or chosen is None and used.__mro__[1] is Scheduler)

    def test_configuration_without_a_name_has_vllm_s_own_memory(self) -> None:
        """As a version newer than those that were known may be."""
        of_config, of_cache, of_tensor = configuration(), cache(), cache()
        del of_config.kv_transfer_config, of_cache.kv_cache_groups
        of_tensor.kv_cache_tensors = [Some(size=it.size) for it in of_tensor.kv_cache_tensors]
        for config, given, name in (
            (of_config, cache(), "kv_transfer_config"), (configuration(), of_cache, "kv_cache_groups"), (configuration(), of_tensor, "block_stride"),
        ):  # fmt: skip
            tensors = given.kv_cache_tensors
            before = [vars(it).copy() for it in tensors]
            with self.assertLogs("vllm.gpumux", "WARNING") as logs:
                worker = started(config, given)
            self.assertRegex(logs.output[0], f"fixed size: gpumux .* does not fit vLLM 0.24.0: .*'{name}'")
            self.assertEqual(([vars(it) for it in tensors], worker.gpumux), (before, None))
        with mock.patch.object(module.gpumux, "present", lambda: True):
            self.assertEqual(module.Worker(of_config).get_supported_kv_cache_layouts()[0], "LBNHC")
        with mock.patch.object(module, "get_kv_cache_layout", None), self.assertLogs("vllm.gpumux", "WARNING") as logs:
            started(configuration(), cache())
        self.assertIn("fixed size", logs.output[0])

    def test_module_that_vllm_needs_is_not_called_another_version(self) -> None:
        spec = importlib.util.spec_from_file_location("gpumux_vllm_without_a_module", module.__file__)

        class Broken(types.ModuleType):
            def __getattr__(self, name: str) -> None:
                raise ModuleNotFoundError("No module named 'openai_harmony'", name="openai_harmony")

        modules = {"torch": mock.MagicMock(), "vllm": Some(__version__="0.33.0"), "vllm.v1.core.block_pool": Broken("block_pool")}
        with mock.patch.dict(sys.modules, modules), self.assertRaisesRegex(ModuleNotFoundError, "^No module named 'openai_harmony'$"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def test_version_without_vllm_s_modules_is_named(self) -> None:
        spec = importlib.util.spec_from_file_location("gpumux_vllm_of_another_version", module.__file__)
        missing = {name: None for name in ("vllm.v1.core.block_pool", "vllm.v1.worker.gpu_worker")}
        with mock.patch.dict(sys.modules, {"torch": mock.MagicMock(), "vllm": Some(__version__="0.40.1")} | missing):
            with self.assertRaisesRegex(ImportError, "0.24 to 0.33, not vLLM 0.40.1.*leave --worker-cls out"):
                spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def test_version_without_a_name_that_is_used_has_a_fixed_size(self) -> None:
        lacking = {**module.USED, module.Request: "num_tokens num_tokens_ahead"}
        with mock.patch.object(module, "USED", lacking), self.assertLogs("vllm.gpumux", "WARNING") as logs:
            worker = started(configuration(), cache())
        self.assertRegex(logs.output[0], "fixed size: gpumux .* does not fit vLLM 0.24.0: Request.num_tokens_ahead")
        self.assertIsNone(worker.gpumux)

    def test_version_with_another_list_of_free_blocks_has_a_fixed_size(self) -> None:
        with mock.patch.object(Queue, "popright", lambda _self: None, create=True), self.assertLogs("vllm.gpumux", "WARNING") as logs:
            started(configuration(), cache())
        self.assertIn("FreeKVCacheBlockQueue.popright", logs.output[0])

    def test_layouts_with_blocks_outside_come_first(self) -> None:
        worker = module.Worker(configuration())
        with mock.patch.object(module.gpumux, "present", lambda: True):
            self.assertEqual(worker.get_supported_kv_cache_layouts(), ["BLNHC", "BLHNC", "LBNHC", "LBHNC"])
            worker.vllm_config.kv_transfer_config = Some()
            self.assertEqual(worker.get_supported_kv_cache_layouts()[0], "LBNHC")
        self.assertEqual(module.Worker(configuration()).get_supported_kv_cache_layouts()[0], "LBNHC")

    def test_cache_that_vllm_placed_gets_another_distance_of_blocks(self) -> None:
        given = placed(stride=500 * KIB)
        for it in given.kv_cache_tensors:
            it.size = 128 * 500 * KIB
        worker = started(configuration(), given)
        self.assertEqual({(it.size, it.block_stride) for it in given.kv_cache_tensors}, {(64 * MIB, 512 * KIB)})
        self.assertEqual([(it.offset, it.layer_stride) for it in given.kv_cache_tensors], [(0, 32 * KIB), (256 * KIB, 32 * KIB)])
        self.assertEqual(worker.gpumux.range.granule % (512 * KIB), 0)

    def test_cache_that_vllm_placed_in_another_way_has_a_fixed_size(self) -> None:
        other = placed()
        other.kv_cache_tensors[1].host_resident = True
        rows = placed(stride=500 * KIB, aligned=500 * KIB)
        for it in rows.kv_cache_tensors:
            it.size = 128 * 500 * KIB
        states = placed()
        del states.kv_cache_groups[0].kv_cache_spec.head_size
        for given, why in ((placed(stride=32 * KIB), "lie apart .layout BLNHC"), (other, "lie apart"), (rows, "multiples of 512000"), (states, "not attention")):
            before = [(it.size, it.block_stride) for it in given.kv_cache_tensors]
            with self.assertLogs("vllm.gpumux", "WARNING") as logs:
                self.assertIsNone(started(configuration(), given).gpumux)
            self.assertRegex(logs.output[0], why)
            self.assertEqual([(it.size, it.block_stride) for it in given.kv_cache_tensors], before)

    def test_last_granule_stays_where_pytorch_may_use_its_end(self) -> None:
        worker = started(configuration(), cache(blocks=129))
        self.assertEqual(worker.gpumux.pinned, {0, 4})


class Steps(unittest.TestCase):
    def setUp(self) -> None:
        self.config, config = cache(), configuration()
        worker = started(config, self.config)
        self.range = worker.gpumux.range
        worker.gpumux.clear = lambda _first, _count: None
        self.device = Device()
        patch = mock.patch.object(module, "fence", self.device.fence)
        patch.start()
        self.addCleanup(patch.stop)
        self.scheduler = config.scheduler_config.scheduler_cls(self.config, 128)

    def test_need_counts_running_and_first_waiting_requests(self) -> None:
        scheduler = self.scheduler
        # One is within its last block, the next begins another, the third has a prompt of which two blocks are done.
        of = [(101, 1, 101), (113, 0, 112), (300, 0, 32)]
        scheduler.running = [Some(num_tokens_with_spec=a, num_output_placeholders=b, num_computed_tokens=c) for a, b, c in of]
        scheduler.waiting, scheduler.skipped_waiting = [Some(num_tokens=300), Some(num_tokens=300)], [Some(num_tokens=300)]
        self.assertEqual(module.need(scheduler), (0 + 1 + 17, 2 * 19))

    def test_scheduler_without_a_list_of_skipped_requests_is_read_too(self) -> None:
        scheduler = self.scheduler
        del scheduler.skipped_waiting
        scheduler.kv_holding_waiting = [Some(num_tokens=300)]
        self.assertEqual(module.need(scheduler), (0, 19))
        self.assertTrue(scheduler._waits())

    def test_step_has_memory_and_an_idle_engine_leaves_it(self) -> None:
        scheduler = self.scheduler
        scheduler.waiting, scheduler.wish = [Some(num_tokens=600)], 39
        found = scheduler.schedule()
        self.assertEqual(len(found), 39)
        self.assertTrue(all(self.range.state(it.block_id // 32) == kv.IN_USE for it in found))
        scheduler.waiting, self.device.given = [], 1
        scheduler.update_from_output(found)
        self.assertEqual([self.range.state(it) for it in range(4)], [kv.IN_USE, kv.FREE, kv.OUT, kv.OUT])

    def test_results_without_the_names_are_not_counted(self) -> None:
        """As those of a version newer than those that were known may be."""
        for result in ({0: Some(outputs=[Some(tokens=[5])])}, [Some()], None):
            base = type("Other", (), {"update_from_output": lambda _self, given: given})
            scheduler = module.counting(base)()
            with mock.patch.object(module.gpumux, "progress") as progress, self.assertLogs("vllm.gpumux", "WARNING") as logs:
                self.assertIs(scheduler.update_from_output(result), result)
                self.assertIs(scheduler.update_from_output(result), result)
            self.assertEqual((len(logs.output), progress.called), (1, False))
            self.assertRegex(logs.output[0], "vLLM 0.24.0.*: tokens are not counted")

    def test_new_tokens_are_reported_as_progress(self) -> None:
        with mock.patch.object(module.gpumux, "progress") as progress:
            self.scheduler.update_from_output([])
        progress.assert_called_once_with(3)

    def test_usage_counts_memory_that_is_not_to_be_had(self) -> None:
        scheduler = self.scheduler
        self.range.target = lambda: 64 * MIB
        scheduler.waiting, scheduler.wish = [Some(num_tokens=600)], 31
        scheduler.schedule()
        usage = lambda: scheduler.make_stats().kv_cache_usage  # noqa: E731
        self.assertAlmostEqual(usage(), 31 / 127)
        # Others lack memory: two granules of 32 blocks may stay, then one.
        self.range.target = lambda: 32 * MIB
        self.assertAlmostEqual(usage(), (127 - 32) / 127)
        self.range.target = lambda: 16 * MIB
        self.assertEqual(usage(), 1)
        self.assertIsNone(scheduler.make_stats(there=False))

    def test_refused_memory_is_a_shorter_step(self) -> None:
        self.range.room = 1
        self.scheduler.waiting, self.scheduler.wish = [Some(num_tokens=600)], 39
        self.assertEqual(len(self.scheduler.schedule()), 31)


def executor(config: Some, *given: Some) -> object:
    """One whose two workers have their KV caches."""
    config.parallel_config.world_size, config.parallel_config.distributed_executor_backend = 2, "gpumux.vllm.Executor"

    def pool(_memory_pool: object) -> object:
        Pool.active = module._kept[-1]
        return mock.MagicMock(__exit__=lambda *_: setattr(Pool, "active", None))

    with (
        mock.patch.object(kv, "_Elastic", Ranged),
        mock.patch.object(kv, "_Driver", lambda _device: DRIVER),
        mock.patch.object(module.torch.cuda, "use_mem_pool", pool),
    ):
        made = module.Executor(config)
        made.initialize_from_config(given or (cache(), cache()))
    return made


class Executors(unittest.TestCase):
    def start(self) -> tuple:
        """The ranges of the workers, and the scheduler."""
        config = configuration()
        ranges = [it.gpumux.range for it in executor(config).workers]
        scheduler = config.scheduler_config.scheduler_cls(cache(), 128)
        for it in scheduler.gpumux.memory._all:
            self.addCleanup(it.close)
        return ranges, scheduler

    def states(self, ranges: list, scheduler: object) -> list:
        scheduler.gpumux.memory.there([])
        return [[it.state(granule) for granule in range(4)] for it in ranges]

    def test_step_has_memory_in_all_workers(self) -> None:
        ranges, scheduler = self.start()
        scheduler.waiting, scheduler.wish = [Some(num_tokens=1000)], 63
        self.assertEqual(len(scheduler.schedule()), 63)
        self.assertEqual(self.states(ranges, scheduler), [[kv.IN_USE, kv.IN_USE, kv.OUT, kv.OUT]] * 2)

    def test_step_is_as_short_as_the_worker_with_the_least_memory_allows(self) -> None:
        ranges, scheduler = self.start()
        ranges[1].room = 1
        scheduler.waiting, scheduler.wish = [Some(num_tokens=600)], 39
        self.assertEqual(len(scheduler.schedule()), 31)
        self.assertEqual(self.states(ranges, scheduler), [[kv.IN_USE, kv.OUT, kv.OUT, kv.OUT]] * 2)

    def test_granules_are_free_once_the_steps_before_are_done(self) -> None:
        ranges, scheduler = self.start()
        scheduler.waiting, scheduler.wish = [Some(num_tokens=1000)], 63
        found = scheduler.schedule()
        scheduler.waiting, scheduler.wish = [], 0
        # The next step is planned before the first is done, and may still use what the first leaves.
        scheduler.schedule()
        scheduler.update_from_output(found)
        self.assertEqual(self.states(ranges, scheduler)[0][1], kv.IN_USE)
        scheduler.update_from_output([])
        self.assertEqual(self.states(ranges, scheduler), [[kv.IN_USE, kv.FREE, kv.OUT, kv.OUT]] * 2)

    def test_cache_is_fixed_in_all_workers_where_one_does_not_fit(self) -> None:
        config = configuration()
        with self.assertLogs("vllm.gpumux", "WARNING") as logs:
            made = executor(config, cache(), cache(elastic=False))
        self.assertIn("not all workers have an elastic one", logs.output[-1])
        self.assertEqual(made.workers[0].gpumux.range.committed(), 64 * MIB)
        self.assertIs(config.scheduler_config.scheduler_cls.__mro__[1], Scheduler)
        made.workers[0].gpumux.range.decommit(3, 1)
        made.workers[0].gpumux.range.room = 3
        with self.assertRaisesRegex(RuntimeError, "no memory for vLLM's KV cache of a fixed size"):
            made.workers[0].gpumux_fix()

    def test_workers_with_other_blocks_have_a_fixed_size(self) -> None:
        for name, value in (("pipeline_parallel_size", 2), ("nnodes", 2), ("speculative_config", Some())):
            config = configuration()
            setattr(config if name == "speculative_config" else config.parallel_config, name, value)
            with self.assertLogs("vllm.gpumux", "WARNING") as logs:
                executor(config)
            self.assertRegex(logs.output[0], "fixed size: (pipeline_parallel_size is 2|nnodes is 2|speculative)")

    def test_another_worker_stays(self) -> None:
        config = configuration()
        config.parallel_config.worker_cls = "other.GpuWorker"
        with self.assertLogs("vllm.gpumux", "WARNING") as logs:
            made = executor(config)
        self.assertIn("another worker is chosen: other.GpuWorker", logs.output[0])
        self.assertEqual(made.parallel_config.worker_cls, "other.GpuWorker")


if __name__ == "__main__":
    unittest.main()
