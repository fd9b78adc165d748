"""Answers that look right and are not, with the symptom that each must be told.

Most of them were once in an engine or in a course: decode positions off by one, pairs interleaved,
a key length one too short at a chunk's edge, a cache that never writes position 0, heads tiled.
"""

NORM = """
def rms_norm(x, weight, eps):
    x32 = x.float()
    normed = {normed}
    return {out}
"""
MEAN_SQUARE = "x32.pow(2).mean(-1, keepdim=True)"
ROUND_FIRST = "normed.to(x.dtype) * weight"

ROPE = """
import torch

def apply_rope(x, positions, theta):
    half = x.shape[-1] // 2
    positions = {positions}
    speeds = theta ** (-torch.arange(half) {exponent})
    angles = positions[:, None, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    a, b = {halves}
    turned = {turned}
    return {out}.to(x.dtype)
"""
HALF = {
    "positions": "positions.float()",
    "exponent": "/ half",
    "halves": "x[..., :half].float(), x[..., half:].float()",
    "turned": "a * cos - b * sin, b * cos + a * sin",
    "out": "torch.cat(turned, dim=-1)",
}

ATTEND = """
import torch

def attend(query, key, value):
    new, heads, dim = query.shape
    length, kv_heads, _ = key.shape
    group = heads // kv_heads
    {repeat}
    scores = torch.einsum("qhd,khd->hqk", query, key).float() {scale}
    may_see = {mask}
    weights = scores.masked_fill(~may_see, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights.to(value.dtype), value)
"""
SHARED = {
    "repeat": "key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))",
    "scale": "* dim**-0.5",
    "mask": "torch.ones(new, length, dtype=torch.bool).tril(length - new)",
}

WRITE = """
def write_kv(key_cache, value_cache, key, value, slot_mapping):
    real = {real}
    slots = slot_mapping[real]
    size = key_cache.shape[1]
    {write}
"""
IN_PLACE = """key_cache[slots // size, slots % size] = key[real]
    value_cache[slots // size, slots % size] = value[real]"""

ROOF = """
def kv_bytes_per_token(config, bytes_per_number):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return {kv}

def decode_side(config, num_weights, batch, context, bytes_per_number, ridge):
    cache = context * kv_bytes_per_token(config, bytes_per_number)
    operations = 2 * num_weights * {operations}
    moved = num_weights * bytes_per_number * {walks} + {cache}
    return "memory" if operations / moved < ridge else "compute"
"""
COUNTED = {
    "kv": 'config["num_hidden_layers"] * 2 * kv_heads * head_dim * bytes_per_number',
    "operations": "batch",
    "walks": "1",
    "cache": "cache * batch",
}


def norm(normed: str, out: str = ROUND_FIRST) -> str:
    """A version of exercise 01.1."""
    return NORM.format(normed=normed, out=out)


WRONG: dict[str, list[tuple[str, str]]] = {
    "01.1": [
        (norm(f"x32 / ({MEAN_SQUARE}.sqrt() + eps)"), r"eps is added to the mean square, inside"),
        (
            norm(f"x * ({MEAN_SQUARE.replace('x32', 'x')} + eps).rsqrt()"),
            r"are off: the squares are added up in torch\.bfloat16",
        ),
        (
            norm(f"x32 * ({MEAN_SQUARE} + eps).rsqrt()", "(normed * weight.float()).to(x.dtype)"),
            r"round to x's type first",
        ),
        (
            norm(
                "(c := x32 - x32.mean(-1, keepdim=True)) * (c.pow(2).mean(-1, True) + eps).rsqrt()"
            ),
            r"the mean is subtracted: that is LayerNorm",
        ),
        (norm("x32 * (x32.pow(2).mean() + eps).rsqrt()"), r"depends on its neighbours"),
        (norm(f"x32 * ({MEAN_SQUARE} + eps).rsqrt()", "normed * weight"), r"must keep the input's"),
    ],
    "01.2": [
        (ROPE.format(**HALF | {"positions": "positions.float() + 1"}), r"off by one"),
        (
            ROPE.format(
                **HALF
                | {
                    "halves": "x[..., ::2].float(), x[..., 1::2].float()",
                    "out": "torch.stack(turned, dim=-1).flatten(-2)",
                }
            ),
            r"the pairs are interleaved",
        ),
        (
            ROPE.format(**HALF | {"positions": "torch.arange(len(x)).float()"}),
            r"`positions` is ignored",
        ),
        (
            ROPE.format(**HALF | {"turned": "a * cos + b * sin, b * cos - a * sin"}),
            r"turns the wrong way",
        ),
        (ROPE.format(**HALF | {"exponent": "/ half / 2"}), r"the pairs turn too fast"),
        (
            ROPE.format(**HALF | {"positions": "positions.to(x.dtype)"}),
            r"bf16 has no number 4001",
        ),
    ],
    "01.3": [
        (
            ATTEND.format(**SHARED | {"mask": "torch.ones(new, length, dtype=torch.bool).tril()"}),
            r"query 0 sees only key 0",
        ),
        (
            ATTEND.format(
                **SHARED | {"repeat": "key, value = (t.repeat(1, group, 1) for t in (key, value))"}
            ),
            r"the heads are tiled",
        ),
        (
            ATTEND.format(**SHARED | {"mask": "torch.ones(new, length, dtype=torch.bool)"}),
            r"tokens see the future",
        ),
        (
            ATTEND.format(
                **SHARED
                | {
                    "mask": "torch.ones(new, length, dtype=torch.bool).tril(length - new)\n"
                    "    may_see[:, -1] &= length == new"
                }
            ),
            r"does not see its own key: the key length",
        ),
        (
            ATTEND.format(
                **SHARED
                | {"mask": "torch.ones(new, length, dtype=torch.bool).tril(length - new - 1)"}
            ),
            r"some query sees no key at all",
        ),
        (ATTEND.format(**SHARED | {"scale": ""}), r"not divided by sqrt\(head_dim\)"),
    ],
    "01.4": [
        (WRITE.format(real="slot_mapping > 0", write=IN_PLACE), r"slot 0 is never written"),
        (
            WRITE.format(real="slot_mapping >= -1", write=IN_PLACE),
            r"padding \(slot -1\) was written over the cache's last slot",
        ),
        (
            WRITE.format(
                real="slot_mapping >= 0",
                write="key_cache.reshape(-1, *key.shape[1:])[slots] = key[real]\n"
                "    value_cache.reshape(-1, *key.shape[1:])[slots] = value[real]",
            ),
            r"reshape made a copy",
        ),
        (
            WRITE.format(real="slot_mapping >= 0", write=IN_PLACE.replace("= value", "= key")),
            r"the value cache holds the keys",
        ),
        (
            WRITE.format(
                real="slot_mapping >= 0",
                write=IN_PLACE.replace("slots", "slots.sort().values"),
            ),
            r"hold other tokens' keys",
        ),
    ],
    "01.5": [
        (
            ROOF.format(**COUNTED | {"kv": COUNTED["kv"].replace("* 2 ", "")}),
            r"that is the keys alone",
        ),
        (
            ROOF.format(**COUNTED | {"kv": COUNTED["kv"].replace("kv_heads", "heads")}),
            r"query heads are counted",
        ),
        (
            ROOF.format(
                **COUNTED
                | {"kv": COUNTED["kv"].replace("head_dim", 'config["hidden_size"] // heads')}
            ),
            r"config\.json states head_dim",
        ),
        (ROOF.format(**COUNTED | {"cache": "cache"}), r"rows do not share it"),
        (ROOF.format(**COUNTED | {"walks": "batch"}), r"share one walk through the weights"),
    ],
}
