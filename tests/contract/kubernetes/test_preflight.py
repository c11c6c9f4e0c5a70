"""Before a job begins its account is asked for every right that it will need."""

import asyncio
from pathlib import Path

import pytest

from midstep.platforms.base import PlatformContext
from midstep.platforms.kubernetes import platform
from midstep.platforms.kubernetes.api import Unavailable
from midstep.platforms.kubernetes.platform import check_kubernetes
from midstep.platforms.kubernetes.rules import CLUSTER_RIGHTS, CONFIG_MAP_RIGHTS, LEASE_RIGHTS, RIGHTS, ApiRight
from midstep.platforms.kubernetes.settings import Settings, encode
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.token import new_token

from .api_server import ApiServer, served

EVERY = (*RIGHTS, *LEASE_RIGHTS, *CLUSTER_RIGHTS, *CONFIG_MAP_RIGHTS)
FAULTS = "kube-system"  # where ConfigMaps are


def checked(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *missing: ApiRight,
    failures: tuple[int, ...] = (),
    watch_nodes: bool = True,
) -> ApiServer:
    """Check the account of the job `demo`, which lacks these rights, with an API that first fails so."""
    settings = folder / "settings.json"
    store = "kubernetes:///midstep-demo?journal=/c/journal"
    wanted = Settings("demo", "image", watch_nodes=watch_nodes, config_maps=(FAULTS,), controllers=2, store=store)
    settings.write_text(encode(wanted))
    options = {"settings": str(settings)}

    async def scenario() -> ApiServer:
        async with served(folder) as (server, config):
            monkeypatch.setenv("KUBECONFIG", str(config))
            server.forbidden = {
                (right.verb, right.resource, "midstep-demo" if right.named else "") for right in missing
            }
            server.failures = list(failures)
            await check_kubernetes(PlatformContext("demo", (), new_token(job="demo"), options, lambda report: None))
            return server

    return asyncio.run(scenario())


@pytest.mark.parametrize("right", EVERY, ids=lambda right: f"{right.verb} {right.resource}")
def test_a_verb_that_is_missing_is_named_with_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: ApiRight
) -> None:
    lacking = f"  {right.verb} {right.resource}: {right.why}\n"
    where = FAULTS if right in CONFIG_MAP_RIGHTS else "default"
    with pytest.raises(ConfigurationError, match=f"midstep-demo lacks rights in the namespace {where}:\n{lacking}"):
        checked(tmp_path, monkeypatch, right)


def test_every_right_is_asked_for_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(checked(tmp_path, monkeypatch).asked) == len(EVERY)


def test_rights_to_hosts_are_needed_only_where_hosts_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(tmp_path, monkeypatch, *CLUSTER_RIGHTS, watch_nodes=False)


def test_an_api_that_does_not_answer_at_once_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(checked(tmp_path, monkeypatch, failures=(503, 503)).asked) == len(EVERY) + 2


def test_an_api_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "PATIENCE_S", 0.1)
    with pytest.raises(Unavailable):
        checked(tmp_path, monkeypatch, failures=(503,) * 20)


def test_where_rights_cannot_be_asked_the_job_begins_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked(tmp_path, monkeypatch, failures=(403,))
    assert "cannot be asked, so they are not checked" in caplog.text
