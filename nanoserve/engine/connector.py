"""The seam where KV moves between engines or to storage: one class, seen from two sides.

The scheduler's side decides what is to be loaded and saved and says so in each step's metadata; the
worker's side moves the bytes around the forward pass. Names and calls are those of vLLM's v1
`KVConnectorBase`. The null connector moves nothing. A connector must not allocate or free blocks:
it is told which ones are a request's, and may ask for them to be kept a while longer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from nanoserve.registry import Registry
from nanoserve.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    import torch

    from nanoserve.config.engine import EngineConfig
    from nanoserve.forward import AttentionMetadata, ForwardBatch
    from nanoserve.request import Request


class KVConnectorRole(Enum):
    """Which side of the connector an instance is."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


@dataclass
class KVConnectorOutput:
    """What the worker's side tells the scheduler's side after a step.

    Attributes:
        finished_sending: requests whose blocks need not be kept any longer.
        data: anything more, between the two sides of one connector.
    """

    finished_sending: set[str] = field(default_factory=set)
    data: Any = None


class KVConnector(ABC):
    """Both sides of a KV connector. What is not abstract has a default that suits most.

    Args:
        config: the engine's configuration.
        role: which side this instance is; only that side's methods are called.
    """

    def __init__(self, config: "EngineConfig", role: KVConnectorRole) -> None:
        self.config = config
        self.role = role
        self.connector_metadata: Any = None

    # The scheduler's side.

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those found in this engine's own cache.

        Asked at every attempt to admit a request, so it must be cheap and have no side effects.

        Args:
            request: the request to be admitted.
            num_computed_tokens: its first tokens that are here already (whole blocks).

        Returns:
            How many more tokens can be loaded, leaving at least one of the request's tokens to be
            computed, and whether they arrive between steps rather than within the request's first
            step. None instead of a number means "ask again later": the request keeps its place and
            others go past it.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: "Request", block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """The request was admitted and these are all its blocks, one list a KV cache group.

        Called once an admission, also when num_external_tokens is 0.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """The word to the worker's side for this step: plain data, or None. Called every step."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: B027
        """The worker's side has answered."""

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended, by any route, and its blocks are about to be freed.

        Returns:
            True to keep the blocks until `finished_sending` names the request; and the parameters
            that another engine would need to fetch them, or None.
        """
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: Sequence["torch.Tensor"]) -> None:  # noqa: B027
        """The cache tensors, one a layer in layer order. Called once, before the first step."""

    def bind_connector_metadata(self, metadata: Any) -> None:
        """What `build_connector_meta` made for the step that now begins."""
        self.connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self.connector_metadata = None

    @abstractmethod
    def start_load_kv(self, batch: "ForwardBatch") -> None:
        """Begin to bring the step's external KV into its blocks."""

    @abstractmethod
    def wait_for_layer_load(self, layer_index: int) -> None:
        """Return once this layer's KV is in its blocks. Called before the layer attends."""

    @abstractmethod
    def save_kv_layer(
        self, layer_index: int, kv_cache: "torch.Tensor", metadata: "AttentionMetadata"
    ) -> None:
        """Begin to save what the layer has just written. Called after the layer attended."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return once every save of the step is done, so that blocks may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput | None:
        """What has come to an end since the last step.

        Args:
            finished_req_ids: requests that ended since the last step.
        """
        return None

    def shutdown(self) -> None:  # noqa: B027
        """Let go of connections and memory. May be called more than once."""


class NullConnector(KVConnector):
    """Moves nothing."""

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing can be loaded."""
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Nothing to note."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Nothing to say."""
        return None

    def start_load_kv(self, batch: "ForwardBatch") -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_index: int) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_index: int, kv_cache: "torch.Tensor", metadata: "AttentionMetadata"
    ) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""


KV_CONNECTORS = Registry("KV connector", {"null": "nanoserve.engine.connector:NullConnector"})
