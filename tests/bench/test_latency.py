"""`nanoserve bench latency`, run as the command it is, on TINY."""

import json

import pytest
from nanofixtures.tiny import make_tiny

from nanoserve.cli.main import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


def bench(tiny, tmp_path, *flags: str) -> dict:
    file = tmp_path / "out.json"
    sizes = ["--input-len", "8", "--output-len", "6", "--num-iters", "2"]
    code = main(["bench", "latency", "--model", tiny, *sizes, "--output-json", str(file), *flags])
    assert code == 0
    return json.loads(file.read_text())


def test_both_engines_give_the_same_tokens_and_the_report_says_so(tiny, tmp_path, capsys):
    report = bench(tiny, tmp_path, "--batch-size", "1", "3")
    assert [result["batch_size"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        assert result["oracle"] == "identical"
        ours, theirs = result["nanoserve"], result["transformers"]
        assert result["ratio"] == pytest.approx(
            ours["tokens_per_second"] / theirs["tokens_per_second"]
        )
        assert len(ours["latencies"]) == 2
    assert {"date", "machine", "versions", "command"} <= set(report)
    assert "identical" in capsys.readouterr().out


def test_one_batch_size_gives_vllms_keys(tiny, tmp_path):
    report = bench(tiny, tmp_path, "--batch-size", "2", "--compare", "none")
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 2)
    assert set(report["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert "transformers" not in report["results"][0]
