"""What every request handler of one server shares."""

import asyncio
import time
from typing import Any

from fastapi import Request

from nanoserve.async_llm import AsyncLLM
from nanoserve.errors import InvalidRequestError
from nanoserve.server.fields import check_extra_fields
from nanoserve.server.metrics import Metrics
from nanoserve.server.prompts import PromptReader
from nanoserve.server.protocol import Body, GenerationBody
from nanoserve.server.sampling import DefaultSampling
from nanoserve.server.settings import ServerSettings


class ServerState:
    """One server's engine, settings and counters.

    Attributes:
        stopping: set when the server shuts down; open answers end with an error.
        load: inference requests being served.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        config = engine.config
        self.engine = engine
        self.settings = settings
        self.created = int(time.time())
        self.model_names = config.model.served_model_name
        self.max_model_len = config.model.max_model_len
        self.stopping = asyncio.Event()
        self.load = 0
        if settings.chat_template is not None:
            engine.tokenizer.chat_template = settings.chat_template
        self.prompts = PromptReader(engine.tokenizer, self.max_model_len)
        self.defaults = (
            DefaultSampling.from_folder(config.model.path)
            if settings.generation_config == "auto"
            else DefaultSampling()
        )
        self.metrics = Metrics(self.model_names[0], engine)
        engine.add_listener(self.metrics.record)

    def model_for(self, name: str | None) -> str:
        """The served name a request means; a request that names none means the first.

        Raises:
            InvalidRequestError: 404 with code `model_not_found`.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(repr(known) for known in self.model_names)
            raise InvalidRequestError(
                f"the model {name!r} does not exist; this server serves {served}",
                "model",
                404,
                "model_not_found",
            )
        return name

    def check(self, body: Body) -> str:
        """What holds for every body: the model's name, the extra fields, fields that need others.

        Returns the served name.
        """
        model = self.model_for(body.model)
        n = body.n if isinstance(body, GenerationBody) else None
        check_extra_fields(body.model_extra or {}, n)
        if isinstance(body, GenerationBody):
            if body.stream_options is not None and not body.stream:
                raise InvalidRequestError(
                    "stream_options is allowed only when stream is true", "stream_options"
                )
            if body.priority and self.engine.config.scheduler.policy != "priority":
                raise InvalidRequestError(
                    "priority needs a server started with --scheduling-policy priority", "priority"
                )
        return model


def server_state(request: Request) -> ServerState:
    """The state of the server that a request came to."""
    state: Any = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def request_name(request: Request, body: GenerationBody) -> str:
    """The client's own id for a request (body first, then X-Request-Id), or a fresh one."""
    return body.request_id or str(request.scope["nanoserve.request_id"])
