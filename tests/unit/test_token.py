"""Tokens: what is read from them, what follows from them, and which files they are read from."""

from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.identities import Role
from midstep.protocol.keys import JobKeys
from midstep.protocol.token import (
    FullToken,
    JoinToken,
    Token,
    full,
    job_of,
    new_token,
    parse_token,
    read_token,
    token_text,
)

KNOWN = FullToken(bytes(range(32)))


@pytest.mark.parametrize("token", [KNOWN, FullToken(KNOWN.secret, "j", 9), KNOWN.for_joining("j")], ids=repr)
def test_a_token_is_read_as_it_was_written(token: Token) -> None:
    assert parse_token(token_text(token) + "\n", "here") == token


def test_a_token_does_not_show_its_secret_in_messages() -> None:
    token = new_token(job="j")

    assert repr(token) == "FullToken(job='j', expires_s=0)"
    assert token.controller_keys("j").secret not in repr(token.for_joining("j"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("hello", "holds no token"),
        ("midstep1." + "A" * 5000, "holds no token"),
        ("midstep2.AAAA", "another version"),
        ("midstep1.AAAA", "cut short or changed"),
        ("midstep1.%%%", "cut short or changed"),
        (token_text(KNOWN)[:-3], "cut short or changed"),
        (token_text(KNOWN).swapcase().replace("MIDSTEP", "midstep"), "cut short or changed"),
    ],
    ids=[str(number) for number in range(8)],
)
def test_what_is_no_token_is_refused_with_the_reason_and_not_shown(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as refused:
        parse_token(text, "file")

    assert str(refused.value).startswith("file ")
    assert not text or text not in str(refused.value)


def test_all_machines_derive_the_same_keys_from_a_token() -> None:
    token = KNOWN

    assert token.controller_keys("job").public == "v<7z:UQw>VPBT<(/FbQ!2axMY2E*+aB-J]NdoiSd"
    assert token.controller_keys("job") == FullToken(KNOWN.secret, "x", 5).controller_keys("job")
    assert (
        zmq.curve_public(token.controller_keys("job").secret.encode()).decode() == token.controller_keys("job").public
    )


def test_another_job_secret_or_purpose_has_other_keys() -> None:
    first, second = new_token(), new_token()
    keys = [
        first.controller_keys("a"),
        first.controller_keys("b"),
        second.controller_keys("a"),
        first.invitation("a").join,
        first.invitation("b").join,
    ]

    assert len({pair.secret for pair in keys}) == len(keys)


def test_a_join_token_has_what_nodes_need_and_not_the_controllers_secret() -> None:
    token = new_token(expires_s=77)
    join = token.for_joining("a")

    assert join.invitation("a") == token.invitation("a")
    assert join.expires_s == 77
    assert token.controller_keys("a").secret not in token_text(join)
    with pytest.raises(ConfigurationError, match="join-only"):
        full(join)


def test_a_renewed_token_has_the_same_controller_and_other_keys_for_those_who_come() -> None:
    old = new_token(job="a")
    new = old.renewed(expires_s=77)

    assert parse_token(token_text(new), "here") == new
    assert new.expires_s == 77
    assert new.controller_keys("a") == old.controller_keys("a")
    assert new.platform_keys("a") == old.platform_keys("a")  # what runs and has come is not asked again
    assert new.invitation("a").join != old.invitation("a").join
    assert new.operator_keys("a", Role.VIEWER) != old.operator_keys("a", Role.VIEWER)
    assert new.detector_keys("a") != old.detector_keys("a")
    assert new.renewed().invitation("a") != new.invitation("a")


def test_the_command_renews_a_token_and_not_one_that_was_made_of_it(tmp_path: Path) -> None:
    path = _written(tmp_path / "token", KNOWN)

    renewed = CliRunner().invoke(main, ["token", "--renew", "--token-file", str(path)])
    joined = _written(tmp_path / "join", KNOWN.for_joining("j"))
    refused = CliRunner().invoke(main, ["token", "--renew", "--token-file", str(joined)])

    token = parse_token(renewed.output, "output")
    assert isinstance(token, FullToken)
    assert token.secret == KNOWN.secret
    assert token.entry
    assert "join-only" in refused.output


def test_the_job_is_the_one_that_the_token_names_or_the_one_that_is_given() -> None:
    assert job_of(new_token(job="a"), None) == job_of(new_token(), "a") == job_of(new_token(job="a"), "a") == "a"
    with pytest.raises(ConfigurationError, match="names no job"):
        job_of(new_token(), None)
    with pytest.raises(ConfigurationError, match="is for the job 'a', and not for 'b'"):
        job_of(new_token(job="a"), "b")


def test_the_controllers_keys_are_those_of_the_token(tmp_path: Path) -> None:
    token = new_token()
    JobKeys.create(tmp_path / "keys", [], server=token.controller_keys("a"))

    assert JobKeys.load_server(tmp_path / "keys").public == token.invitation("a").server_public


def test_a_client_is_admitted_by_its_public_key_until_it_is_withdrawn(tmp_path: Path) -> None:
    keys, pair = tmp_path / "keys", new_token().controller_keys("a")
    JobKeys.create(keys, [])
    server = JobKeys.load_server(keys)

    JobKeys.admit(keys, "node/a", pair.public)
    (listed,) = (keys / "server" / "clients").iterdir()
    assert server.identity_of(bytes.fromhex(listed.name)) == "node/a"

    JobKeys.withdraw(keys, pair.public)
    assert server.identity_of(bytes.fromhex(listed.name)) is None


# --- where it is read from --------------------------------------------------------------------------------------------


def test_a_token_comes_from_the_file_or_else_from_the_environment(tmp_path: Path) -> None:
    in_file, in_environment = new_token(), new_token()
    path = _written(tmp_path / "token", in_file)
    environment = {"MIDSTEP_TOKEN": token_text(in_environment)}

    assert read_token(path, environment) == in_file
    assert read_token(None, environment) == in_environment
    assert read_token(None, {}) is None


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path / "token", new_token())
    path.chmod(0o644)

    with pytest.raises(ConfigurationError, match=r"open to others .mode 644.: chmod 600"):
        read_token(path, {})


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing is missing.*midstep token"):
        read_token(tmp_path / "nothing", {})


