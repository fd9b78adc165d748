"""Work that ends when nobody wants it any more: the client has gone, or the server is stopping.

Both kinds of response, whole and streamed, run their work through `finish`, so that an abandoned
request stops using the engine at once.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from nanoserve.server.errors import ServerStoppingError

T = TypeVar("T")
CLIENT_GONE = 499  # a status nobody reads; proxies log it for a client that left


class ClientGoneError(RuntimeError):
    """The client closed its connection before the answer was complete."""


async def finish(work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event) -> T:
    """Run work to its end, unless the client or the server ends first; then work is cancelled.

    Args:
        work: what makes the answer; it must free what it holds when it is cancelled.
        receive: the ASGI channel of a request whose body has been read.
        stopping: set when the server shuts down.

    Raises:
        ClientGoneError, ServerStoppingError: work was cut short.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, gone, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError("the client has gone")
        raise ServerStoppingError("the server is stopping")
    finally:
        for each in (task, gone, stop):
            each.cancel()
        await asyncio.gather(task, gone, stop, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
