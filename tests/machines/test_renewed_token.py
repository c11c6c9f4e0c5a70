"""The job's token is a Secret that Kubernetes has mounted, and is renewed while three controllers lead and stand by."""

from pathlib import Path

import pytest

from midstep.protocol.exits import NOT_ADMITTED
from midstep.protocol.token import FullToken, new_token, token_text

from ..chaos.comparing import assert_nobody_harmed, assert_same_numbers
from ..chaos.jobs import Record
from ..etcd.server import require_etcd
from .conftest import RANKS, STEPS, StartMachines
from .etcd_job import CONTROLLERS, PATIENCE_S, EtcdJob

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

HELD_AT = 60  # until the machine is lost
POLICY = "checkpoint: {every_steps: 50}\nstall: {grace_s: 600}\n"
LATE = CONTROLLERS + 2  # the machine that comes last


class MountedSecret:
    """A volume with a Secret as the kubelet makes it: all of it changes at once, with a link."""

    def __init__(self, folder: Path, token: FullToken) -> None:
        """Mount it. Only root, or the user of the job, can change anything in it."""
        self._folder = folder
        self._versions = 0
        folder.mkdir()
        folder.chmod(0o1777)
        self.file = folder / "token"
        self.update(token)
        self.file.symlink_to("..data/token")

    def update(self, token: FullToken) -> None:
        """Put another token in its place, and remove the files of the one before, as the kubelet does."""
        data = self._folder / "..data"
        before = data.resolve() if data.is_symlink() else None
        self._versions += 1
        dated = self._folder / f"..2026_11_25_03_00_00.{self._versions}"
        dated.mkdir()
        (dated / "token").write_text(token_text(token))
        (dated / "token").chmod(0o644)
        dated.chmod(0o755)
        draft = self._folder / "..data_tmp"
        draft.symlink_to(dated.name)
        draft.rename(data)
        if before is not None:
            (before / "token").unlink()
            before.rmdir()


def test_a_mounted_token_is_renewed_and_the_next_controllers_know_the_nodes_and_the_new_token_only(
    start_machines: StartMachines, tmp_path: Path, undisturbed: Record
) -> None:
    """The leader is killed afterwards. Nodes that had joined stay; a machine with the new token takes over from one."""
    require_etcd()
    token = new_token(job="demo")
    secret = MountedSecret(tmp_path / "secret", token)
    old = tmp_path / "old.token"
    old.touch(0o600)
    old.write_text(token_text(token.for_joining("demo")))
    machines = start_machines(LATE + 1)
    job = EtcdJob(machines, tmp_path, steps=STEPS, policy=POLICY, token=secret.file, without_agent=[LATE])
    gate = job.records / f"gate.{HELD_AT}"
    gate.touch()
    first = job.leader(1)
    job.until_steps(10)
    job.until_all_stand_by(first)

    secret.update(token.renewed())
    job.until(lambda: all("holds another token" in job.text(each) for each in range(CONTROLLERS)), "the new token")
    assert "keeps the token that it has" not in job.said()
    before = job.status(first)
    job.kill_controller(first)
    second = job.leader(2)
    refused = job.start_agent(LATE, old)
    assert refused.wait(PATIENCE_S) == NOT_ADMITTED, job.said()
    assert "takes this token no longer: it was replaced" in " ".join(job.text(LATE).split())

    job.agents[LATE] = job.start_agent(LATE)
    job.until(lambda: len(job.status(second)["nodes"]) == RANKS + 1, "the machine with the new token")
    after = job.status(second)
    assert [rank["pid"] for rank in after["ranks"]] == [rank["pid"] for rank in before["ranks"]]
    lost = next(number for number in job.agents if f"m{number}" == after["ranks"][1]["node"])
    machines[lost].power_off()
    gate.unlink()
    del job.agents[lost]
    job.until_over()

    report = job.report(second)
    assert [incident["rung"] for incident in report["incidents"]] == ["recover"], report
    assert_nobody_harmed(report["incidents"][0], {1}, ranks=RANKS)
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)
