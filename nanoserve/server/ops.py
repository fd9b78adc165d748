"""The routes around generation: health, version, metrics, models, and the tokenizer's two."""

from typing import Any

from fastapi import APIRouter, Request
from openai.types import Model
from starlette.responses import JSONResponse, Response

from nanoserve.errors import InvalidRequestError
from nanoserve.server.protocol import DetokenizeBody, TokenizeBody
from nanoserve.server.state import ServerState, server_state
from nanoserve.version import __version__, source_hash, source_path

router = APIRouter()
# Served in dev mode only: what any client could use to slow the others down.
dev_router = APIRouter()
_SOURCE = {"path": source_path(), "hash": source_hash()}


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine lives, 503 once it does not."""
    await server_state(request).engine.check_health()
    return Response(status_code=200)


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
async def ping(request: Request) -> Response:
    """The same under the name that SageMaker asks for."""
    return await health(request)


@router.get("/version")
async def version(request: Request) -> Response:
    """The version, and which source the API process and the engine process really run."""
    info = server_state(request).engine.info
    engine = {"path": info.source_path, "hash": info.source_hash}
    return JSONResponse({"version": __version__, "source": _SOURCE, "engine_source": engine})


@router.get("/load")
async def load(request: Request) -> Response:
    """How many inference requests are being served."""
    return JSONResponse({"server_load": server_state(request).load})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics, under vLLM's names."""
    return server_state(request).metrics.response()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Every name this server answers to."""
    server = server_state(request)
    models = [_model(server, name).model_dump() for name in server.model_names]
    return JSONResponse({"object": "list", "data": models})


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> Response:
    """One served name."""
    server = server_state(request)
    return JSONResponse(_model(server, server.model_for(name)).model_dump())


@dev_router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix: 200, or 409 while requests hold blocks."""
    done = await server_state(request).engine.reset_prefix_cache()
    return Response(status_code=200 if done else 409)


def _model(server: ServerState, name: str) -> Model:
    extras: dict[str, Any] = {
        "root": server.engine.config.model.model,
        "parent": None,
        "max_model_len": server.max_model_len,
    }
    return Model(id=name, object="model", created=server.created, owned_by="nanoserve", **extras)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """The token ids of text, or of a conversation in the model's chat template."""
    server = server_state(request)
    server.check(body)
    if (body.prompt is None) == (not body.messages):
        raise InvalidRequestError("send either prompt or messages", "prompt")
    if body.messages:
        tokens = await server.prompts.chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
            kwargs=body.chat_template_kwargs,
            continue_final_message=bool(body.continue_final_message),
        )
    else:
        special = body.add_special_tokens is not False
        tokens = await server.prompts.text(body.prompt or "", special)
    answer = {"count": len(tokens), "max_model_len": server.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [server.engine.tokenizer.token_text(token) for token in tokens]
    return JSONResponse(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids."""
    server = server_state(request)
    server.check(body)
    size = server.engine.tokenizer.size
    for token in body.tokens:
        if not 0 <= token < size:
            raise InvalidRequestError(
                f"token id {token} is not in the vocabulary (0 to {size - 1})", "tokens"
            )
    text = server.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": text})
