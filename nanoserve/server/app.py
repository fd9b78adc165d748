"""Puts the server together: routes, middleware, error handlers, around one engine."""

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from nanoserve import envs
from nanoserve.async_llm import AsyncLLM
from nanoserve.server import chat, completions, ops
from nanoserve.server.errors import install_error_handlers
from nanoserve.server.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    LoadMiddleware,
    RequestIdMiddleware,
)
from nanoserve.server.settings import ServerSettings
from nanoserve.server.state import ServerState
from nanoserve.version import __version__


def create_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The ASGI application.

    Args:
        engine: started.
        settings: the HTTP side's settings.
    """
    app = FastAPI(title="nanoserve", version=__version__, redoc_url=None)
    app.state.server = ServerState(engine, settings)
    install_error_handlers(app)
    for part in (chat, completions, ops):
        app.include_router(part.router)
    if envs.get("NANOSERVE_SERVER_DEV_MODE"):
        app.include_router(ops.dev_router)
    # Each is wrapped around those before it: the last one sees a request first.
    app.add_middleware(LoadMiddleware)
    app.add_middleware(BodyLimitMiddleware, limit=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=["x-request-id"],
    )
    return app
