"""The settings of the HTTP side, apart from the engine's. Plain data, no web framework."""

from dataclasses import dataclass, field

MAX_BODY_BYTES = 32 * 1024 * 1024


@dataclass
class ServerSettings:
    """What `nanoserve serve` sets beside the engine.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        api_keys: keys any of which opens the API; empty means no key is asked for.
        root_path: path prefix that a proxy in front of the server strips.
        chat_template: text of a Jinja chat template used instead of the model's own.
        generation_config: "auto" takes the model's generation_config.json for the defaults of
            temperature, top_p, top_k and min_p; "vllm" uses neutral ones.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: CORS.
        uvicorn_log_level: level of uvicorn's own messages.
        access_log: one line a request.
        log_stats: a throughput line every ten seconds while there is work.
        max_body_bytes: a longer request body is refused with 413.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    api_keys: list[str] = field(default_factory=list)
    root_path: str = ""
    chat_template: str | None = None
    generation_config: str = "auto"
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    uvicorn_log_level: str = "warning"
    access_log: bool = True
    log_stats: bool = True
    max_body_bytes: int = MAX_BODY_BYTES

    def __repr__(self) -> str:
        # A settings object that lands in a log must not carry the keys there.
        return (
            f"ServerSettings(host={self.host!r}, port={self.port}, api_keys={len(self.api_keys)})"
        )
