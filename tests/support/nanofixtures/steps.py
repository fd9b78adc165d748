"""A model that records what it is given, and hand-written steps."""

import itertools
import random

import torch

from nanoserve.config.arch import ModelArch
from nanoserve.config.cache import CacheConfig
from nanoserve.config.engine import EngineConfig
from nanoserve.config.model import ModelConfig
from nanoserve.config.scheduler import SchedulerConfig
from nanoserve.engine.connector import KVConnectorRole, NullConnector
from nanoserve.kvcache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from nanoserve.worker.drafter import NullDrafter
from nanoserve.worker.graph import EagerRunner
from nanoserve.worker.runner import ModelRunner

CPU = torch.device("cpu")
VOCAB = 32
GREEDY = SamplingParams(temperature=0.0)


class RecordingModel:
    """Keeps every batch. Its next token is a sum over the token and its position, nothing else."""

    def __init__(self):
        self.batches = []

    def __call__(self, batch, kv_caches):
        self.batches.append(batch)
        return torch.stack((batch.input_ids, batch.positions), 1).float()

    def compute_logits(self, hidden):
        logits = torch.zeros(len(hidden), VOCAB)
        following = next_token(hidden[:, 0].long(), hidden[:, 1].long())
        return logits.scatter_(1, following[:, None], 5.0)


def next_token(token, position):
    return (token * 3 + position + 1) % VOCAB


class NoBackend:
    """Knows a layout and attends to nothing."""

    name = "none"

    def __init__(self):
        self.prepared = []

    def kv_cache_shape(self, num_blocks, block_size, num_kv_heads, head_dim):
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def prepare(self, metadata):
        self.prepared.append(metadata)


def engine_config(max_num_seqs=4, max_model_len=32, budget=64, **model):
    arch = ModelArch("Fake", VOCAB, 2, 2, 1, 1, 1, 2, max_model_len)
    return EngineConfig(
        ModelConfig("fake", "", "", ["fake"], arch, max_model_len=max_model_len, **model),
        CacheConfig(block_size=4),
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
    )


def make_runner(
    model=None, groups=1, drafter=None, connector=None, graph=EagerRunner, blocks=64, **config
):
    settings = engine_config(**config)
    model = model or RecordingModel()
    runner = ModelRunner(
        settings,
        model,
        NoBackend(),
        graph(model),
        drafter or NullDrafter(settings, model),
        connector or NullConnector(settings, KVConnectorRole.WORKER),
        CPU,
    )
    spec = FullAttentionSpec(4, 1, 2, 4)
    kv_config = KVCacheConfig(blocks, tuple(KVCacheGroup((i,), spec) for i in range(groups)))
    caches = [torch.zeros(2, blocks, 4, 1, 2) for _ in range(groups)]
    runner.set_cache(kv_config, caches)
    return runner, model


class Steps:
    """Writes SchedulerOutputs by hand, giving out blocks as they are needed."""

    def __init__(self, block_size=4, groups=1, seed=0):
        self.size, self.groups = block_size, groups
        fresh = list(range(1, 64))
        random.Random(seed).shuffle(fresh)
        self.fresh = itertools.chain(fresh)
        self.blocks, self.computed, self.new = {}, {}, {}
        self.finished = set()

    def add(self, name, tokens, params=GREEDY, seed=0, prompt=None, eos=()):
        self.blocks[name] = tuple([] for _ in range(self.groups))
        self.computed[name] = 0
        self.new[name] = (list(tokens), params, seed, prompt or len(tokens), list(eos))

    def finish(self, name):
        self.finished.add(name)

    def step(self, counts, drafts=None, **more):
        out = SchedulerOutput(
            num_scheduled_tokens=dict(counts),
            scheduled_spec_decode_tokens=dict(drafts or {}),
            finished_req_ids=self.finished,
            **more,
        )
        self.finished = set()
        for name, count in counts.items():
            needed = -(-(self.computed[name] + count) // self.size)
            fresh = tuple(
                [next(self.fresh) for _ in range(needed - len(group))]
                for group in self.blocks[name]
            )
            for group, blocks in zip(self.blocks[name], fresh, strict=True):
                group += blocks
            if name in self.new:
                tokens, params, seed, prompt, eos = self.new.pop(name)
                out.scheduled_new_reqs.append(
                    NewRequestData(
                        name, tokens, prompt, params, seed, fresh, self.computed[name], eos
                    )
                )
            else:
                out.scheduled_cached_reqs.append(
                    CachedRequestData(name, fresh, self.computed[name])
                )
            self.computed[name] += count
        return out
