"""`nanoserve bench latency`: seconds for one batch, and tokens per second beside a peer.

The two engines take turns, run by run, so that whatever else the machine does falls on both alike:
what counts is their ratio. The oracle's verdict (are the greedy tokens the same?) stands beside
each figure, because speed says nothing about right tokens.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanoserve.config.args import EngineArgs
from nanoserve.llm import LLM
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import SamplingParams
from nanoserve.version import __version__, source_hash

PERCENTILES = (10, 25, 50, 75, 90, 99)
Tokens = list[list[int]]


@dataclass
class Contender:
    """One engine under test: its name, and how it runs a batch of prompts."""

    name: str
    run: Callable[[Tokens, int], Tokens]


def run_latency(args: argparse.Namespace, engine_args: EngineArgs) -> int:
    """Time the batches, print a table, and write JSON if asked. Returns the exit code."""
    settings = {k: v for k, v in vars(engine_args).items() if v is not None}
    with LLM(progress=lambda line: print(line, file=sys.stderr), **settings) as llm:
        contenders = [Contender("nanoserve", _nanoserve(llm))]
        if args.compare == "transformers":
            contenders.append(Contender("transformers", _transformers(llm)))
        results = [_time_batch(args, llm, contenders, size) for size in args.batch_size]
        print(_table(args, llm, results))
        if args.output_json:
            report = _report(args, llm, results)
            with open(args.output_json, "w") as file:
                json.dump(report, file, indent=1)
            print(f"results written to {args.output_json}")
    return 0


def _nanoserve(llm: LLM) -> Callable[[Tokens, int], Tokens]:
    def run(prompts: Tokens, output_len: int) -> Tokens:
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        outputs: list[RequestOutput] = llm.generate(prompts, params)
        return [output.outputs[0].token_ids for output in outputs]

    return run


def _transformers(llm: LLM) -> Callable[[Tokens, int], Tokens]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if llm.config.model.load_format == "dummy":
        raise SystemExit("--load-format dummy has no weights to share: add --compare none")
    model = AutoModelForCausalLM.from_pretrained(
        llm.config.model.path, dtype=getattr(torch, llm.info.dtype)
    ).to(llm.info.device)
    model.eval()

    def run(prompts: Tokens, output_len: int) -> Tokens:
        ids = torch.tensor(prompts, device=model.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                temperature=None,
                top_p=None,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    return run


def _time_batch(
    args: argparse.Namespace, llm: LLM, contenders: list[Contender], batch_size: int
) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed)
    vocab = min(llm.info.vocab_size, llm.tokenizer.size)
    prompts = rng.integers(0, vocab, (batch_size, args.input_len)).tolist()
    latencies: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    tokens: dict[str, Tokens] = {}
    for iteration in range(args.num_iters_warmup + args.num_iters):
        for contender in contenders:
            start = time.perf_counter()
            tokens[contender.name] = contender.run(prompts, args.output_len)
            if iteration >= args.num_iters_warmup:
                latencies[contender.name].append(time.perf_counter() - start)
    result: dict[str, Any] = {"batch_size": batch_size}
    for name, times in latencies.items():
        result[name] = {
            "avg_latency": float(np.mean(times)),
            "latencies": times,
            "percentiles": {str(p): float(np.percentile(times, p)) for p in PERCENTILES},
            "tokens_per_second": batch_size * args.output_len / float(np.median(times)),
        }
    if "transformers" in tokens:
        mine, theirs = tokens["nanoserve"], tokens["transformers"]
        result["ratio"] = (
            result["nanoserve"]["tokens_per_second"] / result["transformers"]["tokens_per_second"]
        )
        result["oracle"] = _verdict(mine, theirs)
    return result


def _verdict(mine: Tokens, theirs: Tokens) -> str:
    """Says "identical", or how many sequences differ and where the first difference is."""
    differing = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    if not differing:
        return "identical"
    first = min(
        next(k for k, (x, y) in enumerate(zip(mine[i], theirs[i], strict=True)) if x != y)
        for i in differing
    )
    return f"{len(differing)} of {len(mine)} sequences differ, the first at output token {first}"


def _table(args: argparse.Namespace, llm: LLM, results: list[dict[str, Any]]) -> str:
    lines = [
        f"{llm.config.model.model}, {llm.info.dtype} on {llm.info.device}, "
        f"{torch.get_num_threads()} threads, {args.input_len} tokens in, {args.output_len} out, "
        f"median of {args.num_iters}",
        f"{'batch':>5}  {'nanoserve':>16}  {'transformers':>16}  {'ratio':>6}  tokens",
    ]
    for result in results:
        peer = result.get("transformers")
        lines.append(
            f"{result['batch_size']:>5}  "
            f"{result['nanoserve']['tokens_per_second']:>10.1f} tok/s  "
            + (f"{peer['tokens_per_second']:>10.1f} tok/s  " if peer else f"{'-':>16}  ")
            + (f"{result['ratio']:>6.2f}  {result['oracle']}" if peer else f"{'-':>6}  -")
        )
    return "\n".join(lines)


def _report(args: argparse.Namespace, llm: LLM, results: list[dict[str, Any]]) -> dict[str, Any]:
    import transformers

    return {
        **(results[0]["nanoserve"] if len(results) == 1 else {}),
        "results": results,
        "model": llm.config.model.model,
        "dtype": llm.info.dtype,
        "device": llm.info.device,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "nanoserve": __version__,
            "source_hash": source_hash(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": "nanoserve " + " ".join(sys.argv[1:]),
    }
