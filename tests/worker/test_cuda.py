"""The same worker on a GPU: same tokens, a measured budget, memory given back."""

import pytest
import torch
from nanofixtures.steps import Steps
from nanofixtures.tiny import make_tiny

from nanoserve.config.arch import ModelArch
from nanoserve.config.cache import CacheConfig
from nanoserve.config.device import DeviceConfig
from nanoserve.config.engine import EngineConfig
from nanoserve.config.model import ModelConfig
from nanoserve.config.scheduler import SchedulerConfig
from nanoserve.kvcache.spec import make_kv_cache_config
from nanoserve.sampling.philox import Purpose, random_words
from nanoserve.sampling.sampler import Sampler, SamplingBatch, SamplingColumns
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.worker import Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def config_of(folder, device):
    arch = ModelArch.from_folder(folder)
    return EngineConfig(
        ModelConfig("tiny", str(folder), str(folder), ["tiny"], arch, max_model_len=64),
        CacheConfig(block_size=4, gpu_memory_utilization=0.05),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        DeviceConfig(device),
    )


def generate(folder, device):
    config = config_of(folder, device)
    worker = Worker(config)
    available = worker.determine_available_memory()
    worker.initialize_cache(
        make_kv_cache_config(worker.get_kv_cache_specs(), available, config.model.max_model_len)
    )
    steps, tokens = Steps(), {}
    params = {
        "greedy": SamplingParams(temperature=0.0, logprobs=2),
        "open": SamplingParams(seed=1),
        "cut": SamplingParams(seed=2, top_k=20, top_p=0.9, min_p=0.01),
        "held": SamplingParams(temperature=0.0, min_tokens=5),
    }
    for number, (name, p) in enumerate(params.items()):
        steps.add(name, range(number, number + 7), p, seed=p.seed or 0, eos=[2])
        tokens[name] = []
    for counts in [dict.fromkeys(params, 4), dict.fromkeys(params, 3)] + [
        dict.fromkeys(params, 1)
    ] * 12:
        for name, new in worker.execute_model(steps.step(counts)).sampled_token_ids.items():
            tokens[name] += new
    worker.shutdown()
    return tokens, available


def test_a_gpu_gives_the_tokens_of_the_cpu_within_its_budget(tmp_path):
    folder = make_tiny(tmp_path)
    expected, _ = generate(folder, "cpu")
    before = torch.cuda.memory_allocated()
    tokens, available = generate(folder, "cuda")
    assert tokens == expected
    _, total = torch.cuda.mem_get_info()
    assert 0 < available < 0.05 * total
    # cuBLAS keeps its workspace for the process.
    assert torch.cuda.memory_allocated() - before < 64 * 2**20


def test_SA4_same_integers_and_same_choices_as_on_the_cpu():
    seeds, positions = torch.tensor([0, -1, 2**62 + 3]), torch.tensor([0, 5, 70_000])
    lanes = torch.arange(1000)[None]
    here = random_words(seeds, positions, lanes, Purpose.SAMPLE)
    there = random_words(seeds.cuda(), positions.cuda(), lanes.cuda(), Purpose.SAMPLE)
    assert torch.equal(here, there.cpu())

    logits = torch.randn(60, 3000, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.95),
        SamplingParams(top_k=30, temperature=0.7),
        SamplingParams(temperature=0.0),
    ] * 15
    chosen = []
    for device in ("cpu", "cuda"):
        columns = SamplingColumns(60, torch.device(device))
        for row, p in enumerate(params):
            columns.write(row, p, row)
        places = torch.arange(60, device=device)
        batch = SamplingBatch.build(columns, params, places)
        chosen.append(Sampler()(logits.to(device), batch).token_ids.cpu())
    assert torch.equal(*chosen)
