"""From settings to a running server, and to its end.

The order matters: the port is bound before this module is even imported; the engine loads in its
own process while the event loop here already listens for signals; the socket starts to listen when
the engine is ready. A first SIGINT or SIGTERM ends open answers with an error and leaves within
five seconds; a second one leaves at once.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from nanoserve.async_llm import AsyncLLM
from nanoserve.config.engine import EngineConfig
from nanoserve.server.app import create_app
from nanoserve.server.settings import ServerSettings
from nanoserve.server.sockets import before_listening, url
from nanoserve.server.state import ServerState
from nanoserve.server.stats_log import StatsLog

logger = logging.getLogger("nanoserve.server")

# Uvicorn's patience with open connections, then the limit on everything that has to end.
GRACEFUL_SECONDS = 2
LAST_SECONDS = 4.5
# A dead engine does not come back: answer 503 long enough for clients and probes to see it.
DEATH_GRACE_SECONDS = 5.0
EXIT_ENGINE_DEAD = 1


class _Uvicorn(uvicorn.Server):
    """Uvicorn that leaves the signals to this module, and says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


class _Signals:
    """SIGINT and SIGTERM as an event; the second one ends the process on the spot."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.event = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.received is not None:
            os._exit(128 + number)  # the engine's process sees the pipe close and ends too
        self.received = number
        self.event.set()
        # Whatever hangs from here on, the process ends in time.
        watchdog = threading.Timer(LAST_SECONDS, os._exit, (128 + number,))
        watchdog.daemon = True
        watchdog.start()


def run_server(config: EngineConfig, settings: ServerSettings, sock: socket.socket) -> int:
    """Serve until a signal or the engine's death.

    Args:
        config: the engine's configuration.
        settings: the HTTP side's.
        sock: bound, not yet listening.

    Returns:
        The process's exit code: 0 after a signal, 128 + its number if it came while loading, 1 if
        the engine died.

    Raises:
        ModelLoadError, ConfigError: the engine cannot start.
    """
    return asyncio.run(_serve(config, settings, sock))


async def _serve(config: EngineConfig, settings: ServerSettings, sock: socket.socket) -> int:
    started = time.monotonic()
    signals = _Signals()
    engine = AsyncLLM(config, progress=lambda line: logger.info("%s", line))
    try:
        if not await _before(engine.start(), signals.event):
            logger.info("interrupted while loading")
            return 128 + (signals.received or 0)
        seconds = time.monotonic() - started
        app = create_app(engine, settings)
        server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=settings.access_log,
                root_path=settings.root_path,
                lifespan="off",
                timeout_graceful_shutdown=GRACEFUL_SECONDS,
            ),
            lambda: _say_ready(engine, settings, sock.getsockname()[1], seconds),
        )
        before_listening(sock)
        return await _until_the_end(app, server, sock, engine, signals, settings)
    finally:
        engine.shutdown()


async def _before(work: Coroutine[Any, Any, None], event: asyncio.Event) -> bool:
    """Run work; False if the event came first."""
    task, wait = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    await asyncio.wait({task, wait}, return_when=asyncio.FIRST_COMPLETED)
    wait.cancel()
    if not task.done():
        task.cancel()
        return False
    task.result()
    return True


async def _until_the_end(
    app: FastAPI,
    server: uvicorn.Server,
    sock: socket.socket,
    engine: AsyncLLM,
    signals: _Signals,
    settings: ServerSettings,
) -> int:
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    ends = {
        asyncio.ensure_future(signals.event.wait()): 0,
        asyncio.ensure_future(_dead_for_a_while(engine)): EXIT_ENGINE_DEAD,
    }
    state: ServerState = app.state.server
    logging_stats = asyncio.ensure_future(StatsLog(engine).run()) if settings.log_stats else None
    done, _ = await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if serving in done:
        serving.result()
        return 0
    logger.info("shutting down")
    state.stopping.set()
    server.should_exit = True
    await serving
    state.prompts.close()
    for task in (*ends, logging_stats):
        if task is not None:
            task.cancel()
    return max(code for task, code in ends.items() if task in done)


async def _dead_for_a_while(engine: AsyncLLM) -> None:
    """Returns some seconds after the engine has died."""
    while not engine.is_dead:
        await asyncio.sleep(0.2)
    try:
        await engine.check_health()
    except Exception as error:
        logger.error("%s; ending in %.0f s", error, DEATH_GRACE_SECONDS)
    await asyncio.sleep(DEATH_GRACE_SECONDS)


def _say_ready(engine: AsyncLLM, settings: ServerSettings, port: int, seconds: float) -> None:
    info, model = engine.info, engine.config.model
    base = url(settings.host, port) + settings.root_path
    logger.info(
        "engine ready in %.1f s: %s on %s, KV cache of %s tokens (%d blocks of %d), "
        "max_model_len %d, source %s (hash %s)",
        seconds,
        info.dtype,
        info.device,
        f"{info.num_usable_tokens:,}",
        info.num_blocks,
        info.block_size,
        model.max_model_len,
        info.source_path,
        info.source_hash,
    )
    command = ["curl", f"{base}/v1/chat/completions", "-H", "Content-Type: application/json"]
    command += ["-d", '{"messages": [{"role": "user", "content": "Say hello."}]}']
    line = " ".join(shlex.quote(part) for part in command)
    if settings.api_keys:
        line += ' -H "Authorization: Bearer $NANOSERVE_API_KEY"'
    logger.info("serving %s at %s/v1", ", ".join(model.served_model_name), base)
    logger.info("try: %s", line)
