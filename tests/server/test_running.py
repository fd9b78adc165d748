"""The server while it runs: aborts, counters, keys, ids, health."""

import asyncio
import inspect
import logging
import threading
import time

import httpx
import openai
import pytest
from nanofixtures.serving import until
from prometheus_client.parser import text_string_to_metric_families

from nanoserve.server import middleware
from nanoserve.version import __version__, source_hash


def samples(site) -> dict:
    """Metric samples by name and finished_reason (if it has one)."""
    families = text_string_to_metric_families(site.http.get("/metrics").text)
    return {
        (s.name, s.labels.get("finished_reason") or s.labels.get("le")): s.value
        for family in families
        for s in family.samples
    }


def value(site, name, label=None) -> float:
    return samples(site)[f"vllm:{name}", label]


def idle(site) -> bool:
    return (
        value(site, "num_requests_running") == 0
        and value(site, "num_requests_waiting") == 0
        and value(site, "kv_cache_usage_perc") == 0
    )


def chat_body(text, **fields):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


@pytest.mark.parametrize("stream", [True, False])
def test_A34_closing_the_connection_aborts(scripted, stream):
    until(lambda: idle(scripted))
    before = value(scripted, "request_success_total", "abort")

    async def main() -> None:
        async with httpx.AsyncClient(base_url=scripted.url) as client:
            body = chat_body("slow", ignore_eos=True, max_tokens=1400, stream=stream)
            if stream:
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    lines = response.aiter_lines()
                    for _ in range(3):
                        await anext(lines)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/chat/completions", json=body, timeout=0.5)

    asyncio.run(main())
    until(lambda: idle(scripted), 1.0)
    assert value(scripted, "request_success_total", "abort") == before + 1
    assert scripted.http.get("/load").json() == {"server_load": 0}


def test_A34_T145_every_prompt_of_a_closed_batch_is_aborted(scripted):
    until(lambda: idle(scripted))
    with pytest.raises(openai.APITimeoutError):
        scripted.client.completions.create(
            model="script", prompt=["slow"] * 3, n=2, max_tokens=1400, timeout=0.5
        )
    until(lambda: idle(scripted), 1.0)


def test_T145_load_counts_what_is_being_served(scripted):
    stream = scripted.client.chat.completions.create(
        model="script", messages=[{"role": "user", "content": "slow"}], stream=True
    )
    next(iter(stream))
    assert scripted.http.get("/load").json() == {"server_load": 1}
    assert value(scripted, "num_requests_running") == 1
    stream.close()
    until(lambda: scripted.http.get("/load").json() == {"server_load": 0}, 1.0)
    until(lambda: idle(scripted), 1.0)


def test_A54_two_live_requests_with_one_id(scripted):
    texts = {}

    def one(key) -> None:
        body = chat_body(key, request_id="same", max_tokens=20)
        got = scripted.http.post("/v1/chat/completions", json=body).json()
        texts[key] = (got["id"], got["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=one, args=(key,)) for key in ("slow", "letters", "hello")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {
        "slow": ("chatcmpl-same", "y" * 20),
        "letters": ("chatcmpl-same", "abcdefgh"),
        "hello": ("chatcmpl-same", "hi there"),
    }
    until(lambda: idle(scripted))


def test_A54_an_id_used_again_right_after_an_abort(scripted):
    body = chat_body("slow", request_id="again", stream=True)
    with scripted.http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    got = scripted.http.post("/v1/chat/completions", json=chat_body("hello", request_id="again"))
    assert got.json()["choices"][0]["message"]["content"] == "hi there"
    until(lambda: idle(scripted))


def test_T147_request_ids(scripted):
    given = {"x-request-id": "my-id.1"}
    response = scripted.http.post("/v1/chat/completions", json=chat_body("hello"), headers=given)
    assert response.headers["x-request-id"] == "my-id.1"
    assert response.json()["id"] == "chatcmpl-my-id.1"
    odd = scripted.http.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] not in ("", "a b")


