"""A server in its own process, from a source that is named: the reference, or the learner's own.

`Server` is what notebooks use to talk to a finished or a half-built engine; `nanobook serve` runs
the workspace's package in the terminal. This module must not import the engine: it starts it.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from nanobook.grading import environment
from nanobook.rebuild import CourseError, find_root
from nanobook.workspace import Workspace

READY_SECONDS = 240
STOP_SECONDS = 15


class ServerError(RuntimeError):
    """The server did not come up; the message holds the end of its log."""


class Server:
    """`nanoserve serve` on a free port.

    Args:
        where: "reference" (the packages beside the course), "workspace" (the learner's own, with
            what it lacks lent), or a folder that holds nanoserve/ and kernels/.
        model: Hub id or folder; None is the embedded model.
        args: more arguments of `nanoserve serve`.
        env: more environment variables.

    Attributes:
        url: where it listens, without a slash at the end.
    """

    def __init__(
        self,
        where: str | Path = "reference",
        model: str | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.where, self.model, self.args, self.env = where, model, list(args), dict(env or {})
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log = ""

    def start(self) -> "Server":
        """Start it and wait until it answers.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        if self._process is not None:
            return self
        folder, port = self._folder(), free_port()
        command = [sys.executable, "-P", "-m", "nanoserve.cli.main", "serve"]
        command += [self.model] if self.model else []
        command += ["--host", "127.0.0.1", "--port", str(port), *self.args]
        handle, self._log = tempfile.mkstemp(prefix="nanoserve-", suffix=".log")
        env = {**environment(folder), **self.env}
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(handle)
        atexit.register(self.stop)
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End it and every process that it started. May be called more than once."""
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        for sign, seconds in ((signal.SIGINT, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            if process.poll() is None:
                try:
                    os.killpg(process.pid, sign)
                except ProcessLookupError:
                    break
            try:
                process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # an engine that outlived its server
        Path(self._log).unlink(missing_ok=True)

    def version(self) -> dict[str, Any]:
        """What `/version` says: the sources that the API process and the engine run."""
        return dict(self.get("/version"))

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def log(self) -> str:
        """What the server has printed so far."""
        return Path(self._log).read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _folder(self) -> Path:
        if isinstance(self.where, Path):
            return self.where.resolve()
        if self.where == "workspace":
            workspace = Workspace()
            workspace.fill()
            return workspace.folder
        if self.where != "reference":
            raise ValueError(f"where is 'reference', 'workspace' or a Path, not {self.where!r}")
        root = find_root()
        if not (root / "nanoserve").is_dir():
            raise CourseError(f"{root} holds no reference package: use where='workspace'")
        return root

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended at once:\n{self._tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise ServerError(f"the server did not answer in {READY_SECONDS} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-15:])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: list[str] | None = None) -> int:
    """The subcommand `nanobook serve`: the workspace's package; what it lacks is lent."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        workspace = Workspace()
        lent = workspace.fill()
    except CourseError as error:
        print(f"nanobook: {error}", file=sys.stderr)
        return 1
    own = len(workspace.view()) - len(lent)
    print(f"serving from {workspace.folder}: {own} files of the workspace, {len(lent)} lent")
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", "nanoserve.cli.main", "serve", *arguments]
    try:
        return subprocess.call(command, env=environment(workspace.folder))
    except KeyboardInterrupt:
        return 130
