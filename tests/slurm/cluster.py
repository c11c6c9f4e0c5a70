"""A Slurm on machines made of namespaces: slurmctld on machine 0, where users type, a slurmd on each of the others.

What Slurm keeps for the machine is in the machine's own /run; its configuration and its logs are in a folder that all
machines see.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ..machines.machines import Machine, Machines

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol", "sdiag", "sinfo")
PACKAGES = "munge slurmctld slurmd slurm-client"
REQUIRED = "MIDSTEP_REQUIRE_SLURM"  # set where the tests have to run: a skipped one is a failed one then
CPUS = 2
KILL_WAIT_S = 30  # Slurm's own default
NODE_DOWN_S = 6  # Slurm's own default is 300
UP_S = 60.0
_POLL_S = 0.1
_OUTSTANDING = re.compile(r"^(Agent queue size|Agent count): +(\d+)$", re.MULTILINE)  # in what `sdiag` prints
_MUNGE = "/run/munge"  # where Slurm looks for it
_SPOOL = "/run/slurmd"


def require_slurm() -> None:
    """Skip the test where there is no Slurm, with what to do; fail it where the environment says that it has to run."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    reason = f"no {', no '.join(missing)} here: on Debian `apt-get install {PACKAGES}`" if missing else ""
    if not reason and os.geteuid() != 0:
        reason = "slurmd starts jobs as other users: it needs root"
    if not reason:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class SlurmCluster:
    """The cluster. Closing the machines ends it."""

    def __init__(self, machines: Machines, root: Path) -> None:
        """Start everything. `root`: a folder that all machines see."""
        self.machines = machines
        self.root = root
        self._key = root / "munge.key"
        self._key.touch(0o600)
        self._key.write_bytes(secrets.token_bytes(1024))
        self._conf = root / "slurm.conf"
        self._conf.write_text(_configuration(machines, root))
        (root / "state").mkdir()
        self._start_munge(machines[0])
        self._start(machines[0], "slurmctld", "-D")
        for number in range(1, len(machines)):
            self.join(machines[number])
        self.until_all_idle()

    def join(self, machine: Machine) -> None:
        """Start what Slurm wants on a node."""
        self._start_munge(machine)
        self._start(machine, "slurmd", "-D", "-N", machine.name)

    def mend(self) -> None:
        """Boot the machines that are off, and have Slurm take them again."""
        for machine in self.machines:
            if not machine.is_on:
                machine.power_on()
                self.join(machine)
        self.until_all_idle()

    def until_all_idle(self) -> None:
        """Wait until every node takes jobs, and has none."""

        def idle() -> bool:
            states = self.states()
            for node, state in states.items():
                if state.startswith("down"):
                    self.type("scontrol", "update", f"nodename={node}", "state=resume", check=False)
            return len(states) == len(self.machines) - 1 and set(states.values()) == {"idle"}

        self.until(idle, "all nodes to be idle", lambda: f"{self.states()}")

    def until_all_is_said(self) -> None:
        """Wait until the controller has no message under way to a node, and none to send again."""

        def outstanding() -> dict[str, int]:
            return {key: int(count) for key, count in _OUTSTANDING.findall(self.type("sdiag", check=False))}

        def nothing() -> bool:
            return set(outstanding().values()) == {0}

        self.until(nothing, "Slurm to have told its nodes everything", lambda: f"{outstanding()}")

    def states(self) -> dict[str, str]:
        """Return the states of the nodes, as Slurm calls them."""
        said = self.type("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in said.splitlines() if len(line.split()) == 2)

    def type(self, *words: str, check: bool = True) -> str:
        """Type a command of Slurm on machine 0 and return what it says."""
        environment = [f"{name}={value}" for name, value in self.environment().items()]
        return self.machines[0].run("env", *environment, *words, check=check)

    def environment(self) -> dict[str, str]:
        """Return the environment of a user who has midstep and this Slurm."""
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"))
        return {"PATH": path, "SLURM_CONF": str(self._conf), "OMP_NUM_THREADS": "1"}

    def until(self, holds: Callable[[], bool], what: str, now: Callable[[], str], limit_s: float = UP_S) -> None:
        """Wait for something that has to happen; `now` says how it is instead."""
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, f"still waiting for {what}: {now()}\n{self.said()}"
            time.sleep(_POLL_S)

    def said(self) -> str:
        """Return what Slurm has written, for messages of failed tests."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.root.glob("*.log")
        )

    def _start_munge(self, machine: Machine) -> None:
        machine.run("install", "-d", "-m", "755", _MUNGE)
        own = {"pid-file": f"{_MUNGE}/pid", "seed-file": f"{_MUNGE}/seed", "key-file": str(self._key)}
        self._start(machine, "munged", "--foreground", *(f"--{name}={value}" for name, value in own.items()))
        asked = ("sh", "-c", f"until [ -S {_MUNGE}/munge.socket.2 ]; do sleep 0.05; done")
        machine.run(*asked, limit_s=UP_S)

    def _start(self, machine: Machine, *words: str) -> subprocess.Popen[bytes]:
        log = self.root / f"{words[0]}.{machine.name}.log"
        return machine.start(words, environment=self.environment(), output=log)


def _configuration(machines: Machines, root: Path) -> str:
    nodes = [machines[number] for number in range(1, len(machines))]
    settings: Mapping[str, object] = {
        "ClusterName": "midstep",
        "SlurmctldHost": f"{machines[0].name}({machines[0].address})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SlurmdTimeout": NODE_DOWN_S,
        "MessageTimeout": 5,  # seconds; a machine that is off answers no message
        "KillWait": KILL_WAIT_S,
        "SchedulerParameters": "sched_interval=2,bf_interval=2",
        "StateSaveLocation": root / "state",
        "SlurmdSpoolDir": _SPOOL,
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmdParameters": "config_overrides",  # the machines are smaller than what is said of them
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"NodeName={node.name} NodeAddr={node.address} CPUs={CPUS} State=UNKNOWN" for node in nodes]
    names = ",".join(node.name for node in nodes)
    lines.append(f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP")
    return "".join(f"{line}\n" for line in lines)
