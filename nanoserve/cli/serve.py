"""`nanoserve serve`: bind the port, resolve the model, then hand over to the server."""

import argparse
import importlib.util
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from nanoserve import envs
from nanoserve.cli.flags import add_engine_flags, add_log_level, engine_args
from nanoserve.errors import ConfigError
from nanoserve.server.logs import configure_logging, quiet_libraries
from nanoserve.server.settings import ServerSettings
from nanoserve.server.sockets import PortInUseError, bind
from nanoserve.version import __version__, source_hash, source_path

EXIT_PORT_IN_USE = 1
UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
logger = logging.getLogger("nanoserve.server")


def add_parser(commands: Any) -> None:
    """Add the command and its flags."""
    defaults = ServerSettings()
    parser = commands.add_parser(
        "serve",
        help="serve a model behind the OpenAI API",
        description="Serve a model behind the OpenAI API. With no model: the embedded one.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=defaults.host, help="default: all addresses (%(default)s)")
    group.add_argument("--port", type=_port, default=defaults.port, help="default: %(default)s")
    group.add_argument(
        "--api-key",
        action="append",
        help="key that clients must send; may be given more than once. NANOSERVE_API_KEY is safer: "
        "a command line can be read by other users of the machine",
    )
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template to use for chats")
    group.add_argument(
        "--generation-config",
        choices=("auto", "vllm"),
        default=defaults.generation_config,
        help="sampling defaults: the model's generation_config.json (auto), or neutral (vllm)",
    )
    group.add_argument("--root-path", default="", help="path prefix that a proxy strips")
    for name in ("origins", "methods", "headers"):
        group.add_argument(
            f"--allowed-{name}",
            type=_json_list,
            default=["*"],
            metavar="JSON",
            help=f'CORS: allowed {name}, as a JSON list (default: ["*"])',
        )
    group.add_argument("--allow-credentials", action="store_true", help="CORS: allow credentials")
    group.add_argument(
        "--uvicorn-log-level", choices=UVICORN_LEVELS, default=defaults.uvicorn_log_level
    )
    group.add_argument(
        "--disable-access-log",
        "--disable-uvicorn-access-log",
        action="store_true",
        help="no line a request",
    )
    group.add_argument(
        "--disable-log-stats", action="store_true", help="no throughput line every ten seconds"
    )
    add_engine_flags(parser)
    add_log_level(parser)


def run(args: argparse.Namespace) -> int:
    """Serve. Returns the exit code."""
    # Until the event loop has the signals there is nothing to put in order: leave at once, whatever
    # library is being imported.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    if args.model_tag is not None:
        if "model" in args and args.model != args.model_tag:
            raise ConfigError(f"two models were named: {args.model_tag!r} and {args.model!r}")
        args.model = args.model_tag
    settings = _settings(args)
    configure_logging(args.log_level, settings.uvicorn_log_level, settings.access_log)
    quiet_libraries()
    try:
        sock = bind(settings.host, settings.port)
    except PortInUseError as error:
        print(f"nanoserve: error: {error}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error}") from error
    with sock:
        for package in ("fastapi", "uvicorn", "openai", "prometheus_client", "zmq", "msgspec"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"serving needs the package {package}: pip install 'nanoserve[server]'"
                )
        logger.info("nanoserve %s, source %s (hash %s)", __version__, source_path(), source_hash())
        config = engine_args(args).create_engine_config()
        logger.info("loading %s from %s", config.model.model, config.model.path)
        from nanoserve.server.launch import run_server

        return run_server(config, settings, sock)


def _settings(args: argparse.Namespace) -> ServerSettings:
    template = None
    if args.chat_template is not None:
        try:
            template = Path(args.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template: {error}") from error
    from_env = envs.get("NANOSERVE_API_KEY")
    keys = args.api_key or ([from_env] if from_env else [])
    if any(not key for key in keys):
        raise ConfigError("an API key must not be empty")
    return ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=keys,
        root_path=args.root_path.rstrip("/"),
        chat_template=template,
        generation_config=args.generation_config,
        allowed_origins=args.allowed_origins,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        uvicorn_log_level=args.uvicorn_log_level,
        access_log=not args.disable_access_log,
        log_stats=not args.disable_log_stats,
    )


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _json_list(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON list such as ["*"]')
    return value
