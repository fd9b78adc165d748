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
from typing import Any, NoReturn

from nanobook.grading import environment
from nanobook.rebuild import CourseError, find_root
from nanobook.workspace import Workspace

HOST = "127.0.0.1"
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
        self._guard: subprocess.Popen[bytes] | None = None
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
        command += ["--host", HOST, "--port", str(port), *self.args]
        handle, self._log = tempfile.mkstemp(prefix="nanoserve-", suffix=".log")
        try:
            self._process = subprocess.Popen(
                command,
                env={**environment(folder), **self.env},
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(handle)
        atexit.register(self.stop)
        no_proxy(HOST)
        self._guard = guard(self._process.pid)
        self.url = f"http://{HOST}:{port}"
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
        if self._guard is not None:
            self._guard.kill()  # before the server's number can become another process's
            self._guard.communicate()
        process.terminate()  # the server alone: it lets its engine finish
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what is left, an engine perhaps
        process.wait()
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
        begun = time.monotonic()
        with _Progress("the server") as progress:
            while (waited := time.monotonic() - begun) < READY_SECONDS:
                if self._process.poll() is not None:
                    raise ServerError(f"the server ended at once:\n{self._tail()}")
                try:
                    with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                        return
                except (urllib.error.URLError, OSError):
                    progress.tell(waited)
                    time.sleep(0.1)
        raise ServerError(f"the server did not answer in {READY_SECONDS} s:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-15:])


class _Progress:
    """A line that says what is waited for, once the wait is long enough to wonder. What stays of it
    is the same every time; in the book, where nobody waits, there is none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.quiet = bool(os.environ.get("NANOBOOK_STATIC"))
        self.told = 0

    def tell(self, waited: float) -> None:
        """Say so, once a second from the second one on."""
        if not self.quiet and int(waited) > max(self.told, 1):
            self.told = int(waited)
            print(f"\rwaiting for {self.name} · {self.told} s", end="", flush=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.told:
            ending = f"{self.name} is up" if kind is None else f"{self.name} is not up"
            print(f"\r{ending:<40}", flush=True)


_GUARD = """
import os, signal, sys, time
sys.stdin.buffer.read()  # ends when the process that holds the other end does
leader = int(sys.argv[1])
try:
    os.kill(leader, signal.SIGTERM)
    for _ in range(100):
        time.sleep(0.1)
        os.kill(leader, 0)
except ProcessLookupError:
    pass
os.killpg(leader, signal.SIGKILL)
"""


def guard(group: int) -> "subprocess.Popen[bytes]":
    """A process that outlives this one just long enough to end a process group: a killed kernel
    runs no cleanup of its own.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def no_proxy(host: str) -> None:
    """Have this process, whatever client its cells use, reach a host without the user's proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [one.strip() for one in os.environ.get(name, "").split(",") if one.strip()]
        if host not in hosts and "*" not in hosts:
            os.environ[name] = ",".join([*hosts, host])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def main(argv: list[str] | None = None) -> int:
    """The subcommand `nanobook serve`: becomes a server of the workspace's package. What that
    lacks is lent.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        workspace = Workspace()
        workspace.fill()
    except CourseError as error:
        print(f"nanobook: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"nanobook: the workspace cannot be written: {error}", file=sys.stderr)
        return 1
    files = workspace.view()
    own = sum(workspace.own(path) == workspace.text(path) for path in files)
    print(f"from {workspace.folder}: {own} files are yours, {len(files) - own} are the course's")
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", "nanoserve.cli.main", "serve", *arguments]
    return _become(command, environment(workspace.folder))


def _become(command: list[str], env: Mapping[str, str]) -> NoReturn:
    """Go on as another program: signals and the exit status are its own."""
    os.execve(command[0], command, env)
