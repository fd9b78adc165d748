"""`nanoserve chat`: a conversation in the terminal.

The answer is streamed. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /reset starts over.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from contextlib import aclosing
from typing import Any

from nanoserve import envs
from nanoserve.cli.backends import DEFAULT_URL, ChatBackend, ChatError, Messages, find_backend
from nanoserve.cli.flags import add_engine_flags, add_log_level, engine_args
from nanoserve.cli.generate import add_sampling_flags, sampling_values

HELP = "Ctrl-C stops an answer; /reset starts over; /exit or Ctrl-D leaves"


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a server if one is named or runs at the usual place, else to a model "
        f"loaded here. {HELP}.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--url", help=f"base URL of a server (tried if left out: {DEFAULT_URL})")
    parser.add_argument("--api-key", help="the server's key (or NANOSERVE_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling_flags(parser, max_tokens=None, temperature=None)
    add_engine_flags(parser)
    add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the person leaves. Returns the exit code."""
    from nanoserve.server.logs import configure_logging, quiet_libraries

    configure_logging(args.log_level)
    quiet_libraries()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history in input())
    with asyncio.Runner() as runner:
        try:
            backend = runner.run(
                find_backend(
                    args.url,
                    args.api_key or envs.get("NANOSERVE_API_KEY"),
                    lambda: engine_args(args).create_engine_config(),
                    sampling_values(args),
                    prefer_engine="model" in args,
                )
            )
        except ChatError as error:
            print(f"nanoserve: error: {error}", file=sys.stderr)
            return 1
        try:
            Conversation(backend, args.system).loop(runner)
        finally:
            runner.run(backend.close())
    return 0


class Conversation:
    """The turns so far, and the terminal they are held in.

    Args:
        backend: who answers.
        system: the system message, if there is one.
    """

    def __init__(self, backend: ChatBackend, system: str | None) -> None:
        self._backend = backend
        self._system = system
        self.messages: Messages = []
        self.reset()

    def reset(self) -> None:
        """Forget every turn but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def loop(self, runner: asyncio.Runner) -> None:
        """Read turns from stdin and answer them."""
        interactive = sys.stdin.isatty()
        prompt = "> " if interactive else ""
        print(f"talking to {self._backend.name}. {HELP}.", file=sys.stderr)
        while True:
            try:
                line = input(prompt).strip()
            except EOFError:
                if interactive:
                    print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                self.reset()
                print("(forgotten)", file=sys.stderr)
            elif line:
                self._turn(line, runner)

    def _turn(self, line: str, runner: asyncio.Runner) -> None:
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        start = time.monotonic()
        try:
            # A Ctrl-C cancels the coroutine, which closes the stream and stops the model.
            runner.run(self._print_answer(pieces))
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)
            if not pieces:
                self.messages.pop()  # the turn was refused: the conversation stands as it was
                return
        else:
            self._print_rate(time.monotonic() - start)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    async def _print_answer(self, pieces: list[str]) -> None:
        async with aclosing(self._backend.answer(self.messages)) as answer:
            async for piece in answer:
                pieces.append(piece)
                print(piece, end="", flush=True)
        print()

    def _print_rate(self, seconds: float) -> None:
        tokens = self._backend.tokens
        print(f"({tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tokens/s)", file=sys.stderr)
