"""Graders of chapter 01: the parts of a model, its cache, and the roofline.

Each compares with a float64 reference over varied shapes, types and positions. Where an answer is
wrong in a way that a real engine once was, the message names that symptom: the answer is compared
with what the mistake would give.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from nanobook.grading import Wrong, chapter_check, grader
from nanobook.oracles import exact_norm, look_back, must_be_tensor, near, random, turn

Tensor = torch.Tensor


# -- 01.1 ---------------------------------------------------------------------------------------


@grader(
    "01.1",
    answer="rms_norm",
    hints=[
        "Everything between the input and the normalised vector happens in x.float().",
        "eps is added to the mean of the squares, before the root.",
        "Go back to x.dtype first, multiply by the weight second.",
    ],
)
def norm(rms_norm: Callable[..., Any]) -> None:
    """RMSNorm with fp32 inside, in every floating type."""
    for shape in ((3, 64), (2, 5, 128), (1, 576)):
        x, weight = random(*shape), 1 + random(shape[-1], seed=1) / 4
        before = x.clone()
        ours = must_be_tensor("rms_norm", rms_norm(x, weight, 1e-5), x.shape, x.dtype)
        if not torch.equal(x, before):
            raise Wrong("x has changed: the residual stream still needs it, so leave it as it is")
        _name_norm_mistake(ours, x, weight, 1e-5)
    small = random(4, 64) * 1e-3
    ours = rms_norm(small, torch.ones(64), 1e-5)
    if not near(ours, exact_norm(small, torch.ones(64), 1e-5)):
        raise Wrong(
            "small vectors come out with the wrong length: eps is added to the mean square, inside "
            "the root, not to the root"
        )
    if not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).isfinite().all():
        raise Wrong("a vector of zeros becomes NaN: eps is missing")
    _grade_half_types(rms_norm)
    x, weight = random(3, 64) / 8, torch.ones(64)
    if not near(rms_norm(x, weight, 0.1), exact_norm(x, weight, 0.1)):
        raise Wrong("with another eps the result is wrong: it is an argument, and no constant")


def _name_norm_mistake(ours: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    if near(ours, exact_norm(x, weight, eps)):
        return
    centred = x - x.mean(-1, keepdim=True)
    over_all = x / (x.pow(2).mean() + eps).sqrt() * weight
    if near(ours, exact_norm(centred, weight, eps)):
        raise Wrong("the mean is subtracted: that is LayerNorm; RMSNorm only divides")
    if near(ours, exact_norm(x, torch.ones_like(weight), eps)):
        raise Wrong("the learned weight is not applied")
    if near(ours, exact_norm(x, weight, eps) / math.sqrt(x.shape[-1])):
        raise Wrong("vectors come out too short: divide by the root of the mean, not of the sum")
    if near(ours, over_all.double()):
        raise Wrong("a token's result depends on its neighbours: take the mean over dim=-1 only")
    raise Wrong("in fp32 the result is not x / sqrt(mean(x²) + eps) * weight")


def _grade_half_types(rms_norm: Callable[..., Any]) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = random(64, 576, dtype=dtype) * 8
        weight = (1 + random(576, seed=1) / 4).to(dtype)
        ours = must_be_tensor(f"rms_norm of {dtype}", rms_norm(x, weight, 1e-5), x.shape, dtype)
        normed = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        right = normed.to(dtype) * weight
        late = (normed * weight.float()).to(dtype)
        # The last bit of the fp32 mean is nobody's business; it shows in a number in a thousand.
        differ = (ours != right).float().mean().item()
        if differ < 0.005:
            continue
        if (ours != late).float().mean().item() < 0.005:
            raise Wrong(
                f"in {dtype} {differ:.0%} of the numbers differ from transformers' in the last "
                "bit: round to x's type first, then multiply by the weight"
            )
        raise Wrong(
            f"in {dtype} {differ:.0%} of the numbers are off: the squares are added up in {dtype}; "
            "compute in fp32 and round once"
        )
    large = torch.full((1, 64), 300.0, dtype=torch.float16)
    if not near(rms_norm(large, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones(1, 64)):
        raise Wrong("300 in fp16 does not come out as 1: its square overflows; compute in fp32")


# -- 01.2 ---------------------------------------------------------------------------------------


@grader(
    "01.2",
    answer="apply_rope",
    hints=[
        "Cut the last dimension into two halves, a and b: number i pairs with number i + dim / 2.",
        "Pair i turns by position * theta ** (-i / (dim / 2)); keep these angles in fp32.",
        "positions has one entry a token: make it [tokens, 1, 1] so that all heads turn alike.",
        "The turned halves are a cos - b sin and b cos + a sin.",
    ],
)
def rope(apply_rope: Callable[..., Any]) -> None:
    """Half-split RoPE at any positions."""
    x = random(2, 3, 64)
    still = must_be_tensor(
        "apply_rope", apply_rope(x, torch.zeros(2).long(), 1e4), x.shape, x.dtype
    )
    if not near(still, x):
        if near(still, turn(x, torch.ones(2), 1e4)):
            raise Wrong(
                "a token at position 0 is turned: positions are off by one, and the text would "
                "still read well"
            )
        if not near(still, turn(x, torch.arange(2), 1e4)):
            raise Wrong("a token at position 0 must come out as it went in")
    for positions, theta, dim in (
        (torch.tensor([0, 1, 2, 3]), 1e4, 64),
        (torch.tensor([41]), 1e5, 64),
        (torch.tensor([7, 3, 900, 0, 3]), 5e5, 16),
        (torch.tensor([5, 6]), 1e5, 128),
    ):
        x = random(len(positions), 3, dim)
        before = x.clone()
        ours = must_be_tensor("apply_rope", apply_rope(x, positions, theta), x.shape, x.dtype)
        if not torch.equal(x, before):
            raise Wrong("x has changed: return a new tensor")
        if not near(ours, turn(x, positions, theta), 1e-3):
            raise Wrong(_rope_mistake(ours, x, positions, theta))
    far = torch.tensor([4001, 4002])
    x = random(2, 3, 64, dtype=torch.bfloat16)
    ours = must_be_tensor("apply_rope of bf16", apply_rope(x, far, 1e5), x.shape, x.dtype)
    if not near(ours, turn(x, far, 1e5), 2e-2):
        raise Wrong(
            "in bf16 position 4001 is turned like another one: bf16 has no number 4001; compute "
            "positions and angles in fp32"
        )


def _rope_mistake(ours: Tensor, x: Tensor, positions: Tensor, theta: float) -> str:
    rows = torch.arange(len(positions))
    mistakes = {
        "the pairs are interleaved (2i, 2i + 1); this checkpoint pairs i with i + dim / 2": turn(
            x, positions, theta, interleaved=True
        ),
        f"a token at position {positions[-1]} is turned by its row in the batch: `positions` is "
        "ignored, so every decode step would be taken for position 0": turn(x, rows, theta),
        "the positions are off by one": turn(x, positions + 1, theta),
        "every pair turns the wrong way: it must be a cos - b sin and b cos + a sin": turn(
            x, positions, theta, sign=-1
        ),
        "the pairs turn too fast: pair i has the speed theta ** (-i / (dim / 2))": turn(
            x, positions, theta, step=1
        ),
        "theta is ignored: this model has its own base": turn(x, positions, 1e4),
    }
    for message, wrong in mistakes.items():
        if near(ours, wrong, 1e-3):
            return message
    return f"at positions {positions.tolist()} the numbers are not those of half-split RoPE"


# -- 01.3 ---------------------------------------------------------------------------------------


@grader(
    "01.3",
    answer="attend",
    hints=[
        "With 9 query heads and 3 KV heads, query heads 0, 1, 2 use KV head 0.",
        "key.repeat_interleave(group, dim=1) gives every query head a key of its own.",
        "Query j stands at position (length - new) + j and sees keys up to there, itself included.",
        "torch.ones(new, length).tril(length - new) is that mask.",
    ],
)
def attention(attend: Callable[..., Any]) -> None:
    """Grouped causal attention of a row's last tokens over all its tokens."""
    for new, length, heads, kv_heads, dim in (
        (5, 5, 4, 4, 16),
        (5, 5, 6, 2, 16),
        (1, 9, 9, 3, 64),
        (3, 8, 4, 1, 32),
        (7, 12, 8, 2, 8),
        (1, 1, 4, 2, 16),
    ):
        query = random(new, heads, dim)
        key, value = random(length, kv_heads, dim, seed=1), random(length, kv_heads, dim, seed=2)
        ours = must_be_tensor("attend", attend(query, key, value), query.shape, query.dtype)
        if not near(ours, look_back(query, key, value)):
            where = f"{new} new of {length} tokens, {heads} heads over {kv_heads}"
            raise Wrong(f"{_attention_mistake(ours, query, key, value)} ({where})")
    large = random(4, 2, 16) * 40
    ours = attend(large, large, large)
    if not ours.isfinite().all():
        raise Wrong("large scores give NaN: exp overflows; subtract the largest first, or softmax")
    half = [tensor.bfloat16() for tensor in (query, key, value)]
    must_be_tensor("attend of bf16", attend(*half), query.shape, torch.bfloat16)


