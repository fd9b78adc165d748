"""The worker with a real model, and what is around it: memory, settings, connectors, padding."""

import weakref
from typing import ClassVar

import pytest
import torch
from nanofixtures.steps import Steps
from nanofixtures.tiny import make_tiny, tiny_reference

from nanoserve.config.arch import ModelArch
from nanoserve.config.cache import CacheConfig
from nanoserve.config.device import DeviceConfig
from nanoserve.config.engine import EngineConfig
from nanoserve.config.kv_transfer import KVTransferConfig
from nanoserve.config.model import ModelConfig
from nanoserve.config.scheduler import SchedulerConfig
from nanoserve.config.speculative import SpeculativeConfig
from nanoserve.engine.connector import KV_CONNECTORS, NullConnector
from nanoserve.errors import ConfigError, ModelLoadError
from nanoserve.kvcache.spec import make_kv_cache_config
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.batch import make_batch
from nanoserve.worker.runner import ModelRunner
from nanoserve.worker.worker import Worker

BLOCKS = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


def config_of(folder, device="cpu", connector="null", drafter="none", backend=None, **model):
    arch = ModelArch.from_folder(folder)
    return EngineConfig(
        ModelConfig("tiny", str(folder), str(folder), ["tiny"], arch, max_model_len=64, **model),
        CacheConfig(block_size=4, num_blocks=BLOCKS),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        DeviceConfig(device, backend),
        speculative=SpeculativeConfig(drafter),
        kv_transfer=KVTransferConfig(connector),
    )


def start(config):
    worker = Worker(config)
    kv_config = make_kv_cache_config(
        worker.get_kv_cache_specs(),
        worker.determine_available_memory(),
        config.model.max_model_len,
        config.cache.num_blocks,
    )
    worker.initialize_cache(kv_config)
    return worker


@pytest.fixture
def worker(tiny):
    worker = start(config_of(tiny))
    yield worker
    worker.shutdown()


def run(worker, prompts, schedule, params):
    """Follow a schedule of chunks, then decode one token a step; returns each one's tokens."""
    steps, tokens = Steps(seed=3), {name: [] for name in prompts}
    for name, prompt in prompts.items():
        steps.add(name, prompt, params[name], seed=params[name].seed or 0)
    for counts in schedule:
        output = worker.execute_model(steps.step(counts))
        for name, new in output.sampled_token_ids.items():
            tokens[name] += new
    for name in prompts:
        steps.finish(name)
    worker.execute_model(steps.step({}))
    return tokens


def test_SC7_chunked_prefill_and_decode_equal_one_shot_and_transformers(worker):
    reference = tiny_reference()
    greedy = SamplingParams(temperature=0.0)
    drawn = SamplingParams(temperature=1.0, seed=11)
    a, b = list(range(40, 53)), [7, 300, 2]
    prompts, params = {"a": a, "b": b}, {"a": greedy, "b": drawn}
    one_shot = run(worker, prompts, [{"a": 13, "b": 3}] + [{"a": 1, "b": 1}] * 9, params)
    chunked = run(
        worker,
        prompts,
        [{"b": 1, "a": 4}, {"a": 1, "b": 2}, {"b": 1, "a": 7}, {"a": 1, "b": 1}]
        + [{"b": 1, "a": 1}] * 7 + [{"a": 1}] * 2,
        params,
    )  # fmt: skip
    assert chunked["a"] == one_shot["a"]
    assert chunked["b"] == one_shot["b"]
    alone = run(worker, {"b": b}, [{"b": 3}] + [{"b": 1}] * 9, params)
    assert alone["b"] == one_shot["b"]
    expected = reference.generate(torch.tensor([a]), max_new_tokens=10, eos_token_id=None)
    assert one_shot["a"] == expected[0, len(a) :].tolist()


def test_A09_a_graph_runner_that_pads_does_not_touch_the_last_slot(tiny, monkeypatch):
    """Three decodes padded to four: the pad has slot -1, and another request owns the last slot."""

    class Padding:
        def __init__(self, model):
            self.model, self.padded = model, 0

        def capture(self, kv_caches):
            pass

        def run(self, batch, kv_caches):
            real = len(batch.input_ids)
            pad = -real % 4
            self.padded += pad
            for name, fill in (("input_ids", 5), ("positions", 0)):
                value = getattr(batch, name)
                setattr(batch, name, torch.cat((value, value.new_full((pad,), fill))))
            for metadata in batch.attn:
                slots = metadata.slot_mapping
                metadata.slot_mapping = torch.cat((slots, slots.new_full((pad,), -1)))
                self.model.attention_layers[0].backend.prepare(metadata)
            hidden = self.model(batch, kv_caches)
            batch.positions = batch.positions[:real]
            return hidden[:real]

    prompts = {name: [i + 1, i + 2] for i, name in enumerate("abc")}
    params = dict.fromkeys(prompts, SamplingParams(temperature=0.0))
    schedule = [dict.fromkeys(prompts, 2)] + [dict.fromkeys(prompts, 1)] * 6
    worker = start(config_of(tiny))
    expected = run(worker, prompts, schedule, params)
    worker.shutdown()

    monkeypatch.setattr("nanoserve.worker.worker.EagerRunner", Padding)
    worker = start(config_of(tiny))
    caches = worker.runner.kv_caches
    for cache in caches:
        cache[:, BLOCKS - 1] = 123.0
    assert run(worker, prompts, schedule, params) == expected
    assert worker.runner._graph.padded > 0
    assert all((cache[:, BLOCKS - 1] == 123.0).all() for cache in caches)
    worker.shutdown()


