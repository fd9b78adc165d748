"""When a stream says how many tokens were used: at the end if asked, or with every chunk."""

from typing import Any

from nanoserve.server.generation import Generation
from nanoserve.server.protocol import StreamOptions


class StreamUsage:
    """The `usage` field of a stream's chunks.

    Args:
        options: the request's stream_options.
        generation: whose tokens are counted.
    """

    def __init__(self, options: StreamOptions | None, generation: Generation) -> None:
        self.wanted = bool(options and options.include_usage)
        self._continuous = self.wanted and bool(options and options.continuous_usage_stats)
        self._generation = generation

    def fields(self) -> dict[str, Any]:
        """For a chunk with choices: null if usage comes at the end, absent if not asked for."""
        if not self.wanted:
            return {}
        return {"usage": self._generation.usage() if self._continuous else None}
