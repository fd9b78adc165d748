"""Prefix caching as a client sees it: usage, salts, metrics, and the reset of dev mode."""

import pytest
from nanofixtures.serving import Serving
from nanofixtures.tiny import make_tiny


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


def test_salts_share_nothing(site):
    assert site.http.post("/reset_prefix_cache").status_code == 200
    answers = [complete(site, cache_salt=salt) for salt in ("alice", "bob", "alice")]
    assert [cached(answer) for answer in answers] == [0, 0, 20]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


@pytest.mark.parametrize("salt", ["", 7, ["a"]])
def test_a_salt_that_is_none_is_a_400_that_names_it(site, salt):
    body = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
    response = site.http.post("/v1/completions", json=body)
    assert response.status_code == 400
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
