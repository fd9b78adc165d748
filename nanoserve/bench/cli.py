"""The flags of `nanoserve bench`. Nothing heavy is imported before a benchmark runs."""

import argparse

from nanoserve.config.args import EngineArgs


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench` and its own commands to the command line."""
    bench = subparsers.add_parser(
        "bench", help="measure the engine", description="Measure the engine."
    )
    commands = bench.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    latency = commands.add_parser(
        "latency",
        help="time whole batches, beside transformers' generate",
        description="Times batches of equal prompts, greedy, interleaved with transformers' own "
        "generate on the same weights, type and threads, and compares the tokens.",
    )
    latency.add_argument("--model", default=None, help="Hub id or folder (default: embedded model)")
    latency.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    latency.add_argument("--device", default="auto", help="auto, cpu or cuda")
    latency.add_argument("--load-format", default="auto", help="auto, or dummy for random weights")
    latency.add_argument("--block-size", type=int, default=16, help="tokens a KV block holds")
    latency.add_argument("--input-len", type=int, default=32, help="prompt tokens")
    latency.add_argument("--output-len", type=int, default=128, help="tokens to generate")
    latency.add_argument(
        "--batch-size", type=int, nargs="+", default=[1, 8], help="batch sizes to time"
    )
    latency.add_argument("--num-iters-warmup", type=int, default=1, help="untimed runs first")
    latency.add_argument("--num-iters", type=int, default=3, help="timed runs")
    latency.add_argument("--seed", type=int, default=0, help="seed of the prompts' tokens")
    latency.add_argument(
        "--compare",
        choices=["transformers", "none"],
        default="transformers",
        help="peer to time in the same run",
    )
    latency.add_argument("--output-json", default=None, help="file for the results")
    latency.set_defaults(run=_run_latency)
    attention = commands.add_parser(
        "attention",
        help="time the paged attention kernels on a GPU",
        description="Times paged decode attention against the read bandwidth and paged prefill "
        "against cuDNN, all measured in the same run, with each result's error.",
    )
    attention.add_argument("--block-size", type=int, default=16, help="tokens a KV block holds")
    attention.add_argument(
        "--parts",
        nargs="+",
        choices=["decode", "prefill"],
        default=["decode", "prefill"],
        help="what to time",
    )
    attention.add_argument("--seed", type=int, default=0, help="seed of the random tensors")
    attention.add_argument("--output-json", default=None, help="file for the results")
    attention.set_defaults(run=_run_attention)


def _run_attention(args: argparse.Namespace) -> int:
    from nanoserve.bench.attention import run_attention

    return run_attention(args)


def _run_latency(args: argparse.Namespace) -> int:
    from nanoserve.bench.latency import run_latency

    engine_args = EngineArgs(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        load_format=args.load_format,
        block_size=args.block_size,
        max_num_seqs=max(args.batch_size),
        max_num_batched_tokens=max(2048, max(args.batch_size) * args.input_len),
    )
    return run_latency(args, engine_args)
