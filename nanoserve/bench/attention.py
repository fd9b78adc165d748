"""`nanoserve bench attention`: the paged attention kernels beside the machine's limits.

Decode is held against the read bandwidth and prefill against cuDNN's dense attention, both measured
in the same run. Each figure carries its error against float64, because speed says nothing about
right numbers. Runs on a CUDA GPU only.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanoserve.version import __version__, source_hash

HEADS, KV_HEADS, DIM = 16, 8, 128
PREFILL_HEADS, PREFILL_KV_HEADS = 32, 8
CACHE_BYTES = 20 << 30
DECODE = [
    *((1, context) for context in (8192, 32768)),
    *((8, context) for context in (1024, 8192, 32768)),
    *((64, context) for context in (1024, 8192)),
    *((256, context) for context in (1024, 8192)),
]
RAGGED = 64
WARM_SECONDS = 0.2
PREFILL = [(1, 8192, 0), (8, 4096, 0), (32, 1024, 0), (4, 2048, 6144)]


def run_attention(args: argparse.Namespace) -> int:
    """Measure, print a table, and write JSON if asked. Returns the exit code."""
    if not torch.cuda.is_available():
        print("nanoserve bench attention needs a CUDA GPU", file=sys.stderr)
        return 2
    torch.manual_seed(args.seed)
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}: read bandwidth {bandwidth / 1e9:,.0f} GB/s")
    results: dict[str, Any] = {"decode": [], "prefill": []}
    if "decode" in args.parts:
        results["decode"] = bench_decode(args.block_size, bandwidth)
    if "prefill" in args.parts:
        results["prefill"] = bench_prefill(args.block_size)
    if args.output_json:
        report = {"read_bandwidth": bandwidth, "block_size": args.block_size, **results, **_about()}
        with open(args.output_json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


def read_bandwidth() -> float:
    """Bytes per second of the best of a few ways to read 4 GiB once."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    best = 0.0
    for shape in ((1 << 15, 1 << 15), (1 << 18, 1 << 12), (1 << 12, 1 << 18)):
        view = data.view(shape)
        seconds = _seconds([partial(view.sum, 1)], rounds=10)
        best = max(best, data.numel() * 4 / seconds)
    return max(best, _triton_bandwidth(data))


def _triton_bandwidth(data: torch.Tensor) -> float:
    from nanoserve.bench.peers import read_all

    best = 0.0
    for block, warps in ((4096, 8), (8192, 8), (2048, 4)):
        seconds = _seconds([partial(read_all, data, block, warps)], rounds=10)
        best = max(best, data.numel() * 4 / seconds)
    return best


def _seconds(calls: list[Callable[[], Any]], rounds: int = 20) -> float:
    """Median seconds of one call. The calls are captured in one graph, so that no launch waits."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    # An idle GPU runs at a lower clock; a short measurement would be over before it has risen.
    warm = time.monotonic() + WARM_SECONDS
    while time.monotonic() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[rounds // 2]


def bench_decode(block_size: int, bandwidth: float) -> list[dict[str, Any]]:
    """Each shape's time and share of the bandwidth, over a cache larger than the L2."""
    block_bytes = 2 * KV_HEADS * block_size * DIM * 2
    num_blocks = CACHE_BYTES // block_bytes
    cache = torch.randn(2, num_blocks, KV_HEADS, block_size, DIM, device="cuda").bfloat16()
    shapes = [(f"{batch} x {context}", [context] * batch) for batch, context in DECODE]
    generator = torch.Generator().manual_seed(0)
    lognormal = torch.exp(torch.randn(RAGGED, generator=generator) + math.log(2048))
    shapes.append((f"{RAGGED} lognormal", lognormal.clamp(16, 32768).int().tolist()))
    shapes = [s for s in shapes if sum(s[1]) <= num_blocks * block_size]
    return [_decode_shape(name, lengths, cache, block_size, bandwidth) for name, lengths in shapes]


