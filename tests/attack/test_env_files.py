"""Variables and secrets for the ranks, given to `midstep run`"""

import logging
import os
import random
import stat
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.launch.rank_environment import MAX_FILE_BYTES, named_variables, variables_of_files
from midstep.protocol.errors import ConfigurationError

from .attack import attack
from .fuzzing import CASES, LIMIT_S

SECRET = "c0ffee"


def env_file(tmp_path: Path, data: str | bytes, mode: int = 0o600) -> Path:
    """Make a file of variables."""
    path = tmp_path / "env"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    path.chmod(mode)
    return path


def test_a_value_is_taken_as_it_is(tmp_path: Path) -> None:
    """Blanks, quotes, equals signs and # belong to it; comments and empty lines are none."""
    text = '# note\n\n  A= x "y" # z \nB==\r\n\t# more\nC=\nD=grüße\nA.B=1\nC=again'
    assert variables_of_files([env_file(tmp_path, text)]) == {
        "A": ' x "y" # z ',
        "B": "=",
        "C": "again",
        "D": "grüße",
        "A.B": "1",
    }


def test_a_name_alone_takes_the_value_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a value it is set to that, even to an empty one."""
    monkeypatch.setenv("TOKEN", SECRET)
    assert named_variables(["TOKEN", "A=b=c", "EMPTY="]) == {"TOKEN": SECRET, "A": "b=c", "EMPTY": ""}


@pytest.mark.parametrize("given", ["", "=c0ffee", "a b=c0ffee", "NOT_SET_ANYWHERE"])
def test_what_is_no_variable_is_refused(given: str, tmp_path: Path) -> None:
    """Before anything is made or started."""
    result = CliRunner().invoke(main, ["run", "--job-dir", str(tmp_path / "job"), "--env", given, "train.py"])
    assert result.exit_code == 1
    assert "--env" in result.output
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (f"A=1\nexport TOKEN={SECRET}\n", "line 2: not NAME=VALUE"),
        (f"A=1\n\n{SECRET}\n", "line 3: not NAME=VALUE"),
        (f"TOKEN ={SECRET}", "line 1: not NAME=VALUE"),
        (f"={SECRET}", "line 1: not NAME=VALUE"),
        (f"TOKEN={SECRET}\0", "line 1: not NAME=VALUE"),
        (b"A=1\nTOKEN=\xff" + SECRET.encode(), "line 2: not UTF-8 text"),
        (b"\xff\xfeT\0=\0c0ffee", "line 1: not UTF-8 text"),
        (b"A=" + b"x" * MAX_FILE_BYTES, "more than 1048576 bytes"),
    ],
)
@attack(
    "a file for `--env-file` that is none: `export` lines, another encoding, a bare password, a disk image",
    holds="it is refused before anything runs, with file and line, and without a word of what it holds",
    reads="--env-file FILE: line 2: not NAME=VALUE. Write it without `export` ...",
)
def test_a_malformed_file_is_refused_without_its_content(data: str | bytes, words: str, tmp_path: Path) -> None:
    """What is in it may be the secret."""
    with pytest.raises(ConfigurationError, match=words) as refused:
        variables_of_files([env_file(tmp_path, data)])
    assert SECRET not in str(refused.value)
    assert str(tmp_path / "env") in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """One that is missing, or a directory."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            variables_of_files([path])


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True), (0o400, False)])
@attack(
    "the file with the secrets can be read by others",
    holds="the user is warned, and the job runs",
    reads="FILE can be read by others (mode 644); if it holds secrets, chmod 600 it",
)
def test_a_file_that_others_can_read_is_warned_of(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever they are."""
    with caplog.at_level(logging.WARNING):
        assert variables_of_files([env_file(tmp_path, "A=1", mode)]) == {"A": "1"}
    assert ("can be read by others" in caplog.text) is warned


def test_a_pipe_is_a_file_too(tmp_path: Path) -> None:
    """As in `--env-file <(pass show cluster)`, which leaves nothing on the disk."""
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    assert stat.S_ISFIFO(path.stat().st_mode)
    writer = threading.Thread(target=path.write_text, args=("A=1\n",))
    writer.start()
    try:
        assert variables_of_files([path]) == {"A": "1"}
    finally:
        writer.join(10)


@pytest.mark.timeout(LIMIT_S)
@attack(
    "any bytes for `--env-file`: flipped bits, cut off, spliced",
    holds="the file is refused with its own error, or read to names and values that a process can be started with",
)
def test_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Nothing in between."""
    rng = random.Random(20261122)
    good = "# a\nTOKEN=abc def\n\nPATH=/usr/bin:/bin\nÄ=ü\r\nLAST=x".encode()
    for _ in range(CASES):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[place : place + 1] = bytes([rng.randrange(256)])
                case 1:
                    del data[place : place + rng.randrange(9)]
                case 2:
                    data[place:place] = rng.choice([b"\0", b"\n", b"=", b"\xff", b" ", b"\r", "\u2028".encode(), b"#"])
                case _:
                    data[place:place] = good[rng.randrange(len(good)) :]
        try:
            read = variables_of_files([env_file(tmp_path, bytes(data))])
        except ConfigurationError:
            continue
        assert all(name and "=" not in name and "\0" not in name + value for name, value in read.items())
