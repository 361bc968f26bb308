"""How a LocalAI controller reaches processes: host, ports, token."""

from __future__ import annotations

import pytest

from corral.worker.localai.peer import localai_peer
from corral.worker.settings.network import LocalAISettings


@pytest.mark.parametrize(
    ("settings", "grpc_address", "host", "first", "last"),
    [
        (LocalAISettings(), "", "127.0.0.1", 50051, 65535),
        (LocalAISettings(), "w1:50051", "w1", 50051, 65535),
        (LocalAISettings(address="w1:6000"), "w1:6000", "w1", 6000, 65535),
        (LocalAISettings(serve_address="0.0.0.0:7000"), "w1:9", "w1", 7000, 65535),
        (LocalAISettings(address="w1:6000", serve_address="0.0.0.0:7000"), "w1:6000", "w1", 6000, 65535),
        (LocalAISettings(advertise_address="pub:7001"), "pub:7001", "pub", 50051, 65535),
        (LocalAISettings(address="w1:6000", advertise_address="pub:7001"), "pub:7001", "pub", 6000, 65535),
        (LocalAISettings(grpc_max_port=50060), "w1:50051", "w1", 50051, 50060),
        (LocalAISettings(grpc_max_port=1000), "w1:50051", "w1", 50051, 65535),  # below the base: ignored
        (LocalAISettings(grpc_max_port=99999), "w1:50051", "w1", 50051, 65535),
    ],
)
def test_where_a_localai_controller_finds_processes(
    settings: LocalAISettings, grpc_address: str, host: str, first: int, last: int
) -> None:
    peer = localai_peer(settings, grpc_address=grpc_address, token="s")
    assert peer.ports is not None
    assert (peer.host, peer.ports.first, peer.ports.last) == (host, first, last)
    assert (peer.is_localai, peer.listen_host, peer.token) == (True, "0.0.0.0", "s")
