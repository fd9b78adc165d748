"""A real HTTP server for tests: uvicorn on a free port, in a thread, over a real AsyncLLM."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import openai
import uvicorn

from nanoserve import AsyncLLM, EngineArgs
from nanoserve.server.app import create_app
from nanoserve.server.settings import ServerSettings
from nanoserve.server.state import ServerState

T = TypeVar("T")

# What SCRIPT answers behind the server (tests/server/conftest.py).
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467 na\u00efve \u6f22\u5b57"
REPLIES: dict[str, str | bytes | list[int]] = {
    "hello": "hi there",
    "letters": "abcdefgh",
    "unicode": FAMILY,
    "long": "x" * 1500,
    "slow": "y" * 1500,
    **{f"stream {i:02}": f"the answer to {i} is {i * i}" for i in range(20)},
}


class Site:
    """One application on one port.

    Attributes:
        url: base of the routes outside /v1.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, sock: socket.socket) -> None:
        self.app = create_app(engine, settings)
        self.state: ServerState = self.app.state.server
        config = uvicorn.Config(
            self.app, log_config=None, lifespan="off", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.sock = sock
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="any", max_retries=0)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        """A fresh asynchronous client (it belongs to the loop that uses it)."""
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="any", max_retries=0)


class Serving:
    """An engine and the sites in front of it, all in one thread with a loop of its own."""

    def __init__(self, **engine_args: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: list[Any] = []
        self._sites: list[Site] = []
        self.engine: AsyncLLM = self.run(self._start(engine_args))

    async def _start(self, engine_args: dict[str, Any]) -> AsyncLLM:
        engine = AsyncLLM.from_engine_args(EngineArgs(**engine_args))
        await engine.start()
        return engine

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def site(self, **settings: Any) -> Site:
        """Start another application over the same engine."""
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))

        async def start() -> Site:
            site = Site(self.engine, ServerSettings(**settings), sock)
            self._tasks.append(asyncio.ensure_future(site.server.serve(sockets=[sock])))
            while not site.server.started:
                await asyncio.sleep(0.01)
            return site

        self._sites.append(self.run(start()))
        return self._sites[-1]

    def close(self) -> None:
        """Stop everything."""

        async def stop() -> None:
            for site in self._sites:
                site.state.stopping.set()
                site.server.should_exit = True
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self.run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.engine.shutdown()
        for site in self._sites:
            site.http.close()
            site.client.close()
            site.state.prompts.close()


def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Wait for a condition; AssertionError if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)
