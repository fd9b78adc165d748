"""Settings of KV transfer between engines."""

from dataclasses import dataclass


@dataclass
class KVTransferConfig:
    """Attributes:
    kv_connector: registry name of the connector; "null" moves nothing.
    """

    kv_connector: str = "null"
