"""`nanoserve serve` as a person starts it: a process of its own, its signals, its end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from nanofixtures.script import PLUGIN, write_script
from nanofixtures.serving import until

import nanoserve
from nanoserve.server.sockets import bind
from nanoserve.version import source_hash, source_path

ROOT = Path(nanoserve.__file__).parent.parent
SUPPORT = Path(__file__).parent.parent / "support"
# Five seconds is what is promised; a machine under load may need a little more to notice.
END_SECONDS = 8


class Process:
    """A `nanoserve serve` process, its stderr read as it comes."""

    def __init__(self, *argv: str, **env: str) -> None:
        paths = os.pathsep.join([str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "nanoserve.cli.main", "serve", *argv],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "NANOSERVE_PLUGINS": PLUGIN, **env},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, seconds: float = 90) -> str:
        """The log once it has text."""
        until(lambda: text in self.log or self.popen.poll() is not None, seconds)
        assert text in self.log, self.log
        return self.log

    @property
    def url(self) -> str:
        return re.search(r"at (http://\S+)/v1\n", self.wait_for("try: curl"))[1]

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        [pid] = children.read_text().split()
        return int(pid)

    def wait(self, seconds: float = END_SECONDS) -> int:
        code = self.popen.wait(seconds)
        self._reader.join()
        return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    replies = {"hello": "hi there", "slow": "y" * 1500}
    return write_script(tmp_path_factory.mktemp("script"), replies, delay={"slow": 0.02})


@pytest.fixture
def serve(folder):
    started: list[Process] = []

    def start(*argv: str, **env: str) -> Process:
        started.append(Process(folder, "--host", "127.0.0.1", "--port", "0", *argv, **env))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
        process.wait(30)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def body(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


@pytest.mark.parametrize("listening", [True, False])
def test_A82_port_in_use(folder, listening):
    with bind("127.0.0.1", 0) as taken:
        if listening:
            taken.listen()
        port = str(taken.getsockname()[1])
        process = Process(folder, "--host", "127.0.0.1", "--port", port)
        assert process.wait(30) == 1
    assert f"port {port}" in process.log
    assert "loading" not in process.log
    assert len(process.lines) == 1


@pytest.mark.slow
def test_start_lines_and_a_line_to_paste(serve, folder):
    key = "sk-very-secret"
    process = serve("--served-model-name", "script", "alias", NANOSERVE_API_KEY=key)
    url, log = process.url, process.log
    assert f"source {source_path()} (hash {source_hash()})" in log
    assert f"loading {folder}" in log
    assert "float32 on cpu, KV cache of " in log
    assert "serving script, alias at " in log
    command = re.search(r"try: (curl .*)\n", log)[1]
    if shutil.which("curl"):
        env = {**os.environ, "NANOSERVE_API_KEY": key}
        done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env)
        assert json.loads(done.stdout)["object"] == "chat.completion"
    assert httpx.get(url + "/v1/models").status_code == 401
    engine = process.engine_pid()
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert gone(engine)
    assert key not in process.log  # A95
    assert "Traceback" not in process.log
    assert "arning" not in process.log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["import", "load", "load a little later"])
def test_A85_a_signal_before_the_server_is_ready(serve, number, when):
    process = serve()
    if when == "import":
        process.wait_for("nanoserve ")
    else:
        process.wait_for("loading ")
        time.sleep(0.5 if when == "load" else 2.5)
    children = Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text()
    process.popen.send_signal(number)
    code = process.wait()
    # Whoever was quicker: 128 + number while loading, 0 once it serves.
    assert code in (128 + number, 0)
    assert "Traceback" not in process.log
    for pid in children.split():
        until(lambda pid=pid: gone(int(pid)), END_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_A85_a_signal_in_mid_stream(serve, number):
    process = serve()
    url = process.url
    with httpx.stream(
        "POST", url + "/v1/chat/completions", json=body("slow", stream=True), timeout=30
    ) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        process.popen.send_signal(number)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert process.wait() == 0
    assert "Traceback" not in process.log
    with socket.socket() as sock:  # the port is free again
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", int(url.rsplit(":", 1)[1])))


@pytest.mark.slow
def test_A85_a_second_signal_leaves_at_once_and_so_does_a_silent_client(serve):
    process = serve()
    url, engine = process.url, process.engine_pid()
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body("slow", stream=True)).encode()
    with socket.create_connection((host, int(port))) as silent:  # never reads
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        )
        silent.sendall(head + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        until(lambda: httpx.get(url + "/load").json()["server_load"] == 1)
        process.popen.send_signal(signal.SIGINT)
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    until(lambda: gone(engine), END_SECONDS)


@pytest.mark.slow
def test_A86_a_dead_engine_is_503_and_then_the_server_ends(serve):
    process = serve()
    url = process.url
    request = body("slow", stream=True)
    with httpx.stream("POST", url + "/v1/chat/completions", json=request, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(process.engine_pid(), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert httpx.get(url + "/health").status_code == 503
    answer = httpx.post(url + "/v1/chat/completions", json=body("hello"))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    assert process.wait(20) == 1
    assert "signal 9" in process.log
