"""What happens to every request before its handler: an id, the key, the body's size, the load.

Plain ASGI, because wrapping a streamed response in a framework's middleware would put a queue
between the engine and the client, and hide the client's departure.
"""

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.server.errors import error_response

# The only paths that answer without a key: what load balancers probe.
OPEN_PATHS = frozenset({"/health", "/ping"})
INFERENCE_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_REQUEST_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


def _route(scope: Scope) -> str:
    """The path below the prefix that a proxy adds."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


class RequestIdMiddleware:
    """Gives every request an id (the client's X-Request-Id if it is sane) and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["nanoserve.request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer KEY` on every path but the open ones."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        # Digests have one length, so that comparing takes the same time for every wrong key.
        self._digests = [hashlib.sha256(key.encode("utf-8")).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http" or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        response = error_response(
            "a valid API key is needed: send it as Authorization: Bearer KEY",
            401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if _route(scope) in OPEN_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Header values arrive as latin-1; a key with other characters was sent as UTF-8.
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class BodyLimitMiddleware:
    """Refuses a body that is too long, by its declared length or as soon as too much has come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        message = f"the request body is longer than {self._limit} bytes"
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._limit:
            response = error_response(message, 413, headers={"Connection": "close"})
            await response(scope, receive, send)
            return
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            event = await receive()
            received += len(event.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, message)
            return event

        await self.app(scope, limited_receive, send)


class LoadMiddleware:
    """Counts the inference requests being served, for /load."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        if scope["type"] != "http" or _route(scope) not in INFERENCE_PATHS:
            await self.app(scope, receive, send)
            return
        server = scope["app"].state.server
        server.load += 1
        try:
            await self.app(scope, receive, send)
        finally:
            server.load -= 1
