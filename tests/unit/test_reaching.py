"""How an operator's command finds the job that is meant, on this machine or elsewhere."""

from pathlib import Path

import pytest

from midstep.launch.reached_job import HereJob, JobElsewhere, reached
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.identities import Role
from midstep.protocol.token import Token, new_token, token_text

TOKEN = new_token()
VIEWER = TOKEN.for_role("demo", Role.VIEWER)
WHERE = "m0:29400,m1"


def kept(path: Path, token: Token) -> Path:
    path.touch(0o600)
    path.write_text(token_text(token))
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MIDSTEP_CONTROLLER", "MIDSTEP_TOKEN_FILE", "MIDSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MIDSTEP_HOME", str(tmp_path / "jobs"))


def test_flags_and_environment_name_the_same_job_and_flags_come_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meant = JobElsewhere(("tcp://m0:29400", "tcp://m1:29400"), VIEWER)
    file = kept(tmp_path / "viewer.token", VIEWER)
    assert reached(None, WHERE, file) == meant
    assert reached("demo", WHERE, file) == meant

    monkeypatch.setenv("MIDSTEP_CONTROLLER", WHERE)
    monkeypatch.setenv("MIDSTEP_TOKEN", token_text(VIEWER))
    assert reached(None, None, None) == meant
    monkeypatch.setenv("MIDSTEP_TOKEN_FILE", str(kept(tmp_path / "full.token", TOKEN)))
    assert reached("demo", None, None) == JobElsewhere(meant.endpoints, TOKEN.for_role("demo", Role.ADMIN))
    assert reached(None, "m2:1", file) == JobElsewhere(("tcp://m2:1",), VIEWER)


def test_without_a_controller_the_job_is_one_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "demo"
    job.mkdir(parents=True)
    (job / "journal.sqlite").touch()
    monkeypatch.setenv("MIDSTEP_TOKEN", token_text(VIEWER))

    assert reached(None, None, None) == HereJob(job)


@pytest.mark.parametrize(
    ("job", "controller", "token", "remedy"),
    [
        (None, WHERE, None, "midstep token --role viewer"),
        (None, None, VIEWER, "--token-file goes with --controller"),
        ("other", WHERE, VIEWER, "for the job 'demo', and not for 'other'"),
        (None, WHERE, TOKEN, "write the job's whole name"),
        ("demo", WHERE, TOKEN.for_joining("demo"), "made with --join-only"),
        (None, "m0:x", VIEWER, "write HOST:PORT"),
    ],
    ids=["no token", "no controller", "other job", "no job", "join token", "no endpoint"],
)
def test_what_does_not_fit_is_refused_with_what_to_do(
    job: str | None, controller: str | None, token: Token | None, remedy: str, tmp_path: Path
) -> None:
    file = None if token is None else kept(tmp_path / "token", token)
    with pytest.raises(ConfigurationError, match=remedy):
        reached(job, controller, file)
