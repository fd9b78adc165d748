"""How a front reaches an engine core that runs in a process of its own.

`ProcessClient` starts the process, sends it requests, and reads its outputs in a thread. The death
of the process, at any time, is reported once, within a tenth of a second.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import zmq

from nanoserve import errors
from nanoserve.config.engine import EngineConfig
from nanoserve.engine import process as wire
from nanoserve.engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo
from nanoserve.errors import EngineDeadError

POLL_MILLISECONDS = 100
# OpenMP threads that spin while they wait take the cores from the process beside them: two torch
# processes then slow each other down 20 to 50 times. Threads that sleep at once cost 30 us to wake,
# at every operation. So they spin for as long as one operation follows another, then sleep.
OPENMP_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
SHUTDOWN_SECONDS = 3.0


def child_environment() -> dict[str, str]:
    """The environment that makes a child import the very packages that this process imports."""
    environment = dict(os.environ)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    paths = [p for p in sys.path if p and os.path.isdir(p)]
    paths = [p for p in paths if p not in standard and not p.endswith("lib-dynload")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    for name, value in OPENMP_WAITING.items():
        environment.setdefault(name, value)
    return environment


class ProcessClient:
    """One engine process.

    Args:
        config: what the engine is made from.
        on_outputs: called with each step's outputs, in the reader thread.
        on_death: called once, in the reader thread, when a started engine ends unasked.
        on_progress: called with a line at each stage of loading, in the reader thread.

    Attributes:
        ready: resolves to EngineInfo, or to the error that kept the engine from starting.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[EngineDeadError], None],
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.ready: Future[EngineInfo] = Future()
        self._on_outputs, self._on_death, self._on_progress = on_outputs, on_death, on_progress
        self._lock = threading.Lock()
        self._resets: deque[Future[bool]] = deque()
        self._closing = False
        self._folder = tempfile.mkdtemp(prefix="nanoserve-")
        self._context = zmq.Context()
        # This end connects, so that a message is queued and never blocks the caller, whether the
        # engine is not up yet or no longer there.
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.setsockopt(zmq.LINGER, 0)
        self._to_engine.setsockopt(zmq.SNDHWM, 0)
        self._from_engine = self._context.socket(zmq.PULL)
        self._from_engine.setsockopt(zmq.LINGER, 0)
        self._from_engine.setsockopt(zmq.RCVHWM, 0)
        addresses = [f"ipc://{self._folder}/in", f"ipc://{self._folder}/out"]
        self._to_engine.connect(addresses[0])
        self._from_engine.bind(addresses[1])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nanoserve.engine.process", *addresses],
            stdin=subprocess.PIPE,
            env=child_environment(),
            # Out of the terminal's foreground group: a Ctrl-C is handled by the front alone.
            start_new_session=True,
        )
        self._send(wire.CONFIG, config)
        self._reader = threading.Thread(target=self._read, name="engine-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send one sequence."""
        self._send(wire.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End sequences."""
        self._send(wire.ABORT, request_ids)

    def reset_prefix_cache(self) -> "Future[bool]":
        """Forget every cached prefix; the answer is False while requests hold blocks."""
        answer: Future[bool] = Future()
        self._resets.append(answer)
        self._send(wire.RESET, None)
        return answer

    def shutdown(self) -> None:
        """End the process and remove every trace of it. May be called more than once."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._process.poll() is None:
                self._to_engine.send_multipart([wire.SHUTDOWN, b""], flags=zmq.NOBLOCK)
        if not self.ready.done():
            # Still loading: it reads no messages yet, and holds nothing worth a farewell.
            self._process.kill()
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, kind: bytes, payload: object) -> None:
        with self._lock:
            if not self._closing:
                self._to_engine.send_multipart([kind, wire.encode(payload)])

    def _read(self) -> None:
        """The reader thread: until the process has ended and its last words are read."""
        while True:
            if self._from_engine.poll(POLL_MILLISECONDS):
                self._take(*self._from_engine.recv_multipart())
            elif self._process.poll() is not None:
                break
        while self._resets:
            self._resets.popleft().set_exception(self._death())
        if not self.ready.done():
            self.ready.set_exception(self._death())
        elif not self._closing and self.ready.exception() is None:
            self._on_death(self._death())

    def _take(self, kind: bytes, payload: bytes) -> None:
        if kind == wire.OUTPUTS:
            self._on_outputs(wire.decode_outputs(payload))
        elif kind == wire.PROGRESS and self._on_progress is not None:
            self._on_progress(wire.decode_text(payload))
        elif kind == wire.RESET_DONE:
            self._resets.popleft().set_result(wire.decode_answer(payload))
        elif kind == wire.READY:
            # Both ends are connected and need the sockets' names no more: a front that is killed
            # from now on leaves nothing behind.
            shutil.rmtree(self._folder, ignore_errors=True)
            self.ready.set_result(wire.decode_info(payload))
        elif kind == wire.FAILED:
            self.ready.set_exception(_load_error(wire.decode_failure(payload)))

    def _death(self) -> EngineDeadError:
        code = self._process.poll()
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return EngineDeadError(f"the engine process ended {how}")


def _load_error(failure: wire.LoadFailure) -> Exception:
    """The engine's load error, as the class the front would have raised itself."""
    known = getattr(errors, failure.kind, None)
    if isinstance(known, type) and issubclass(known, (errors.ModelLoadError, errors.ConfigError)):
        return known(failure.message)
    return RuntimeError(f"the engine failed to start: {failure.message}\n{failure.trace}")