def _written(path: Path, token: Token) -> Path:
    path.write_text(token_text(token) + "\n")
    path.chmod(0o600)
    return path


def _mounted(folder: Path, name: str, data: bytes) -> Path:
    """Lay out a file as the kubelet does: the files are links into `..data`, a link to a directory with a date."""
    dated = folder / "..2026_01_01_00_00_00.1"
    dated.mkdir(parents=True)
    (dated / name).write_bytes(data)
    (dated / name).chmod(0o644)
    dated.chmod(0o755)
    (folder / "..data").symlink_to(dated.name)
    (folder / name).symlink_to(f"..data/{name}")
    folder.chmod(0o1777)
    return folder / name


def test_a_secret_that_kubernetes_has_mounted_is_read(tmp_path: Path) -> None:
    token = new_token()

    assert read_token(_mounted(tmp_path / "m", "token", token_text(token).encode()), {}) == token


def test_the_key_folder_of_a_client_may_be_a_mounted_secret(tmp_path: Path) -> None:
    JobKeys.create(tmp_path / "made", ["node/a"])
    made = JobKeys.folder(tmp_path / "made", "node/a")
    _mounted(tmp_path / "keys" / made.name, "client.json", (made / "client.json").read_bytes())

    assert JobKeys.load_client(tmp_path / "keys", "node/a") == JobKeys.load_client(tmp_path / "made", "node/a")


@pytest.mark.parametrize("opened", ["..data", "token", "."])
def test_a_mount_in_which_others_can_change_something_is_refused(tmp_path: Path, opened: str) -> None:
    path = _mounted(tmp_path / "m", "token", token_text(new_token()).encode())
    (tmp_path / "m" / opened).chmod(0o777)

    with pytest.raises(ConfigurationError, match="open to others"):
        read_token(path, {})


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_one_line_and_says_when_it_expires() -> None:
    result = CliRunner().invoke(main, ["token", "--job", "a", "--expires", "2h"])

    token = parse_token(result.stdout, "stdout")
    assert isinstance(token, FullToken)
    assert token.job == "a"
    assert token.expires_s > 0
    assert "nodes can join until 20" in result.stderr


def test_the_command_makes_a_join_token_of_the_jobs_token(tmp_path: Path) -> None:
    token = new_token()
    path = _written(tmp_path / "token", token)

    result = CliRunner().invoke(main, ["token", "--join-only", "--token-file", str(path), "--job", "a"])

    assert parse_token(result.stdout, "stdout") == token.for_joining("a")
    assert isinstance(parse_token(result.stdout, "stdout"), JoinToken)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--expires", "tomorrow"], "is no duration"),
        (["--expires", "0s"], "is no duration"),
        (["--join-only"], "need the job's token"),
        (["--join-only", "--expires", "1d"], "belongs to the full token"),
        (["--role", "viewer"], "need the job's token"),
        (["--renew"], "need the job's token"),
        (["--renew", "--role", "viewer"], "make several tokens"),
        (["--role", "root"], "is not one of"),
        (["--role", "viewer", "--join-only"], "make several tokens"),
        (["--job", "../a"], "not a valid job name"),
        (["--token-file", "f"], "starts from"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(main, ["token", *arguments], env={"MIDSTEP_TOKEN": ""})

    assert result.exit_code != 0
    assert reason in result.output.replace("\n", " ")
