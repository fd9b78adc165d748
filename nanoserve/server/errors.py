"""Every error as the API's clients expect it: `{"error": {message, type, param, code}}`.

One function turns any exception that a handler may raise into a status and a body; the framework's
own errors (a route that is not there, a body that does not validate) go through it too.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nanoserve.engine.output_processor import RequestFailedError
from nanoserve.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger("nanoserve.server")


class ServerStoppingError(RuntimeError):
    """The server is shutting down; what was asked for will not be finished."""


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The error object of the OpenAI API, for a given HTTP status."""
    if status == 401:
        kind = "authentication_error"
    elif status == 503:
        kind = "service_unavailable_error"
    elif status >= 500:
        kind = "server_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An HTTP response that carries the error object."""
    # ASCII only: a message may quote text of the client that is not valid Unicode.
    body = json.dumps(error_body(message, status, param, code)).encode("ascii")
    return Response(body, status, dict(headers or {}), "application/json")


def describe(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and error object for an exception raised while a request was served."""
    if isinstance(error, InvalidRequestError):
        return error.status, error_body(error.message, error.status, error.param, error.code)
    if isinstance(error, EngineDeadError):
        return 503, error_body(f"the engine has died: {error}", 503, code="engine_dead")
    if isinstance(error, ServerStoppingError):
        return 503, error_body("the server is shutting down", 503, code="server_stopping")
    if isinstance(error, RequestFailedError):
        return 500, error_body(str(error), 500, code="request_failed")
    logger.error("unexpected error while serving a request", exc_info=error)
    return 500, error_body("internal error; the server's log says more", 500)


def response_for(error: BaseException) -> Response:
    """The HTTP response for an exception raised while a request was served."""
    status, body = describe(error)
    return Response(json.dumps(body).encode("ascii"), status, media_type="application/json")


def _validation_message(errors: Sequence[Any]) -> tuple[str, str | None]:
    """One sentence and the field's path for pydantic's list of complaints: the first is told."""
    first = errors[0]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "syntax error")
        return f"the body is not valid JSON: {why} at character {first['loc'][-1]}", None
    path = [part for part in first["loc"] if part != "body"]
    if not path:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    param = ".".join(str(part) for part in path)
    reason = str(first["msg"])
    # A validator of ours says its whole sentence; pydantic puts its kind in front.
    reason = reason.removeprefix("Value error, ")
    return f"{param}: {reason}", param


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of the application an error object."""

    async def on_validation(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = _validation_message(error.errors())
        return error_response(message, 400, param)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no route {request.method} {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed on {request.url.path}"
        return error_response(message, error.status_code, headers=error.headers)

    async def on_any(_request: Request, error: Exception) -> Response:
        return response_for(error)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for known in (InvalidRequestError, EngineDeadError, ServerStoppingError, RequestFailedError):
        app.add_exception_handler(known, on_any)
    app.add_exception_handler(Exception, on_any)
