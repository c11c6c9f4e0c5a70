"""Jobs of several roles, as a user starts them: `midstep run --roles` in a process of its own. A view of each role."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from midstep.controller.role_group import RoleGroup
from midstep.launch.directories import GROUP_NAME, read_group, role_directory
from midstep.launch.reached_job import look_at_group
from midstep.protocol import environment as names
from midstep.protocol.run_directories import is_held
from midstep.protocol.types import ArmedFault

from .jobs import GONE_S, MARK, PATIENCE_S, ROOMY, STEP_S, STEPS, Job, Record, read_record

ROLE_TRAINING = Path(__file__).with_name("training.py")
RANKS_OF_A_ROLE = 2
ROLES_PATIENCE_S = 2 * PATIENCE_S  # two jobs at once, on a machine that may be busy
_LOOK_S = 0.1


def training_role(
    records: Path, *, steps: int = STEPS, faults: Sequence[ArmedFault] = (), **more: Any
) -> dict[str, Any]:
    """Return a role that does the training of these tests, and has this place for its records."""
    return {
        "script": str(ROLE_TRAINING),
        "arguments": [str(records), str(steps), str(STEP_S)],
        "ranks": RANKS_OF_A_ROLE,
        "env": {names.FAULTS: msgspec.json.encode(list(faults)).decode()},
        **more,
    }


class RoleOfJob(Job):
    """One role, as it stands: what can be seen of it, and done to it, is that of any job."""

    def __init__(self, group: "RolesJob", role: str) -> None:
        self.role = role
        self._of = group
        self.launcher, self.output, self.records = group.launcher, group.output, group.records(role)

    @property
    def directory(self) -> Path:  # type: ignore[override]
        """The job directory of the present attempt."""
        return role_directory(self._of.directory, self.role, self._of.group().of(self.role).attempt)

    def steps_done(self) -> int:
        """Return how many steps rank 0 has written down, each as often as it was done."""
        path = self.records / "steps.0"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def until_steps_done(self, count: int) -> None:
        """Wait until rank 0 has done so many steps."""
        self._of.wait_until(lambda: self.steps_done() >= count, f"{count} steps of role {self.role}")

    def pids(self) -> list[int]:
        """Return the process of each rank, once all ranks train."""
        what = f"role {self.role} to train"
        status = self.until(lambda status: status.phase == "running", what, ROLES_PATIENCE_S)
        return [rank.pid for rank in status.ranks]


class RolesJob:
    """A job of several roles, from `midstep run` until nothing is left of it."""

    def __init__(
        self,
        root: Path,
        roles: Mapping[str, Mapping[str, Any]],
        *,
        gates: Mapping[str, Sequence[int]] | None = None,
        **more: Any,
    ) -> None:
        """`gates`: steps in front of which a role waits. `more`: keys of the file beside the roles."""
        root.mkdir(exist_ok=True)
        self.root, self.name = root, f"roles-{secrets.token_hex(4)}"
        self.directory, self.output = root / "job", root / "output.txt"
        self.temporary = root / "tmp"
        self.temporary.mkdir(exist_ok=True)
        for role in roles:
            self.records(role).mkdir(exist_ok=True)
            for step in (gates or {}).get(role, ()):
                (self.records(role) / f"gate.{step}").touch()
        common = {key: value for key, value in ROOMY.items() if key != "ladder"}
        common["stall"] = {"grace_s": 3.0, "suspended_s": ROLES_PATIENCE_S}
        if gates:
            common["stall"] = {
                "grace_s": ROLES_PATIENCE_S,
                "suspended_s": ROLES_PATIENCE_S,
            }  # to be held at a gate is none
        self.file = root / "roles.yaml"
        self.file.write_text(yaml.safe_dump(json.loads(json.dumps({**common, **more, "roles": roles}))))
        self._start(["run", "--roles", str(self.file), "--job", self.name, "--job-dir", str(self.directory)])

    def _start(self, command: list[str]) -> None:
        environment = {**os.environ, MARK: self.name, "TMPDIR": str(self.temporary)}
        with self.output.open("ab") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "midstep.cli.main", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def resume(self) -> None:
        """Continue it with `midstep resume`."""
        self._start(["resume", str(self.directory)])

    # --- watching ---------------------------------------------------------------------------------------------------

    def records(self, role: str) -> Path:
        """Return where a role writes its records."""
        return self.root / f"records-{role}"

    def record(self, role: str) -> Record:
        """Return what the ranks of a role wrote down."""
        return read_record(self.records(role))

    def role(self, role: str) -> RoleOfJob:
        """Return a view of a role."""
        return RoleOfJob(self, role)

    def group(self) -> RoleGroup:
        """Return how the roles stand, as the launcher has written it."""
        self.wait_until((self.directory / GROUP_NAME).is_file, "the launcher to have begun")
        record = read_group(self.directory)
        assert record is not None
        return record.group

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + ROLES_PATIENCE_S
        while not holds():
            assert self.launcher.poll() is None, f"the job ended while waiting for {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self.said()}"
            time.sleep(_LOOK_S)

    def wait(self) -> int:
        """Wait for the end of the job and return its exit code."""
        try:
            return self.launcher.wait(ROLES_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end:\n{self.said()}") from None

    def launcher_of(self, role: str) -> psutil.Process:
        """Return the process that runs a role."""
        for child in psutil.Process(self.launcher.pid).children():
            if role in child.cmdline():
                return child
        raise AssertionError(f"no launcher of role {role}:\n{self.said()}")

    def processes(self) -> list[psutil.Process]:
        """Return every process that belongs to the job."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.name:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def said(self) -> str:
        """Return everything that the job has printed, for messages of failed tests."""
        logs = [self.output, *sorted(self.directory.glob("roles/*/logs/*"))]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}" for log in logs if log.is_file())

    # --- the end ----------------------------------------------------------------------------------------------------

    def assert_no_process_left(self) -> None:
        """No process has outlived the launcher."""
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        assert not left, f"left behind: {left}\n{self.said()}"

    def assert_nothing_left(self) -> None:
        """No process, and no run directory of the job or of a role, has outlived the launcher."""
        self.assert_no_process_left()
        record = read_group(self.directory)
        assert record is not None
        place = Path(record.run_directory)
        assert not is_held(place)
        assert not list(place.parent.glob(f"{self.name}*"))
        assert not look_at_group(self.directory).live

    def close(self) -> None:
        """Kill whatever is there, for tests that failed."""
        self.launcher.kill()
        self.launcher.wait(10)
        for process in self.processes():
            process.kill()
