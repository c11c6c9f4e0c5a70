"""Messages are kept without a controller for as long as training may continue without one."""

import time
from pathlib import Path

import pytest

from midstep.processor.client import Client
from midstep.protocol.discovery import GIVE_UP_S, read_endpoint
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.messages import RankFinished

HOUR_S = 3600.0
NEVER_S = 0.05


def test_a_ranks_word_outlives_an_outage_of_hours(tmp_path: Path) -> None:
    """Ten minutes were the limit of a message; a rank that is parked or has finished waits for longer."""
    client = Client(job="j", rank=0, incarnation=1, agent_socket=f"ipc://{tmp_path}/a.sock", hear=lambda _: None)
    try:
        client.post(RankFinished(0, 1, 1, 10), 1)
        deadline = time.monotonic() + 30.0
        while client._mailbox.next_due() is None:
            assert time.monotonic() < deadline
            client.flush(NEVER_S)
        now = time.monotonic()
        assert client._mailbox.undeliverable(now + HOUR_S) == []
    finally:
        client.close()
    assert [type(each.body) for each in client._mailbox.undeliverable(now + 2 * GIVE_UP_S)] == [RankFinished]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"ipc:///tmp/x", b"tcp", b"127.0.0.1:80", b"\0" * 4096])
def test_what_is_no_endpoint_is_refused_with_the_file_and_what_happens(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "controller.endpoint").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"controller\.endpoint: .*next controller writes it"):
        read_endpoint(tmp_path)


def test_there_is_no_endpoint_before_a_controller_or_after_the_job(tmp_path: Path) -> None:
    assert read_endpoint(tmp_path) is None
    assert read_endpoint(tmp_path / "gone") is None
