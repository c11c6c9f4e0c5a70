"""Messages of an agent's channel arrive whole with their descriptors, or are refused and leak none."""

import os
import socket

import pytest

from midstep.agent import channel
from midstep.protocol.errors import AgentError


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_message_arrives_with_its_descriptors() -> None:
    assignment = channel.ServeStore(host="127.0.0.1", port=29500)
    ours, theirs = channel.pair()
    with ours, theirs:
        channel.send(ours, assignment, (ours.fileno(), theirs.fileno()))
        received = channel.receive(theirs)

    assert received is not None
    message, fds = received
    assert message == assignment
    assert len(fds) == 2
    assert not any(os.get_inheritable(fd) for fd in fds)
    channel.close_all(fds)


def test_a_closed_channel_has_no_message() -> None:
    ours, theirs = channel.pair()
    ours.close()
    with theirs:
        assert channel.receive(theirs) is None


def test_no_descriptor_of_a_truncated_message_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops what is above the limit of open files; the rest is the receiver's to close."""
    arrived = [os.memfd_create("payload"), os.memfd_create("other")]
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b".", list(arrived), socket.MSG_CTRUNC, None))
    ours, theirs = channel.pair()
    with ours, theirs, pytest.raises(AgentError, match="limit of open files"):
        channel.receive(theirs)

    assert not any(is_open(fd) for fd in arrived)
