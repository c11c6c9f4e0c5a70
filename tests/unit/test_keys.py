"""The keys of a job are private, belong to one identity each, and say what is wrong with them."""

import shutil
import stat
from pathlib import Path

import pytest
from zmq.utils import z85

from midstep.protocol.errors import ConfigurationError
from midstep.protocol.keys import JobKeys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    JobKeys.create(folder, ["node/a", "node/b"])
    return folder


def test_a_key_stands_for_its_identity(keys: Path) -> None:
    server = JobKeys.load_server(keys)
    for identity in ("node/a", "node/b"):
        client = JobKeys.load_client(keys, identity)
        assert client.server_public == server.public
        assert server.identity_of(z85.decode(client.public)) == identity
    assert server.identity_of(bytes(32)) is None


def test_everything_is_readable_by_the_owner_only(keys: Path) -> None:
    for path in [keys, *keys.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_making_keys_again_changes_none(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    JobKeys.create(keys, ["node/a", "node/b"])
    assert before == {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}


def test_a_clients_folder_can_be_copied_to_another_host(keys: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    shutil.copytree(keys / "node%2Fa", elsewhere / "node%2Fa")
    assert JobKeys.load_client(elsewhere, "node/a") == JobKeys.load_client(keys, "node/a")
    with pytest.raises(ConfigurationError, match="missing"):
        JobKeys.load_server(elsewhere)


def test_a_removed_client_is_nobody(keys: Path) -> None:
    public = z85.decode(JobKeys.load_client(keys, "node/a").public)
    JobKeys.remove(keys, "node/a")
    JobKeys.remove(keys, "node/a")
    assert JobKeys.load_server(keys).identity_of(public) is None
    with pytest.raises(ConfigurationError, match="missing"):
        JobKeys.load_client(keys, "node/a")


@pytest.mark.parametrize("name", ["server/server.json", "node%2Fa/client.json", "server", "node%2Fa", "server/clients"])
def test_what_others_could_read_is_refused_with_the_remedy(keys: Path, name: str) -> None:
    path = keys / name
    path.chmod(0o755 if path.is_dir() else 0o644)
    with pytest.raises(ConfigurationError, match=r"chmod (600|700)"):
        (JobKeys.load_server(keys), JobKeys.load_client(keys, "node/a"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"public": "short", "secret": "short"}'])
def test_a_damaged_file_is_refused_by_its_path(keys: Path, content: bytes) -> None:
    (keys / "server/server.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"server\.json"):
        JobKeys.load_server(keys)


def test_the_keys_of_another_client_are_refused(keys: Path) -> None:
    (keys / "node%2Fa/client.json").write_bytes((keys / "node%2Fb/client.json").read_bytes())
    with pytest.raises(ConfigurationError, match="not of node/a"):
        JobKeys.load_client(keys, "node/a")


@pytest.mark.parametrize("identity", ["", "server"])
def test_a_name_that_is_taken_by_the_layout_is_refused(keys: Path, identity: str) -> None:
    with pytest.raises(ConfigurationError, match="no name"):
        JobKeys.add(keys, identity)


@pytest.mark.parametrize("identity", ["..", "../../outside", ".hidden", "a/b/c", "ü"])
def test_no_name_leads_out_of_the_directory(keys: Path, identity: str) -> None:
    JobKeys.add(keys, identity)
    assert JobKeys.load_client(keys, identity).identity == identity
    assert sorted(path.name for path in keys.parent.iterdir()) == ["keys"]


def test_a_secret_is_not_shown(keys: Path) -> None:
    server, client = JobKeys.load_server(keys), JobKeys.load_client(keys, "node/a")
    assert server.secret not in repr(server)
    assert client.secret not in repr(client)