def _attention_mistake(ours: Tensor, query: Tensor, key: Tensor, value: Tensor) -> str:
    past = len(key) - len(query)
    if ours.isnan().any():
        return "NaN: some query sees no key at all, yet each token sees at least itself"
    mistakes = {
        "query 0 sees only key 0: the mask's diagonal must begin where the past ends": look_back(
            query, key, value, offset=0
        ),
        "the heads are tiled (0, 1, 0, 1): neighbouring query heads share a KV head": look_back(
            query, key, value, tiled=True
        ),
        "tokens see the future: the causal mask is missing": look_back(
            query, key, value, offset=len(key)
        ),
        "tokens see one key too many, the next token's": look_back(query, key, value, seen=1),
        "the past is forgotten: only the new tokens' keys are read": look_back(
            query, key[past:], value[past:]
        ),
        "the scores are not divided by sqrt(head_dim)": look_back(query, key, value, scale=1.0),
        "the scores are divided by head_dim, not by its root": look_back(
            query, key, value, scale=1 / query.shape[-1]
        ),
    }
    if past:
        mistakes["a decode step does not see its own key: the key length is one too short"] = (
            look_back(query, key, value, seen=-1)
        )
    for message, wrong in mistakes.items():
        if near(ours, wrong):
            return message
    return "the result is not softmax(q kᵀ / sqrt(dim)) v"