def _decode_shape(
    name: str, lengths: list[int], cache: torch.Tensor, block_size: int, bandwidth: float
) -> dict[str, Any]:
    from nanokernels.decode_plan import plan_decode
    from nanokernels.launch import multiprocessors
    from nanokernels.paged_decode import paged_decode

    device = cache.device
    blocks = [-(-length // block_size) for length in lengths]
    # Calls take turns on distinct pages, so that the L2 holds none of what is read next.
    copies = max(1, min(16, cache.shape[1] // sum(blocks)))
    pages = torch.randperm(cache.shape[1], device=device)[: copies * sum(blocks)].int()
    tables = torch.zeros(copies, len(lengths), max(blocks), dtype=torch.int32, device=device)
    at = 0
    for table in tables:
        for row, count in enumerate(blocks):
            table[row, :count] = pages[at : at + count]
            at += count
    query = torch.randn(len(lengths), HEADS, DIM, device=device).bfloat16()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    plan = plan_decode(lengths, KV_HEADS, device, multiprocessors(device))
    out = torch.empty_like(query)

    def call(table: torch.Tensor) -> torch.Tensor:
        return paged_decode(query, cache, table, seq_lens, DIM**-0.5, plan=plan, out=out)[0]

    wrong = max(
        _decode_error(call(tables[0])[row], query[row], cache, tables[0, row], lengths[row])
        for row in {0, len(lengths) // 2, len(lengths) - 1}
    )
    seconds = _seconds([partial(call, table) for table in tables])
    share = 2 * sum(lengths) * KV_HEADS * DIM * 2 / seconds / bandwidth
    print(
        f"decode {name:>14}: {seconds * 1e6:8.1f} us, {share:.3f} of the bandwidth, "
        f"{plan.items.shape[0]} items, error {wrong:.1e}",
        flush=True,
    )
    return {
        "shape": name,
        "microseconds": seconds * 1e6,
        "share": share,
        "items": plan.items.shape[0],
        "relative_error": wrong,
    }


def _decode_error(
    found: torch.Tensor, query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, length: int
) -> float:
    pages = cache[:, table[: -(-length // cache.shape[3])].long()].double()
    key, value = pages.transpose(1, 2).flatten(2, 3)[:, :, :length]
    group = query.shape[0] // key.shape[0]
    scores = torch.einsum("hgd,hkd->hgk", query.double().view(-1, group, DIM), key) * DIM**-0.5
    wanted = torch.einsum("hgk,hkd->hgd", scores.softmax(-1), value).reshape(-1, DIM)
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def bench_prefill(block_size: int) -> list[dict[str, Any]]:
    """Each shape's rate beside cuDNN's on the same lengths, the two taking turns."""
    return [_prefill_shape(rows, new, past, block_size) for rows, new, past in PREFILL]


def _prefill_shape(rows: int, new: int, past: int, block_size: int) -> dict[str, Any]:
    from nanokernels.kv_gather import kv_gather
    from nanokernels.paged_prefill import default_shape, paged_prefill, tile_tokens
    from nanokernels.prefill_plan import plan_prefill

    from nanoserve.bench.peers import cudnn_attention

    length = new + past
    heads, kv_heads, dim = PREFILL_HEADS, PREFILL_KV_HEADS, DIM
    device = torch.device("cuda")
    blocks = -(-length // block_size)
    pages = torch.randperm(rows * blocks + 7, device=device)[: rows * blocks].int()
    table = pages.view(rows, blocks)
    shape = (2, rows * blocks + 7, kv_heads, block_size, dim)
    cache = torch.randn(shape, device=device).bfloat16()
    query = torch.randn(rows * new, heads, dim, device=device).bfloat16()
    query_lens, lengths = [new] * rows, [length] * rows
    starts = torch.arange(0, rows * new + 1, new, dtype=torch.int32, device=device)
    seq_lens = torch.full((rows,), length, dtype=torch.int32, device=device)
    tile = default_shape(dim, query.dtype, new, heads // kv_heads)
    plan = plan_prefill(query_lens, lengths, tile_tokens(heads // kv_heads, tile[0]), device)

    def paged(
        dense: tuple[torch.Tensor, torch.Tensor] | None = None,
        key_start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return paged_prefill(
            query, cache, table, starts, seq_lens, dim**-0.5, query_lens=query_lens,
            lengths=lengths, plan=plan, dense=dense, key_start=key_start, shape=tile,
        )[0]  # fmt: skip

    key_start = torch.arange(0, rows * length, length, dtype=torch.int32, device=device)

    def gathered() -> torch.Tensor:
        dense, _ = kv_gather(cache, table, seq_lens, lengths, key_start)
        return paged((dense[0], dense[1]), key_start)

    dense, _ = kv_gather(cache, table, seq_lens, lengths, key_start)
    peer = cudnn_attention(query, dense, rows, new, past)
    wanted = _prefill_rows(query, dense, rows, new, past)
    result: dict[str, Any] = {"rows": rows, "new": new, "past": past}
    flops = 4 * rows * heads * dim * (new * past + new * (new + 1) / 2)
    contenders = {"paged": paged, "gathered": gathered, "cudnn": peer}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, call in contenders.items():
        found = call().view(rows, new, heads, dim)[-1, [0, new // 2, new - 1]].double()
        result[f"{name}_error"] = ((found - wanted).norm() / wanted.norm()).item()
    for _ in range(5):
        for name, call in contenders.items():
            times[name].append(_seconds([call] * 3, rounds=3))
    for name, values in times.items():
        result[name] = flops / sorted(values)[len(values) // 2] / 1e12
    result["ratio"] = max(result["paged"], result["gathered"]) / result["cudnn"]
    print(
        f"prefill {rows} x {new} after {past}: paged {result['paged']:.0f}, gathered "
        f"{result['gathered']:.0f}, cuDNN {result['cudnn']:.0f} TFLOP/s, ratio "
        f"{result['ratio']:.3f}, error {result['paged_error']:.1e}", flush=True
    )  # fmt: skip
    return result


def _prefill_rows(
    query: torch.Tensor, dense: torch.Tensor, rows: int, new: int, past: int
) -> torch.Tensor:
    """The last row's first, middle and last new tokens, in float64."""
    heads, kv_heads = query.shape[1], dense.shape[2]
    length = new + past
    key, value = dense[:, (rows - 1) * length :].transpose(1, 2).double()
    outs = []
    for token in (0, new // 2, new - 1):
        seen = past + token + 1
        q = query[(rows - 1) * new + token].double().view(kv_heads, heads // kv_heads, -1)
        scores = torch.einsum("hgd,hkd->hgk", q, key[:, :seen]) * q.shape[-1] ** -0.5
        outs.append(torch.einsum("hgk,hkd->hgd", scores.softmax(-1), value[:, :seen]).flatten(0, 1))
    return torch.stack(outs)


def _about() -> dict[str, Any]:
    import triton

    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {
            "nanoserve": __version__,
            "source_hash": source_hash(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "command": "nanoserve " + " ".join(sys.argv[1:]),
    }
