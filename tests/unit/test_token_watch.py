"""A job's token is replaced while the job runs: what the controller's keys say after its file has changed."""

import logging
from pathlib import Path

import pytest
from zmq.utils import z85

from midstep.launch.job import let_nodes_join
from midstep.launch.joining import TokenWatch
from midstep.protocol import keys
from midstep.protocol.errors import KeyReplaced
from midstep.protocol.identities import Role, family_of
from midstep.protocol.keys import JobKeys
from midstep.protocol.token import FullToken, JoinToken, new_token, token_text

JOB = "demo"
MOST = 8


class Opened:
    """The keys of a job that nodes can join, and the file with its token."""

    def __init__(self, root: Path) -> None:
        self.keys, self.file, self.token = root / "keys", root / "job.token", new_token()
        let_nodes_join(self.keys, self.token, JOB)
        JobKeys.admit(self.keys, "node/a", new_token().controller_keys(JOB).public)
        self.write(self.token)
        self.watch = TokenWatch(self.file, self.token, self.keys, JOB)

    def write(self, token: FullToken | JoinToken) -> None:
        self.file.write_text(token_text(token))
        self.file.chmod(0o600)

    def identity_of(self, public: str) -> str | None:
        return JobKeys.load_server(self.keys).identity_of(z85.decode(public))

    def known(self, token: FullToken) -> bool:
        try:
            joining = self.identity_of(token.invitation(JOB).join.public)
            return (joining, self.identity_of(token.operator_keys(JOB, Role.VIEWER).public)) == (
                "joining/",
                family_of(Role.VIEWER),
            )
        except KeyReplaced:
            return False


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(tmp_path)


def test_a_renewed_token_counts_as_soon_as_its_file_is_read_and_the_old_one_no_longer(opened: Opened) -> None:
    new = opened.token.renewed()
    opened.write(new)
    opened.watch.look()

    assert opened.known(new)
    for public in (
        opened.token.invitation(JOB).join.public,
        opened.token.operator_keys(JOB, Role.ADMIN).public,
        opened.token.detector_keys(JOB).public,
    ):
        with pytest.raises(KeyReplaced):
            opened.identity_of(public)


def test_nodes_that_have_joined_and_the_platform_keep_their_keys(opened: Opened) -> None:
    node = new_token().controller_keys("x").public
    JobKeys.admit(opened.keys, "node/b", node)
    opened.write(opened.token.renewed())
    opened.watch.look()

    assert opened.identity_of(node) == "node/b"
    assert opened.identity_of(opened.token.platform_keys(JOB).public) == "platform"


def test_an_old_token_that_comes_back_counts_again(opened: Opened) -> None:
    new = opened.token.renewed()
    for token in (new, opened.token):
        opened.write(token)
        opened.watch.look()

    assert opened.known(opened.token)
    assert not opened.known(new)


@pytest.mark.parametrize(
    "wrong",
    ["", "hello", token_text(new_token()), token_text(new_token().for_joining(JOB))],
    ids=["empty", "no token", "another job's", "of a role"],
)
def test_what_cannot_be_the_jobs_token_changes_nothing_and_is_said_once(
    opened: Opened, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    opened.file.write_text(wrong)
    with caplog.at_level(logging.ERROR):
        opened.watch.look()
        opened.watch.look()

    assert opened.known(opened.token)
    (said,) = caplog.messages
    assert said.startswith("the job keeps the token that it has: ")


def test_a_file_that_is_open_to_others_is_not_read(opened: Opened) -> None:
    new = opened.token.renewed()
    opened.write(new)
    opened.file.chmod(0o644)
    opened.watch.look()
    assert not opened.known(new)

    opened.file.chmod(0o600)
    opened.watch.look()
    assert opened.known(new)


def test_a_token_can_be_renewed_any_number_of_times_in_bounded_space(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer replaced keys kept than in a real job, which would take long to reach its bound."""
    monkeypatch.setattr(keys, "MOST_REPLACED", MOST)
    token = opened.token
    for _ in range(3 * MOST):
        token = token.renewed()
        let_nodes_join(opened.keys, token, JOB)

    assert opened.known(token)
    assert len(list((opened.keys / "server" / "clients").iterdir())) <= MOST + 10
    assert opened.identity_of(opened.token.invitation(JOB).join.public) is None


def test_who_follows_a_file_has_a_thread_that_ends_with_it(opened: Opened) -> None:
    with opened.watch as watch:
        assert watch._thread.is_alive()
    assert not watch._thread.is_alive()