# -- 01.4 ---------------------------------------------------------------------------------------


@grader(
    "01.4",
    answer="write_kv",
    hints=[
        "A slot is block * block_size + offset: // and % give both back.",
        "Tokens with slot -1 are padding: choose the others with slot_mapping >= 0.",
        "key_cache[blocks, offsets] = ... writes in place, whatever the cache's memory layout.",
    ],
)
def cache(write_kv: Callable[..., Any]) -> None:
    """Keys and values into their slots, in place."""
    for blocks, size, slots, permuted in (
        (3, 4, [0, 1, 2], False),
        (3, 4, [5, 0, 11, 7], False),
        (2, 8, [3, -1, 9, -1], False),
        (4, 2, [-1, -1], False),
        (3, 4, [4, 2, 8, 0], True),
    ):
        mapping = torch.tensor(slots)
        key, value = random(len(slots), 2, 8), random(len(slots), 2, 8, seed=1)
        caches = [_empty_cache(blocks, size, permuted) for _ in range(2)]
        write_kv(*caches, key, value, mapping)
        for name, written, new in zip(("key", "value"), caches, (key, value), strict=True):
            expected = torch.full_like(written, torch.nan)
            for slot, vector in zip(slots, new, strict=True):
                if slot >= 0:
                    expected[slot // size, slot % size] = vector
            if not torch.equal(written.nan_to_num(99), expected.nan_to_num(99)):
                other = value if name == "key" else key
                raise Wrong(_cache_mistake(name, written, expected, mapping, other, permuted))


def _empty_cache(blocks: int, size: int, permuted: bool) -> Tensor:
    if permuted:  # heads before tokens in memory, as some kernels like it
        return torch.full((blocks, 2, size, 8), torch.nan).transpose(1, 2)
    return torch.full((blocks, size, 2, 8), torch.nan)


def _cache_mistake(
    name: str, written: Tensor, expected: Tensor, slots: Tensor, other: Tensor, permuted: bool
) -> str:
    filled = ~written[:, :, 0, 0].isnan().flatten()
    wanted = ~expected[:, :, 0, 0].isnan().flatten()
    if not filled.any() and wanted.any():
        if permuted:
            return (
                f"the {name} cache is still empty when heads come before tokens in memory: "
                "reshape made a copy, and the copy was written"
            )
        return f"the {name} cache is still empty: write into it, do not return a new one"
    if wanted[0] and not filled[0]:
        return "slot 0 is never written: -1 is padding, 0 is the first token of block 0"
    if (slots < 0).any() and filled[-1] and not wanted[-1]:
        return "padding (slot -1) was written over the cache's last slot"
    if not torch.equal(filled, wanted):
        at = filled.nonzero().flatten().tolist()
        return f"slots {slots.tolist()} were asked for; {at} of the {name} cache were written"
    real = slots[slots >= 0]
    there = written[real // written.shape[1], real % written.shape[1]]
    if torch.equal(there, other[slots >= 0]):
        return f"the {name} cache holds the {'value' if name == 'key' else 'key'}s"
    return f"the {name} cache's slots hold other tokens' {name}s"


# -- 01.5 ---------------------------------------------------------------------------------------

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2["num_key_value_heads"] = 3
QWEN3 = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128}
GPT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}


