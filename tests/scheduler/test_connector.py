"""The connector seam: what a base class gives, and the null connector."""

import pytest

from nanoserve.engine.connector import KV_CONNECTORS, KVConnector, KVConnectorRole, NullConnector
from nanoserve.scheduler_output import SchedulerOutput


def test_the_null_connector_moves_nothing():
    connector = KV_CONNECTORS.load("null")(None, KVConnectorRole.SCHEDULER)
    assert isinstance(connector, NullConnector)
    assert connector.get_num_new_matched_tokens(None, 16) == (0, False)
    assert connector.build_connector_meta(SchedulerOutput()) is None
    assert connector.request_finished(None, ([1, 2],)) == (False, None)
    assert connector.get_finished({"a"}) is None


def test_metadata_is_there_for_one_step():
    connector = NullConnector(None, KVConnectorRole.WORKER)
    connector.bind_connector_metadata({"load": [1]})
    assert connector.connector_metadata == {"load": [1]}
    connector.clear_connector_metadata()
    assert connector.connector_metadata is None


def test_a_connector_must_say_what_it_moves():
    with pytest.raises(TypeError, match="abstract"):
        KVConnector(None, KVConnectorRole.WORKER)
