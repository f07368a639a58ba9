"""Tests of `gpumux.transformers` with the real transformers and PyTorch, on the processor: ranges of the host's memory stand in for a GPU's."""

import copy
import gc
import mmap
import sys
import unittest
import warnings
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    import torch
    import transformers
except ImportError as missing:
    raise unittest.SkipTest(f"the tests of gpumux.transformers need PyTorch and transformers: {missing}") from None

import ctypes  # noqa: E402

import gpumux  # noqa: E402
from gpumux import kv  # noqa: E402
from gpumux import transformers as module  # noqa: E402
from gpumux.transformers import ElasticCache, Tokens  # noqa: E402

MIB = 1 << 20


class Range:
    """An elastic range of the host's memory. What has no memory, or has just got some, is not a number."""

    kind = "host"
    room = 1 << 20
    made: list = []

    def __init__(self, device: int, size: int, granule: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self.view = ctypes.c_char.from_buffer(self.memory)
        self.address, self.granule, self.device = ctypes.addressof(self.view), granule, device
        self.states = [False] * (size // granule)
        self.closed, self.waits = False, []
        self.spoil(0, len(self.states))
        Range.made.append(self)

    def spoil(self, first: int, count: int) -> None:
        ctypes.memset(self.address + first * self.granule, 0xFF, count * self.granule)

    def commit(self, first: int, count: int, wait_s: float) -> int:
        assert not any(self.states[first : first + count]), "committed twice"
        self.waits.append(wait_s)
        if sum(self.states) + count > Range.room:
            return 1
        self.states[first : first + count] = [True] * count
        self.spoil(first, count)
        return 0

    def decommit(self, first: int, count: int) -> int:
        self.states[first : first + count] = [False] * count
        self.spoil(first, count)
        return 0

    def committed(self) -> int:
        return sum(self.states) * self.granule

    def close(self) -> None:
        self.closed = True


def model(**changes: object) -> object:
    """A small Llama with random weights, of which a layer has 2 MiB for 64 tokens of a sequence."""
    torch.manual_seed(7)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8)
    other = dict(vocab_size=97, max_position_embeddings=512, head_dim=256, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    config = transformers.LlamaConfig(**{**sizes, **other, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def prompt(batch: int, length: int) -> dict:
    ids = torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[1, : length // 2] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Elastic(unittest.TestCase):
    def setUp(self) -> None:
        Range.room, Range.made = 1 << 20, []
        module._spare.clear()
        for patch in (mock.patch.object(kv, "_Elastic", Range), mock.patch.object(module, "_device", lambda _states: 0)):
            patch.start()
            self.addCleanup(patch.stop)

    def same(self, it: object, inputs: dict, cache: object, **options: object) -> object:
        """Generates with and without an elastic cache; the tokens, and all logits."""
        options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
        torch.manual_seed(5)
        expected = it.generate(**inputs, **options)
        torch.manual_seed(5)
        found = it.generate(**inputs, past_key_values=cache, **options)
        self.assertTrue(torch.equal(found.sequences, expected.sequences))
        for mine, theirs in zip(found.logits or (), expected.logits or (), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        return found


class Tokened(Elastic):
    def test_tokens_are_those_without_it(self) -> None:
        it = model()
        for batch, length in ((1, 5), (1, 200), (3, 70)):
            cache = ElasticCache(it)
            self.same(it, prompt(batch, length), cache)
            self.assertTrue(cache.elastic)
            self.assertEqual(cache.get_seq_length(), length + 39)

    def test_sampling_beams_and_lookups_have_the_same_tokens(self) -> None:
        it = model()
        self.same(it, prompt(2, 60), ElasticCache(it), do_sample=True, num_return_sequences=3)
        self.same(it, prompt(2, 60), ElasticCache(it), num_beams=3, num_return_sequences=2)
        inputs = prompt(1, 60)
        inputs["input_ids"][0, 30:] = inputs["input_ids"][0, :30]
        # Tokens that were guessed wrong are cut off again.
        self.same(it, prompt(1, 60), ElasticCache(it), assistant_model=model(num_hidden_layers=1), output_logits=False)
        self.same(it, inputs, ElasticCache(it), prompt_lookup_num_tokens=4, output_logits=False)

    def test_types_and_models_have_the_same_tokens(self) -> None:
        self.same(model().to(torch.bfloat16), prompt(2, 60), ElasticCache(model()))
        shared = dict(hidden_size=128, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=97)
        torch.manual_seed(1)
        gemma = transformers.Gemma3TextConfig(**shared, head_dim=32, sliding_window=16, max_position_embeddings=512, eos_token_id=None)
        gemma.layer_types = ["sliding_attention", "full_attention"] * 2
        it = transformers.Gemma3ForCausalLM(gemma).eval()
        cache = ElasticCache(it)
        self.same(it, prompt(1, 60), cache)
        self.assertEqual([type(layer).__name__ for layer in cache.layers], ["DynamicSlidingWindowLayer", "ElasticLayer"] * 2)
        self.assertTrue(cache.elastic)

    def test_conversation_goes_on_in_the_same_cache(self) -> None:
        it, first = model(), prompt(1, 60)["input_ids"]
        cache = ElasticCache(it)
        turn = it.generate(first, past_key_values=cache, max_new_tokens=30, do_sample=False)
        longer = torch.cat([turn, prompt(1, 20)["input_ids"]], dim=1)
        self.same(it, {"input_ids": longer}, cache)

    def test_copies_of_a_prompt_s_cache_have_ranges_of_their_own(self) -> None:
        """As transformers' documents do it: a prompt is computed once, and each answer goes on with a copy."""
        it, inputs = model(), prompt(1, 100)
        own, cache = transformers.DynamicCache(config=it.config), ElasticCache(it)
        for start in (own, cache):
            with torch.no_grad():
                it(**prompt(1, 90), past_key_values=start)
        for _ in range(2):
            expected = it.generate(**inputs, past_key_values=copy.deepcopy(own), max_new_tokens=30, do_sample=False)
            copied = copy.deepcopy(cache)
            self.assertTrue(torch.equal(it.generate(**inputs, past_key_values=copied, max_new_tokens=30, do_sample=False), expected))
            self.assertTrue(copied.elastic)
            self.assertEqual((cache.get_seq_length(), copied.get_seq_length()), (90, 129))
            self.assertFalse({id(layer._rows.arena) for layer in copied.layers} & {id(layer._rows.arena) for layer in cache.layers})
        for unused in (ElasticCache(it), copied):
            unused.reset()
            self.assertEqual(copy.deepcopy(unused).get_seq_length(), unused.get_seq_length())

    def test_sequences_may_be_chosen_and_repeated(self) -> None:
        it = model()
        own, plain = ElasticCache(it), transformers.DynamicCache(config=it.config)
        inputs = prompt(3, 70)["input_ids"]
        step = prompt(2, 1)["input_ids"]
        for cache in (own, plain):
            it(inputs, past_key_values=cache)
            cache.batch_select_indices(torch.tensor([2, 0]))
        with torch.no_grad():
            torch.testing.assert_close(it(step, past_key_values=own).logits, it(step, past_key_values=plain).logits)
            for cache in (own, plain):
                cache.batch_repeat_interleave(2)
            step = prompt(4, 1)["input_ids"]
            torch.testing.assert_close(it(step, past_key_values=own).logits, it(step, past_key_values=plain).logits)


class Memory(Elastic):
    def test_memory_follows_the_tokens(self) -> None:
        it, cache = model(), None
        with torch.no_grad():
            cache = ElasticCache(it)
            # 16 KiB a token and layer: 128 tokens are 2 MiB.
            sizes = []
            for length in (100, 28, 1, 255):
                it(prompt(1, length)["input_ids"], past_key_values=cache)
                sizes.append(cache.committed // MIB)
        self.assertEqual(sizes, [6, 6, 12, 18])
        self.assertEqual(len(Range.made), 1)

    def test_memory_is_given_back_with_the_last_view(self) -> None:
        it = model()
        before = dict(kv._exported)  # Other tests have some that no reader took.
        with torch.no_grad():
            output = it(prompt(1, 100)["input_ids"], past_key_values=ElasticCache(it))
        keys = output.past_key_values.layers[1].keys
        contents = keys.clone()
        del output
        gc.collect()
        self.assertEqual(Range.made[0].committed(), 6 * MIB)
        self.assertTrue(torch.equal(keys, contents))
        del keys
        gc.collect()
        self.assertEqual(Range.made[0].committed(), 0)
        self.assertEqual(kv._exported, before)

    def test_next_cache_has_the_same_range(self) -> None:
        it = model()
        for _ in range(3):
            self.same(it, prompt(1, 100), ElasticCache(it))
        self.assertEqual(len(Range.made), 1)
        with torch.no_grad():
            caches = [it(prompt(1, 5)["input_ids"], past_key_values=ElasticCache(it)).past_key_values for _ in range(6)]
        self.assertEqual(len(Range.made), 6)
        del caches
        gc.collect()
        self.assertEqual(sum(not it.closed for it in Range.made), 4)

    def test_refused_memory_is_an_error_that_leaves_the_cache(self) -> None:
        it, cache = model(), None
        cache = ElasticCache(it, wait_s=0.5)
        with torch.no_grad():
            it(prompt(1, 128)["input_ids"], past_key_values=cache)
            Range.room = 3
            with self.assertRaisesRegex(torch.cuda.OutOfMemoryError, "2 MiB for the key/value cache of 129 tokens.*0.5 s.*gpumux memory"):
                it(prompt(1, 1)["input_ids"], past_key_values=cache)
            self.assertEqual(cache.get_seq_length(), 128)
            Range.room = 6
            again = it(prompt(1, 1)["input_ids"], past_key_values=cache).logits
            plain = transformers.DynamicCache(config=it.config)
            it(prompt(1, 128)["input_ids"], past_key_values=plain)
            torch.testing.assert_close(again, it(prompt(1, 1)["input_ids"], past_key_values=plain).logits)
        self.assertEqual(Range.made[0].waits[-1], 0.5)

    def test_step_that_ends_in_the_middle_leaves_all_layers(self) -> None:
        """A later layer has no memory, or the wait is interrupted: the same step may be made again."""
        shared = dict(hidden_size=128, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, vocab_size=97)
        torch.manual_seed(1)
        gemma = transformers.Gemma3TextConfig(**shared, head_dim=512, sliding_window=16, max_position_embeddings=512, eos_token_id=None)
        gemma.layer_types = ["sliding_attention", "full_attention"] * 2
        for it in (model(), transformers.Gemma3ForCausalLM(gemma).eval()):
            first, step = prompt(1, 128)["input_ids"], prompt(1, 1)["input_ids"]
            own, cache = transformers.DynamicCache(config=it.config), ElasticCache(it, wait_s=0.5)
            with torch.no_grad():
                for ids, before in ((first, 0), (step, 128)):
                    Range.room = (sum(Range.made[-1].states) if before else 0) + 1
                    with self.assertRaises(torch.cuda.OutOfMemoryError):
                        it(ids, past_key_values=cache)
                    self.assertEqual({layer.get_seq_length() for layer in cache.layers}, {before})
                    Range.room = 1 << 20
                    with mock.patch.object(Range, "commit", side_effect=KeyboardInterrupt), self.assertRaises(KeyboardInterrupt):
                        it(ids, past_key_values=cache)
                    self.assertEqual({layer.get_seq_length() for layer in cache.layers}, {before})
                    torch.testing.assert_close(it(ids, past_key_values=cache).logits, it(ids, past_key_values=own).logits)
            self.assertTrue(cache.elastic)
            self.assertEqual(cache._step, {})
            del cache
            gc.collect()
            module._spare.clear()

    def test_step_without_the_last_layer_is_a_step(self) -> None:
        """As of models whose last layers have keys and values of others."""
        cache, tokens = ElasticCache(model()), torch.zeros(1, 8, 128, 256)
        for layer in (0, 1):
            cache.update(tokens, tokens, layer)
        Range.room = 0
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            cache.update(tokens, tokens, 0)
        self.assertEqual([layer.get_seq_length() for layer in cache.layers], [128, 128, 0])

    def test_longer_cache_goes_on_in_transformers_own_memory(self) -> None:
        it = model()
        cache = ElasticCache(it, max_length=80)
        self.same(it, prompt(1, 60), cache)
        self.assertFalse(cache.elastic)
        gc.collect()
        self.assertEqual(Range.made[0].committed(), 0)


class Own(unittest.TestCase):
    def setUp(self) -> None:
        module._spare.clear()

    def told(self, cache_of: object, why: str) -> None:
        it = model()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cache = cache_of(it)
            out = it.generate(**prompt(1, 20), past_key_values=cache, max_new_tokens=10, do_sample=False)
        told = [str(one.message) for one in told if "gpumux" in str(one.message)]
        self.assertTrue(told and why in told[0], told)
        self.assertFalse(cache.elastic)
        self.assertTrue(torch.equal(out, it.generate(**prompt(1, 20), max_new_tokens=10, do_sample=False)))

    def test_wrong_length_or_wait_is_an_error_at_once(self) -> None:
        for options, why in (
            ({"max_length": 0}, "max_length is a whole number from 1 .*, not 0"), ({"max_length": -5}, "not -5"), ({"max_length": "80"}, "not '80'"),
            ({"wait_s": "long"}, "could not convert"), ({"wait_s": None}, "NoneType"),
        ):  # fmt: skip
            with self.assertRaisesRegex((TypeError, ValueError), why):
                ElasticCache(model(), **options)

    def test_model_on_the_processor_has_its_own_memory(self) -> None:
        self.told(ElasticCache, "the model is on cpu")

    def test_without_the_library_it_is_its_own_memory(self) -> None:
        with mock.patch.object(module, "_device", lambda _states: 0):
            self.told(ElasticCache, "start the program with `gpumux run`")

    def test_another_version_has_its_own_memory(self) -> None:
        with mock.patch.object(transformers, "__version__", "6.1.0"):
            self.told(ElasticCache, "transformers 6.1.0 is not one of 5.")

    def test_training_has_its_own_memory(self) -> None:
        it = model()
        with mock.patch.object(kv, "_Elastic", Range), mock.patch.object(module, "_device", lambda _states: 0):
            cache = ElasticCache(it)
            it(prompt(1, 20)["input_ids"], past_key_values=cache).logits.sum().backward()
        self.assertFalse(cache.elastic)

    def test_each_new_token_is_progress_also_where_several_come_at_once(self) -> None:
        with mock.patch.object(gpumux, "progress") as progress:
            tokens = Tokens()
            for length in (21, 25, 26, 21, 23):
                self.assertEqual(tokens(torch.zeros((3, length)), None).tolist(), [False] * 3)
            self.assertEqual([call.args[0] for call in progress.call_args_list], [3, 12, 3, 3, 6])
            progress.reset_mock()
            inputs = prompt(1, 60)
            inputs["input_ids"][0, 30:] = inputs["input_ids"][0, :30]
            model().generate(**inputs, max_new_tokens=40, do_sample=False, prompt_lookup_num_tokens=4, stopping_criteria=[Tokens()])
        counted = [call.args[0] for call in progress.call_args_list]
        self.assertLess(len(counted), 36)
        # All but what the first step had beside its first token.
        self.assertTrue(36 <= sum(counted) <= 40, counted)

    def test_new_tokens_are_reported_as_progress(self) -> None:
        it = model()
        with mock.patch.object(gpumux, "progress") as progress:
            it.generate(**prompt(3, 20), max_new_tokens=10, do_sample=False, stopping_criteria=[Tokens()])
        self.assertEqual(sum(call.args[0] for call in progress.call_args_list), 30)


if __name__ == "__main__":
    unittest.main()