def heads_of(config: dict[str, int]) -> tuple[int, int]:
    """(KV heads, head size) of a config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return config.get("num_key_value_heads", heads), head_dim


@grader(
    "01.5",
    answer=("kv_bytes_per_token", "decode_side"),
    hints=[
        "A token leaves a key and a value in every layer, for every KV head.",
        "config.get('head_dim', hidden_size // num_attention_heads): Qwen3 states its own.",
        "A decode step does 2 operations a weight and row; it reads the weights once, and every "
        "row's cache.",
        "Compare operations / bytes with the ridge.",
    ],
)
def roof(kv_bytes_per_token: Callable[..., Any], decode_side: Callable[..., Any]) -> None:
    """Bytes of the cache, and the side of the ridge a decode step lies on."""
    for name, config in {
        "SmolLM2": SMOLLM2,
        "Qwen3-0.6B": QWEN3,
        "a model without GQA": GPT,
    }.items():
        for size in (4, 2):
            _grade_bytes(name, config, size, kv_bytes_per_token(config, size))
    weights = 135_000_000
    cases = (
        # (config, batch, context, bytes a number, ridge, side, what a wrong side would mean)
        (SMOLLM2, 1, 100, 4, 7, "memory", "one row reads every weight for two operations"),
        (SMOLLM2, 64, 16, 4, 7, "compute", "64 rows share one walk through the weights"),
        (SMOLLM2, 64, 16, 4, 200, "memory", "the ridge is ignored, and it is the machine's"),
        (
            SMOLLM2,
            256,
            8192,
            2,
            30,
            "memory",
            "each row reads its cache, and rows do not share it",
        ),
        (SMOLLM2, 8, 16, 2, 5, "compute", "numbers of two bytes halve the bytes"),
        (QWEN3, 4, 32, 2, 300, "memory", "four rows are far from the ridge"),
    )
    for config, batch, context, size, ridge, right, why in cases:
        side = decode_side(config, weights, batch, context, size, ridge)
        if side not in ("memory", "compute"):
            raise Wrong(f"decode_side gives {side!r}; it must be 'memory' or 'compute'")
        if side != right:
            raise Wrong(
                f"batch {batch}, context {context}, {size} bytes, ridge {ridge}: this waits for "
                f"{right}, not {side}: {why}"
            )


def _grade_bytes(name: str, config: dict[str, int], size: int, ours: Any) -> None:
    kv_heads, head_dim = heads_of(config)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    right = 2 * layers * kv_heads * head_dim * size
    if ours == right:
        return
    mistakes = {
        right // 2: "that is the keys alone; the values are kept too",
        right // layers: "that is one layer; every layer has a cache of its own",
        right // size: "that counts numbers, not bytes",
    }
    if heads != kv_heads:
        mistakes[right // kv_heads * heads] = "query heads are counted; only KV heads are kept"
        if kv_heads != 1:
            mistakes[right // kv_heads] = "that is one KV head"
    if "head_dim" in config:
        guessed = right // head_dim * (config["hidden_size"] // heads)
        mistakes[guessed] = "config.json states head_dim; it is not hidden_size / heads here"
    why = mistakes.get(ours, f"it is {right:,}")
    raise Wrong(f"{name}, {size} bytes a number: {ours!r} bytes a token; {why}")


# -- the chapter --------------------------------------------------------------------------------


@chapter_check(1)
def model() -> None:
    """The learner's layers, models and dense cache against transformers, on tiny random models."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    _check_parts()
    common = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rope_theta": 5e3, "rms_norm_eps": 0.02,
    }  # fmt: skip
    tiny = {
        "LlamaForCausalLM": transformers.LlamaConfig(**common, tie_word_embeddings=True),
        "Qwen3ForCausalLM": transformers.Qwen3Config(**common, head_dim=16),
    }
    for name, config in tiny.items():
        torch.manual_seed(0)
        _check_model(name, config, getattr(transformers, name)(config).eval())


