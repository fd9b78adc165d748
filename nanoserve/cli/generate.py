"""`nanoserve generate`: complete one prompt in this process and print the text."""

import argparse
import dataclasses
import json
import logging
import sys
from typing import Any

from nanoserve.cli.flags import add_engine_flags, add_log_level, engine_args
from nanoserve.config.args import EngineArgs
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import SamplingParams


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "generate",
        help="complete one prompt here, without a server",
        description="Complete one prompt in this process, and print the text.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="send it as a user's message")
    parser.add_argument("--json", action="store_true", help="print token ids and reasons too")
    add_sampling_flags(parser, max_tokens=128)
    parser.add_argument("-n", "--n", type=int, default=1, help="completions (default: 1)")
    parser.add_argument("--logprobs", type=int, help="likeliest tokens to report with --json")
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the text")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    add_engine_flags(parser)
    add_log_level(parser)


def add_sampling_flags(
    parser: argparse.ArgumentParser, max_tokens: int | None, temperature: float | None = 0.0
) -> None:
    """Add the flags that say how tokens are chosen."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N")
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="X",
        help="0 takes the likeliest token each time" + (" (default)" if temperature == 0 else ""),
    )
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument(
        "--sampling-seed", type=int, metavar="N", help="makes the draws reproducible"
    )


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that were given, by SamplingParams' names."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    values = {name: getattr(args, name) for name in names}
    values["seed"] = args.sampling_seed
    return {name: value for name, value in values.items() if value is not None}


def run(args: argparse.Namespace) -> int:
    """Generate and print. Returns the exit code."""
    params = SamplingParams(
        **sampling_values(args),
        n=args.n,
        logprobs=args.logprobs,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    from nanoserve.server.logs import configure_logging, quiet_libraries

    configure_logging(args.log_level)
    quiet_libraries()
    settings = dataclasses.asdict(engine_args(args))
    EngineArgs(**settings).create_engine_config()  # a wrong model is told before torch is imported
    from nanoserve.llm import LLM

    logger = logging.getLogger("nanoserve")
    with LLM(progress=lambda line: logger.debug("%s", line), **settings) as llm:
        if args.chat:
            [output] = llm.chat([{"role": "user", "content": prompt}], params)
        else:
            [output] = llm.generate([prompt], params)
    print(_as_json(output) if args.json else "\n".join(c.text for c in output.outputs))
    return 0


def _as_json(output: RequestOutput) -> str:
    answer = dataclasses.asdict(output)
    del answer["metrics"]
    return json.dumps(answer, ensure_ascii=False, indent=1)
