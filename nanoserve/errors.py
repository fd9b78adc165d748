"""The errors that a user can cause, told apart from bugs.

`InvalidRequestError` is the one way a bad request is refused: it is raised before the engine sees
the request, names the offending parameter, and becomes a 400 at the HTTP door. `ModelLoadError` is
a wrong model path or folder: the command line prints its one line and exits with 2.
`EngineDeadError` reaches everyone who waits when the engine's process is gone.
"""


class InvalidRequestError(ValueError):
    """A request that cannot be served as it stands.

    Args:
        message: one sentence that says what is wrong and what would be right.
        param: the request's field that is at fault, if one is.
        status: the HTTP status this becomes.
        code: a short machine-readable word (OpenAI's `code`), if there is one.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


class ModelLoadError(RuntimeError):
    """The model named cannot be loaded; the message is one line that says what is missing."""


class ConfigError(ValueError):
    """Settings that cannot work together; the message is one line that says why."""


class EngineDeadError(RuntimeError):
    """The engine's process has ended; nothing more will come from it."""