def test_T144_SV7_counters_agree_with_the_responses(tiny_serving):
    site = tiny_serving.site()
    requests, tokens, prompt = 4, 6, "abcde"
    usages = [
        site.client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=tokens,
            seed=i,
            extra_body={"ignore_eos": True},
            stream=False,
        ).usage
        for i in range(requests)
    ]
    got = samples(site)

    def of(name, label=None):
        return got[f"vllm:{name}", label]

    assert of("prompt_tokens_total") == sum(u.prompt_tokens for u in usages) == 20
    assert of("generation_tokens_total") == sum(u.completion_tokens for u in usages) == 24
    assert of("time_to_first_token_seconds_count") == requests
    assert of("inter_token_latency_seconds_count") == requests * (tokens - 1)
    assert of("request_success_total", "length") == requests
    assert of("request_success_total", "stop") == 0
    assert of("request_prompt_tokens_sum") == 20
    assert of("request_generation_tokens_sum") == 24
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert of(f"{name}_seconds_count") == requests
    for name in ("request_decode_time", "request_inference_time"):
        assert of(f"{name}_seconds_count") == requests
    assert of("e2e_request_latency_seconds_sum") > 0
    assert of("iteration_tokens_total_sum") == 20 + requests * (tokens - 1)
    assert of("num_preemptions_total") == 0
    assert idle(site)
    choices = site.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=2, n=3, extra_body={"ignore_eos": True}
    )
    got = samples(site)
    assert of("prompt_tokens_total") == 20 + choices.usage.prompt_tokens == 25
    assert of("generation_tokens_total") == 24 + choices.usage.completion_tokens == 30
    assert of("time_to_first_token_seconds_count") == requests + 1
    text = site.http.get("/metrics").text
    assert 'vllm:cache_config_info{block_size="16"' in text
    assert 'model_name="tiny"' in text


def test_T145_version_and_health(tiny):
    got = tiny.http.get("/version").json()
    assert got["version"] == __version__
    assert got["source"]["hash"] == got["engine_source"]["hash"] == source_hash()
    assert got["source"]["path"] == got["engine_source"]["path"]
    assert tiny.http.get("/health").status_code == 200
    assert tiny.http.get("/ping").status_code == 200
    assert tiny.http.post("/ping").status_code == 200


KEY = "sk-sehr-geheim-日本"


@pytest.fixture(scope="module")
def locked(tiny_serving):
    return tiny_serving.site(api_keys=["other", KEY])


def test_A90_T147_every_route_asks_for_the_key(locked):
    paths = locked.http.get(
        "/openapi.json", headers={"authorization": f"Bearer {KEY}".encode()}
    ).json()["paths"]
    routes = [(m, p) for p, methods in paths.items() for m in methods]
    routes += [("get", "/openapi.json"), ("get", "/docs"), ("get", "/ping"), ("get", "/nowhere")]
    assert len(routes) > 10
    for method, path in routes:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Basic {KEY}".encode()},
            {"authorization": "Bearer"},
        ):
            response = locked.http.request(method, path, headers=headers)
            if path in ("/health", "/ping"):
                assert response.status_code == 200
            else:
                assert response.status_code == 401, (path, headers)
                assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("other", KEY):
            headers = {"authorization": f"Bearer {key}".encode()}
            assert locked.http.request(method, path, headers=headers).status_code != 401


def test_A90_the_client_raises_its_authentication_error(locked):
    client = openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert client.with_options(api_key="other").models.list().data[0].id == "tiny"
    client.close()


def test_A90_keys_are_compared_in_constant_time():
    source = inspect.getsource(middleware.ApiKeyMiddleware)
    assert "compare_digest" in source
    assert "==" not in source.replace('scheme.lower() != "bearer"', "").replace(
        'scope["type"] != "http"', ""
    )


def test_A95_the_key_is_never_shown(locked, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    headers = {"authorization": f"Bearer {KEY}".encode()}
    seen = ""
    for path in ("/metrics", "/v1/models", "/version", "/openapi.json", "/nowhere"):
        seen += locked.http.get(path, headers=headers).text
    seen += locked.http.get("/metrics", headers={"authorization": "Bearer x"}).text
    seen += repr(locked.state.settings) + caplog.text + "".join(capfd.readouterr())
    assert KEY not in seen
    assert "geheim" not in seen


def test_cors_preflight_needs_no_key(locked):
    headers = {"origin": "http://page", "access-control-request-method": "POST"}
    response = locked.http.options("/v1/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"


def test_streams_end_with_an_error_event_when_the_server_stops(script_serving):
    site = script_serving.site()
    stream = site.client.chat.completions.create(
        model="script", messages=[{"role": "user", "content": "slow"}], stream=True
    )
    next(iter(stream))
    waiting = []
    body = chat_body("slow")
    thread = threading.Thread(
        target=lambda: waiting.append(site.http.post("/v1/chat/completions", json=body))
    )
    thread.start()
    time.sleep(0.2)
    script_serving.run(_stop(site))
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    thread.join()
    assert waiting[0].status_code == 503
    assert waiting[0].json()["error"]["code"] == "server_stopping"


async def _stop(site) -> None:
    site.state.stopping.set()
