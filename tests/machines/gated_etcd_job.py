"""A job in etcd whose ranks are held at gates: faults come in the step, and in the phase, that a test has chosen."""

import json
from pathlib import Path
from typing import Any

import yaml

from midstep.controller.endpoints.control_requests import (
    Accepted,
    InjectRequest,
    Reply,
    Request,
    StatusReply,
    StatusRequest,
)
from midstep.controller.endpoints.local_sockets import SOCKET_NAME
from midstep.protocol.incidents import JobStatus
from midstep.protocol.types import ArmedFault

from .etcd_job import CONTROLLERS, PATIENCE_S, EtcdJob
from .job import STATUS_S, answer_at, stopped_ranks
from .machines import Machine, Machines


class GatedEtcdJob(EtcdJob):
    """The job. `gates`: steps in front of which all ranks wait, each until it is opened."""

    def __init__(
        self, machines: Machines, root: Path, *, gates: tuple[int, ...], policy: dict[str, Any], **options: Any
    ) -> None:
        self.records = root / "records"
        self.records.mkdir()
        for step in gates:
            self._gate(step).touch()
        super().__init__(machines, root, policy=yaml.safe_dump(policy), **options)

    def held_at(self, step: int) -> JobStatus:
        """Wait until all ranks stand at the gate of a step, with no incident open."""
        held: list[JobStatus] = []

        def there() -> bool:
            status = self.live_status()
            is_held = status is not None and status.phase == "running" and all(e.step == step for e in status.ranks)
            held[:] = [status] if status is not None and is_held else []
            return bool(held)

        self.until(there, f"all ranks at the gate of step {step}")
        return held[0]

    def open_gate(self, step: int) -> None:
        """Let the ranks go on into a step."""
        self._gate(step).unlink()

    def inject(self, fault: ArmedFault) -> None:
        """Arm a fault in the process that holds a rank now."""
        reply = self._ask(InjectRequest(fault), PATIENCE_S)
        assert isinstance(reply, Accepted), reply

    def live_status(self) -> JobStatus | None:
        """Return what the controller says that leads; None while there is none."""
        reply = self._ask(StatusRequest(), STATUS_S)
        return reply.status if isinstance(reply, StatusReply) else None

    def until_all_controllers(self) -> None:
        """Wait until the one that leads knows of all others."""

        def known() -> bool:
            status = self.live_status()
            return status is not None and len(status.controllers) == CONTROLLERS

        self.until(known, "all controllers")

    def machine_of(self, rank: int, status: JobStatus) -> Machine:
        """Return the machine on which a rank runs."""
        return next(machine for machine in self.machines if machine.name == status.ranks[rank].node)

    def until_stopped(self, machine: Machine) -> int:
        """Wait until a process of a rank has stopped itself on a machine; return its pid on this computer."""
        self.until(lambda: bool(stopped_ranks(machine)), f"a rank to stop itself on {machine.name}")
        return stopped_ranks(machine)[0]

    def _gate(self, step: int) -> Path:
        return self.records / f"gate.{step}"

    def _ask(self, request: Request, limit_s: float) -> Reply | None:
        """Ask the controllers through their machines' files, until one answers that leads."""
        for number in range(CONTROLLERS):
            job_file = self.root / f"c{number}" / "job.json"
            if not self.machines[number].is_on or not job_file.exists():
                continue
            place = json.loads(job_file.read_text())["run_dir"]
            path = Path(f"/proc/{self.machines[number].space.pid}/root{place}/{SOCKET_NAME}")
            reply = answer_at(path, request, limit_s) if path.exists() else None
            if reply is not None:
                return reply
        return None
