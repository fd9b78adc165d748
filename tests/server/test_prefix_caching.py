"""Prefix caching as a client sees it: usage, salts, metrics, and the reset of dev mode."""

import json

import pytest
from nanofixtures.serving import Serving
from nanofixtures.tiny import make_tiny

from nanoserve.engine.messages import SchedulerStats
from nanoserve.engine.stats import IterationStats
from nanoserve.server.stats_log import StatsLog


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("prefix-server"))
    serving = Serving(model=str(folder), dtype="float32", block_size=4)
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def site(serving):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOSERVE_SERVER_DEV_MODE", "1")
        return serving.site()


def test_outside_dev_mode_nobody_can_reset(serving):
    assert serving.site().http.post("/reset_prefix_cache").status_code == 404


PROMPT = list(range(10, 33))


def complete(site, **fields):
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}
    response = site.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_second_request_reports_its_cached_tokens_and_the_same_text(site):
    assert site.http.post("/reset_prefix_cache").status_code == 200
    first, second = complete(site), complete(site)
    assert (cached(first), cached(second)) == (0, 20)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert cached(complete(site, n=3)) == 20
    assert cached(complete(site, skip_reading_prefix_cache=True)) == 0


def chat(site, **fields):
    system = {"role": "system", "content": "You answer briefly, and in the words of a sailor."}
    messages = [system, {"role": "user", "content": "Where does the wind come from?"}]
    return site.client.chat.completions.create(
        model=site.state.model_names[0], messages=messages, temperature=0, max_tokens=8, **fields
    )


def test_a_second_identical_chat_reports_its_cached_tokens_whole_and_streamed(site):
    assert site.http.post("/reset_prefix_cache").status_code == 200
    first, second = chat(site), chat(site)
    hits = (first.usage.prompt_tokens - 1) // 4 * 4
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in (first, second)]
    assert cached == [0, hits]
    assert second.choices == first.choices
    chunks = list(chat(site, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == hits
    text = "".join(choice.delta.content or "" for c in chunks for choice in c.choices)
    assert text == first.choices[0].message.content
    salted = chat(site, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices == first.choices


def test_salts_share_nothing(site):
    assert site.http.post("/reset_prefix_cache").status_code == 200
    answers = [complete(site, cache_salt=salt) for salt in ("alice", "bob", "alice")]
    assert [cached(answer) for answer in answers] == [0, 0, 20]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize("salt", ["", 7, ["a"], "\ud800"])
def test_a_salt_that_is_none_is_a_400_that_names_it(site, salt):
    body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
    # Escaped, as half a character has no other way to come.
    response = site.http.post(
        "/v1/completions",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "cache_salt"


def test_the_counters_move(site):
    def counters():
        lines = site.http.get("/metrics").text.splitlines()
        return [
            float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])
            for name in ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        ]

    complete(site)
    before = counters()
    complete(site)
    after = counters()
    assert [b - a for a, b in zip(before, after, strict=True)] == [23, 20]
    # Who does not read asks nothing.
    complete(site, skip_reading_prefix_cache=True)
    assert counters() == after
    info = 'enable_prefix_caching="True"'
    assert info in site.http.get("/metrics").text


def test_the_log_line_says_the_hit_rate(serving, caplog):
    log = StatsLog(serving.engine)
    log._count(SchedulerStats(prefix_cache_queries=40, prefix_cache_hits=30), IterationStats())
    log._prompt_tokens = 1
    with caplog.at_level("INFO", logger="nanoserve.server"):
        log.log(1.0)
    assert "Prefix cache hit rate: 75.0%" in caplog.text
