"""Tests of `gpumux.sglang`: with SGLang's own registry of hooks where SGLang is installed, else with a stand-in for it."""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import types
import unittest
import warnings
from pathlib import Path
from types import SimpleNamespace as Some
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpumux  # noqa: E402
from gpumux import sglang as module  # noqa: E402


class Scheduler:
    """Stands in for SGLang's."""

    def __init__(self, tensor: int = 0, pipeline: int = 0) -> None:
        self.ps = Some(attn_tp_rank=tensor, pp_rank=pipeline)

    def process_batch_result(self, batch: Some, result: Some) -> str:
        return f"{len(batch.reqs)} done"


class HookType(enum.Enum):
    """Stands in for SGLang's."""

    AFTER = "after"


class HookRegistry:
    """Stands in for SGLang's: a hook behind a method."""

    registered: list = []

    @classmethod
    def register(cls, target: str, hook: object, kind: HookType) -> None:
        assert kind is HookType.AFTER
        cls.registered.append((target, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls.registered:
            name, method = target.rsplit(".", 1)
            of = getattr(sys.modules[name.rsplit(".", 1)[0]], name.rsplit(".", 1)[1])
            original = getattr(of, method)

            def called(*arguments: object, _original: object = original, _hook: object = hook) -> object:
                result = _original(*arguments)
                changed = _hook(result, *arguments)
                return result if changed is None else changed

            setattr(of, method, called)


def real() -> types.ModuleType | None:
    """SGLang's module, which needs nothing of the rest."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "srt/plugins/hook_registry.py"
    spec = importlib.util.spec_from_file_location("sglang.srt.plugins.hook_registry", path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def batch(requests: int, decodes: bool = True) -> Some:
    return Some(reqs=[None] * requests, forward_mode=Some(is_decode=lambda: decodes))


class Hooks(unittest.TestCase):
    def hooked(self, registry: types.ModuleType | Some) -> type:
        """A scheduler to which SGLang's registry has applied the hook."""
        of = type("Scheduler", (Scheduler,), {"process_batch_result": Scheduler.process_batch_result})
        names = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.plugins")
        modules = {name: types.ModuleType(name) for name in names}
        for name, it in modules.items():
            it.__path__ = []
            if "." in name:
                setattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2], it)
        modules["sglang.srt.managers"].scheduler = Some(Scheduler=of)
        modules["sglang.srt.managers.scheduler"] = modules["sglang.srt.managers"].scheduler
        modules["sglang.srt.plugins.hook_registry"] = registry
        with mock.patch.dict(sys.modules, modules), mock.patch.object(gpumux, "_hint", object()):
            module.plugin()
            registry.HookRegistry.apply_hooks()
        return of

    def check(self, registry: types.ModuleType | Some) -> None:
        of = self.hooked(registry)
        with mock.patch.object(gpumux, "progress") as progress:
            self.assertEqual(of().process_batch_result(batch(8), Some(num_correct_drafts=3)), "8 done")
            of().process_batch_result(batch(5), Some(num_correct_drafts=0))
            # A prompt, and ranks for which another one counts.
            of().process_batch_result(batch(8, decodes=False), Some(num_correct_drafts=0))
            of(tensor=1).process_batch_result(batch(8), Some(num_correct_drafts=0))
            of(pipeline=1).process_batch_result(batch(8), Some(num_correct_drafts=0))
        self.assertEqual([call.args for call in progress.call_args_list], [(11,), (5,)])

    def test_decoded_tokens_are_reported_as_progress(self) -> None:
        HookRegistry.registered.clear()
        self.check(Some(HookRegistry=HookRegistry, HookType=HookType))

    def test_decoded_tokens_are_reported_by_sglang_s_registry(self) -> None:
        registry = real()
        if registry is None:
            self.skipTest("SGLang is not installed")
        self.check(registry)

    def test_sglang_of_another_shape_warns_once_and_goes_on(self) -> None:
        HookRegistry.registered.clear()
        of = self.hooked(Some(HookRegistry=HookRegistry, HookType=HookType))
        self.addCleanup(setattr, module, "_unfit", False)
        for given, result in ((Some(reqs=[1]), Some()), (batch(1), Some(num_correct_drafts=[2])), (batch(1), Some(num_correct_drafts=0.5))):
            module._unfit = False
            with warnings.catch_warnings(record=True) as told, mock.patch.object(gpumux, "_progress") as progress:
                warnings.simplefilter("always")
                for _ in range(2):
                    self.assertEqual(of().process_batch_result(given, result), "1 done")
            self.assertEqual(len(told), 1)
            self.assertIn("SGLang 0.5.15 to 0.5.23: tokens are not counted", str(told[0].message))
            progress.assert_not_called()

    def test_version_without_a_registry_is_an_error(self) -> None:
        with mock.patch.dict(sys.modules, {"sglang": None}), mock.patch.object(gpumux, "_hint", object()):
            with self.assertRaisesRegex(ImportError, "SGLang 0.5.15 to 0.5.23, which have a registry of hooks"):
                module.plugin()

    def test_elastic_cache_is_registered_where_it_is_wished(self) -> None:
        HookRegistry.registered.clear()
        registered = mock.Mock()
        cache = Some(register=registered, Unfit=ValueError)
        with mock.patch.dict(sys.modules, {"gpumux._sglang": cache}), mock.patch.object(gpumux, "_sglang", cache, create=True):
            self.hooked(Some(HookRegistry=HookRegistry, HookType=HookType))
            registered.assert_not_called()
            with mock.patch.dict(os.environ, GPUMUX_KV="elastic"):
                self.hooked(Some(HookRegistry=HookRegistry, HookType=HookType))
                registered.assert_called_once_with(HookRegistry, HookType)
                registered.side_effect = ValueError("SGLang has no Scheduler.on_idle")
                with self.assertWarnsRegex(UserWarning, "fixed size: SGLang has no Scheduler.on_idle"):
                    self.hooked(Some(HookRegistry=HookRegistry, HookType=HookType))
            registered.reset_mock()
            for wish, said in (("yes", ["gpumux.sglang: the KV cache has a fixed size: GPUMUX_KV is 'elastic' or 'fixed', not 'yes'"]), ("", [])):
                with mock.patch.dict(os.environ, GPUMUX_KV=wish), warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    self.hooked(Some(HookRegistry=HookRegistry, HookType=HookType))
                self.assertEqual([str(it.message) for it in told], said)
            registered.assert_not_called()
        self.assertEqual(len(HookRegistry.registered), 5)

    def test_without_the_library_nothing_is_registered(self) -> None:
        HookRegistry.registered.clear()
        with mock.patch.dict(sys.modules, {"sglang": None}):
            module.plugin()
        self.assertEqual(HookRegistry.registered, [])


if __name__ == "__main__":
    unittest.main()
