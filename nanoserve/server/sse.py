"""Server-sent events: each event is one `data:` line with a JSON object, and `[DONE]` comes last.

An error after the first byte cannot change the status any more, so it is sent as an event whose
object has an `error` in it, which OpenAI's clients raise.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve.server.errors import describe
from nanoserve.server.lifecycle import ClientGoneError, finish

# How long a client that does not read may hold up the farewell.
_FAREWELL_SECONDS = 1.0


def _event(data: str) -> bytes:
    return b"data: " + data.encode("utf-8") + b"\n\n"


class EventStream(Response):
    """A streamed response.

    Args:
        events: JSON texts, one an event.
        release: called once when the stream has ended in any way; frees what events use.
        stopping: set when the server shuts down.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        release: Callable[[], None],
        stopping: asyncio.Event,
    ) -> None:
        super().__init__(
            headers={
                "cache-control": "no-cache",
                # Proxies of the nginx family would hold tokens back until a buffer is full.
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._release = release
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream (ASGI)."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await finish(self._send_events(send), receive, self._stopping)
                farewell = _event("[DONE]")
            except (ClientGoneError, OSError):
                return
            except Exception as error:
                _, body = describe(error)
                farewell = _event(json.dumps(body)) + _event("[DONE]")
            with suppress(asyncio.TimeoutError):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await send({"type": "http.response.body", "body": farewell})
        finally:
            self._release()

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": _event(data), "more_body": True})
