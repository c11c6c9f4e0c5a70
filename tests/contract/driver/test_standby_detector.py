"""A detector beside a controller that may stand by: it reports while that one leads, and the next one is believed."""

import asyncio
from pathlib import Path

import pytest

from midstep.cli import detect as detector
from midstep.cli.detect import Watched, report_faults, way_with_token
from midstep.cli.standing_by import LEFT, until_one_leads
from midstep.controller.journal.sqlite_file import journal_path
from midstep.launch.reached_job import JobElsewhere
from midstep.protocol.compat import within
from midstep.protocol.identities import Role
from midstep.protocol.messages import FaultReported
from midstep.protocol.token import RoleToken, new_token

from ..kubernetes.api_server import served
from ..kubernetes.test_config_maps import config_map
from .conftest import Rig, StubMachine
from .test_remote_operators import begun_with

LIMIT_S = 30.0
QUIET_S = 0.3


async def beside(endpoint: str, token: RoleToken) -> int:
    """Report what is in the ConfigMaps, as `midstep detect --standby` does."""
    await until_one_leads([endpoint], token)
    way = await asyncio.to_thread(way_with_token, JobElsewhere((endpoint,), token), "detector", standby=True)
    return await report_faults(way, "detector", Watched((), {}, namespaces=("default",)))


def test_it_reports_while_a_controller_leads_and_leaves_when_that_one_has_gone(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is reported before, and the next controller hears of all faults that stand from the next detector."""
    monkeypatch.setattr(detector, "LEAVE_S", QUIET_S)
    monkeypatch.setattr(detector, "LOOK_S", QUIET_S / 10)
    token = new_token()
    admin = token.for_role("demo", Role.ADMIN)

    def told() -> list[str | None]:
        return [event.report.code for event, _ in rig.machine.events if isinstance(event, FaultReported)]

    async def scenario() -> None:
        begun_with(rig, token)
        async with served(tmp_path) as (server, config):
            monkeypatch.setenv("KUBECONFIG", str(config))
            server.put("configmaps", config_map("A1"), "ADDED")
            async with rig.controller():
                first = asyncio.create_task(beside(rig.endpoint, admin))
                await rig.until(lambda: told() == ["A1"])
            assert await first == LEFT
            second = asyncio.create_task(beside(rig.endpoint, admin))
            asked = len(server.asked)
            await asyncio.sleep(QUIET_S)
            assert not second.done()
            assert len(server.asked) == asked
            server.put("configmaps", config_map("A1", "B2"))
            async with rig.controller(StubMachine(journal_path(rig.job_directory))):
                await rig.until(lambda: told()[-2:] == ["A1", "B2"])
            assert await second == LEFT

    asyncio.run(within(LIMIT_S, scenario()))
