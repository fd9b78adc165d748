"""The `nanoserve` command: finds out what is wanted, and only then imports what does it.

A user's mistake (a wrong model path, settings in conflict) is one line on stderr and exit code 2;
`--log-level debug` shows the trace. Interrupted: 130.
"""

import argparse
import difflib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from nanoserve import envs
from nanoserve.cli import chat, generate, serve
from nanoserve.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from nanoserve.version import __version__

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
BENCH = "nanoserve.bench.cli"


class Parser(argparse.ArgumentParser):
    """An argument parser that proposes the flag that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and the message, and exit with 2."""
        match = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if match is not None:
            near = difflib.get_close_matches(match[1], self._all_options(), n=1)
            if near:
                message += f" (did you mean {near[0]}?)"
        super().error(message)

    def _all_options(self) -> list[str]:
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    options += sub._option_string_actions
        return options


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="nanoserve",
        description="Serve a language model behind the OpenAI API, or talk to it from here.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nanoserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, chat, generate):
        module.add_parser(commands)
    # A workspace of an early chapter has no benchmarks yet.
    if importlib.util.find_spec("nanoserve.bench") and importlib.util.find_spec(BENCH):
        bench = importlib.import_module(BENCH)
        bench.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the process's exit code."""
    arguments = [_with_dashes(a) for a in (sys.argv[1:] if argv is None else argv)]
    args = build_parser().parse_args(arguments)
    for name in envs.unknown():
        print(f"nanoserve: warning: nothing reads the variable {name}", file=sys.stderr)
    try:
        return int(args.run(args))
    except (ModelLoadError, ConfigError, InvalidRequestError) as error:
        return _complain(error, args, EXIT_USAGE)
    except EngineDeadError as error:
        return _complain(error, args, 1)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _with_dashes(argument: str) -> str:
    """--max_model_len is --max-model-len, as it is in vLLM."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _complain(error: Exception, args: argparse.Namespace, code: int) -> int:
    if getattr(args, "log_level", "") == "debug":
        traceback.print_exception(error)
    print(f"nanoserve: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