def test_A20_ids_that_the_tokenizer_does_not_know_are_never_sampled(tiny):
    worker = start(config_of(tiny, tokenizer_size=40))
    params = {"a": SamplingParams(temperature=1.0, seed=1), "b": SamplingParams(temperature=0.0)}
    schedule = [{"a": 2, "b": 2}] + [{"a": 1, "b": 1}] * 20
    tokens = run(worker, {"a": [300, 1], "b": [300, 2]}, schedule, params)
    assert max(tokens["a"] + tokens["b"]) < 40
    worker.shutdown()


def test_the_cache_is_one_zeroed_tensor_a_layer_and_the_layers_know_their_group(worker):
    runner = worker.runner
    assert len(runner.kv_caches) == 2
    for cache in runner.kv_caches:
        assert cache.dtype == torch.float32
        assert cache.shape == runner._backend.kv_cache_shape(BLOCKS, 4, 2, 16)
        # The warm-up wrote nothing.
        assert (cache == 0).all()
    assert [layer.kv_group for layer in worker._layers] == [0, 0]
    specs = worker.get_kv_cache_specs()
    assert specs[0].page_size_bytes == 2 * 4 * 2 * 16 * 4
    assert (worker.device, worker.dtype, worker.vocab_size) == ("cpu", "float32", 512)


def test_A76_shutdown_frees_model_and_cache(tiny):
    worker = start(config_of(tiny))
    run(worker, {"a": [1]}, [{"a": 1}], {"a": SamplingParams(temperature=0.0)})
    model = weakref.ref(worker.runner.model)
    cache = weakref.ref(worker.runner.kv_caches[0])
    worker.shutdown()
    worker.shutdown()
    assert model() is None
    assert cache() is None
    with pytest.raises(RuntimeError, match="shut down"):
        worker.execute_model(Steps().step({}))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"device": "tpu"}, ConfigError, "device must be auto, cpu, cuda, not 'tpu'"),
        ({"backend": "magic"}, ConfigError, "unknown attention backend 'magic'; known: "),
        ({"connector": "pipe"}, ConfigError, "unknown KV connector 'pipe'; known: "),
        ({"drafter": "oracle"}, ConfigError, "unknown drafter 'oracle'; known: "),
    ],
)
def test_a_wrong_setting_is_one_line(tiny, settings, error, message):
    with pytest.raises(error, match=message) as caught:
        Worker(config_of(tiny, **settings))
    assert "\n" not in str(caught.value)


def test_A83_a_folder_without_weights_is_one_line(tiny, tmp_path):
    config = config_of(tiny)
    config.model.path = str(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        Worker(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "asked", "native", "expected"),
    [
        ("float32", "auto", True, "float32"),
        ("bfloat16", "auto", True, "bfloat16"),
        ("bfloat16", "auto", False, "float32"),
        ("float32", "bfloat16", False, "bfloat16"),
    ],
)
def test_dtype_auto_is_the_platform_s_choice(
    tmp_path, monkeypatch, stored, asked, native, expected
):
    monkeypatch.setattr("nanoserve.platforms.cpu.has_native_bf16", lambda text: native)
    worker = start(config_of(make_tiny(tmp_path, dtype=stored), dtype=asked))
    assert worker.dtype == expected
    assert worker.runner.kv_caches[0].dtype == getattr(torch, expected)
    run(worker, {"a": [1, 2]}, [{"a": 2}, {"a": 1}], {"a": SamplingParams(top_p=0.5)})
    worker.shutdown()


class LayerJournal(NullConnector):
    calls: ClassVar[list] = []

    def register_kv_caches(self, kv_caches):
        self.calls.append(("register", len(kv_caches)))

    def wait_for_layer_load(self, layer_index):
        self.calls.append(("wait", layer_index))

    def save_kv_layer(self, layer_index, kv_cache, metadata):
        slots = metadata.slot_mapping
        written = slots[slots >= 0]
        block, offset = int(written[0]) // 4 if len(written) else 0, 0
        saved = bool((kv_cache[0, block, :, offset] != 0).any()) if len(written) else None
        self.calls.append(("save", layer_index, saved))

    def shutdown(self):
        self.calls.append(("shutdown",))


def test_PD1_a_connector_acts_before_and_after_each_layer(tiny, monkeypatch):
    monkeypatch.setitem(KV_CONNECTORS._entries, "journal", LayerJournal)
    calls = LayerJournal.calls
    calls.clear()
    worker = start(config_of(tiny, connector="journal"))
    assert calls[0] == ("register", 2)
    calls.clear()
    run(worker, {"a": [1, 2, 3]}, [{"a": 3}], {"a": SamplingParams(temperature=0.0)})
    # When a layer is saved its new keys are in the cache.
    assert calls == [("wait", 0), ("save", 0, True), ("wait", 1), ("save", 1, True)]
    worker.shutdown()
    assert calls[-1] == ("shutdown",)


def test_the_profiling_run_needs_no_cache(tiny):
    worker = Worker(config_of(tiny))
    worker._profile()
    assert worker.runner.kv_caches == []
    worker.shutdown()


def test_batches_are_made_without_the_model(worker):
    """`make_batch` is a pure function of rows, tables and plan."""
    steps = Steps()
    steps.add("a", [1, 2, 3], SamplingParams(temperature=0.0))
    runner: ModelRunner = worker.runner
    step = steps.step({"a": 3})
    runner._update_rows(step)
    plan = runner._plan(step)
    first = make_batch(plan, runner.rows, runner.block_tables)
    second = make_batch(plan, runner.rows, runner.block_tables)
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.attn[0].slot_mapping, second.attn[0].slot_mapping)