def _check_parts() -> None:
    """The parts alone, so that a message can say which one is off."""
    from nanoserve.config.arch import ModelArch, RopeSettings
    from nanoserve.layers.activation import silu_and_mul
    from nanoserve.layers.norm import RMSNorm
    from nanoserve.layers.rotary import RotaryEmbedding, rotary_embedding

    x = random(5, 64) / 9
    if not near(RMSNorm(64, 0.02)(x), exact_norm(x, torch.ones(64), 0.02)):
        raise Wrong("layers/norm.py: RMSNorm is not x / sqrt(mean(x²) + eps) * weight")
    arch = ModelArch("LlamaForCausalLM", 8, 32, 8, 1, 2, 1, 16, 64, rope=RopeSettings(5e3))
    positions, heads = torch.tensor([3, 0, 40]), random(3, 2, 16)
    turned = rotary_embedding(heads, *RotaryEmbedding(arch)(positions))
    if not near(turned, turn(heads, positions, 5e3)):
        raise Wrong("layers/rotary.py: the heads are not turned as half-split RoPE turns them")
    gate, up = random(3, 8), random(3, 8, seed=1)
    if not near(silu_and_mul(torch.cat((gate, up), -1)), gate * gate.sigmoid() * up):
        raise Wrong("layers/activation.py: not silu(gate) * up, gates first")


def _check_model(name: str, config: Any, oracle: Any) -> None:
    from nanoserve.attention.dense import DenseBackend
    from nanoserve.config.arch import ModelArch
    from nanoserve.models.registry import MODELS

    for parameter in oracle.parameters():  # norms that are not one, so that each is seen
        parameter.data += 0.1 * random(*parameter.shape)
    arch = ModelArch.from_dict({**config.to_dict(), "architectures": [name]})
    backend = DenseBackend()
    built = MODELS.load(name)(arch, backend)
    built.load_weights(
        (key, tensor)
        for key, tensor in oracle.state_dict().items()
        if not (arch.tie_word_embeddings and key == "lm_head.weight")
    )
    rows = [torch.randint(0, 96, (length,)).tolist() for length in (13, 5)]
    right = [oracle(torch.tensor([row])).logits[0] for row in rows]
    max_len = 20
    shape = backend.kv_cache_shape(2, max_len, arch.num_kv_heads, arch.head_dim)
    caches = [torch.full(shape, torch.nan) for _ in range(arch.num_layers)]
    done = [0, 0]
    # A prefill, a chunk beside a decode, decodes of one row while the other waits.
    for lengths in ((6, 2), (9, 3), (13, 4), (13, 5)):
        chunks = [row[a:b] for row, a, b in zip(rows, done, lengths, strict=True)]
        logits = _step(built, backend, caches, chunks, done, max_len)
        wanted = torch.cat([all_[a:b] for all_, a, b in zip(right, done, lengths, strict=True)])
        if not logits.isfinite().all():
            raise Wrong(f"{name}: NaN in the logits: a slot of the cache is read but not written")
        if not near(logits, wanted, 1e-3):
            kind = "a first prefill" if done == [0, 0] else "a step after others"
            raise Wrong(f"{name}: the logits of {kind} are not transformers'")
        done = list(lengths)


def _step(
    built: Any, backend: Any, caches: Any, chunks: Any, done: list[int], max_len: int
) -> Tensor:
    from nanoserve.forward import AttentionMetadata, ForwardBatch

    new = [len(chunk) for chunk in chunks]
    positions = torch.cat([torch.arange(a, a + n) for a, n in zip(done, new, strict=True)])
    row = torch.arange(len(new)).repeat_interleave(torch.tensor(new))
    lengths = [a + n for a, n in zip(done, new, strict=True)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *new]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.arange(len(new), dtype=torch.int32)[:, None],
        slot_mapping=row * max_len + positions,
        block_size=max_len,
        query_lens=new,
        seq_lens_cpu=lengths,
    )
    backend.prepare(metadata)
    tokens = torch.tensor([token for chunk in chunks for token in chunk])
    batch = ForwardBatch(tokens, positions, [metadata], torch.arange(len(tokens)))
    return built.compute_logits(built(batch, caches))
