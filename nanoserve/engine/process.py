"""The engine core in a process of its own: `python -m nanoserve.engine.process IN OUT`.

Two ZeroMQ sockets lead to the front: requests come in on one, outputs go out on the other, packed
with msgspec. The main thread steps; a second thread reads the input, so that an abort is seen
between two steps; a third waits for the front to disappear, so that no engine outlives its front.
When there is nothing to do the main thread sleeps on the queue.
"""

import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

import msgspec
import zmq

from nanoserve.config.engine import EngineConfig
from nanoserve.engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo
from nanoserve.errors import ConfigError, ModelLoadError

# Kinds of message, the first frame of each.
CONFIG, ADD, ABORT, RESET, SHUTDOWN = b"config", b"add", b"abort", b"reset", b"shutdown"
PROGRESS, READY, FAILED, OUTPUTS = b"progress", b"ready", b"failed", b"outputs"
RESET_DONE = b"reset done"

# How long a step may still run after the front has gone.
ORPHAN_GRACE_SECONDS = 3.0


class LoadFailure(msgspec.Struct):
    """Why the engine did not start: the error's class, its message, and the trace."""

    kind: str
    message: str
    trace: str


encode = msgspec.msgpack.Encoder().encode
decode_config = msgspec.msgpack.Decoder(EngineConfig).decode
decode_request = msgspec.msgpack.Decoder(EngineCoreRequest).decode
decode_text = msgspec.msgpack.Decoder(str).decode
decode_ids = msgspec.msgpack.Decoder(list[str]).decode
decode_outputs = msgspec.msgpack.Decoder(EngineCoreOutputs).decode
decode_answer = msgspec.msgpack.Decoder(bool).decode
decode_info = msgspec.msgpack.Decoder(EngineInfo).decode
decode_failure = msgspec.msgpack.Decoder(LoadFailure).decode


class EngineCoreProcess:
    """One engine core between two sockets.

    Args:
        input_address: ZeroMQ address to bind, where requests come in.
        output_address: address that the front has bound, where outputs go.
    """

    def __init__(self, input_address: str, output_address: str) -> None:
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.bind(input_address)
        self._output = self._context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        # Nothing is worth waiting for once the front is gone.
        self._output.setsockopt(zmq.LINGER, 1000)
        self._output.connect(output_address)
        self._messages: queue.Queue[tuple[bytes, Any]] = queue.Queue()

    def run(self) -> int:
        """Load, then serve until told to stop. Returns the exit code."""
        kind, payload = self._input.recv_multipart()
        assert kind == CONFIG
        config = decode_config(payload)
        try:
            # Only here: importing torch takes seconds, and the front already waits at the socket.
            from nanoserve.engine.core import EngineCore

            core = EngineCore(config, lambda line: self._send(PROGRESS, line))
        except Exception as error:
            failure = LoadFailure(type(error).__name__, str(error), traceback.format_exc())
            self._send(FAILED, failure)
            self._close()
            return 2 if isinstance(error, (ModelLoadError, ConfigError)) else 1
        self._send(READY, core.info)
        threading.Thread(target=self._read_input, name="engine-input", daemon=True).start()
        try:
            while self._handle_messages(core):
                if core.has_work():
                    self._send(OUTPUTS, core.step())
            return 0
        except Exception:
            # The front sees the process end and fails everyone who waits; the trace is for the log.
            traceback.print_exc()
            return 1
        finally:
            core.shutdown()

    def _handle_messages(self, core: Any) -> bool:
        """Take what has come in; wait for something if there is nothing else to do."""
        block = not core.has_work()
        while True:
            try:
                kind, payload = self._messages.get(block=block)
            except queue.Empty:
                return True
            if kind == ADD:
                core.add_request(payload)
            elif kind == ABORT:
                core.abort_requests(payload)
            elif kind == RESET:
                self._send(RESET_DONE, core.reset_prefix_cache())
            elif kind == SHUTDOWN:
                return False
            block = False

    def _read_input(self) -> None:
        while True:
            try:
                kind, payload = self._input.recv_multipart()
            except zmq.ZMQError:
                return  # the context was closed
            if kind == ADD:
                self._messages.put((kind, decode_request(payload)))
            elif kind == ABORT:
                self._messages.put((kind, decode_ids(payload)))
            elif kind == RESET:
                self._messages.put((kind, None))
            else:
                self._messages.put((kind, None))
                return

    def _send(self, kind: bytes, payload: Any) -> None:
        self._output.send_multipart([kind, encode(payload)])

    def _close(self) -> None:
        self._output.close()
        self._context.destroy(linger=1000)


def _exit_with_front() -> None:
    """Wait for the front's end of the pipe to close, then leave, whatever a step is doing."""
    # Not sys.stdin.read: its lock, held by a daemon thread, is fatal when the interpreter ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    threading.Event().wait(ORPHAN_GRACE_SECONDS)
    os._exit(0)


def main(argv: list[str]) -> None:
    """Entry point of the child process; does not return."""
    # Ctrl-C reaches every process of the terminal; it is the front's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_front, name="front-watch", daemon=True).start()
    code = EngineCoreProcess(argv[1], argv[2]).run()
    sys.stderr.flush()
    # The input thread sits in a receive that only the end of the process interrupts, and nothing
    # that was sent is still wanted.
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv)
