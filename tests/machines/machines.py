"""Machines for tests, on one computer: each with its own address, hostname, processes, /tmp, /dev/shm and /run.

They share what is named when they are made, as machines of a cluster share a file system, and the programs of this
computer. Nothing is made in the computer's own network namespace.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from .namespaces import OF_MACHINE, CannotMakeMachines, Namespaces, require_programs, system_path
from .network import BAD, GOOD, Network, address

OWN_FOLDERS = ("/run", "/dev/shm", "/tmp")
CHECKOUT = Path(__file__).resolve().parents[2]
BAD_CABLES = "MIDSTEP_BAD_CABLES"  # set: all of them delay and lose frames
_RUN_S = 30.0
_UPTIME_S = 100_000  # by which each machine is longer up than the one before


class Machine:
    """One machine of several. `pid`: its pid 1, as this computer sees it."""

    def __init__(self, number: int, network: Network, shared: Sequence[Path], hosts: str) -> None:
        self.number = number
        self.name = f"m{number}"
        self.address = address(number)
        self.network = network
        self._shared = tuple(shared)
        self._hosts = hosts
        self._started: list[subprocess.Popen[bytes]] = []
        self._space: Namespaces | None = None
        self.power_on()

    @property
    def space(self) -> Namespaces:
        """The namespaces of a machine that is on."""
        assert self._space is not None, f"{self.name} is off"
        return self._space

    @property
    def is_on(self) -> bool:
        """Whether the machine has power."""
        return self._space is not None

    def power_on(self) -> None:
        """Boot: with empty folders of its own, and a cable."""
        assert self._space is None, f"{self.name} is on"
        uptime_s = (1 + self.number) * _UPTIME_S
        self._space = Namespaces(OF_MACHINE, beside=self.network.switch, uptime_s=uptime_s)
        self._space.run(["sh", "-ec", _boot_script(self.name, self._shared)], said=self._hosts)
        self.network.plug_in(self.number, self._space)

    def power_off(self) -> None:
        """End everything on it at once. The cable goes first: what dies says good-bye to nobody."""
        self.network.cut(self.number)
        self.space.end()
        self._space = None
        self.network.unplug(self.number)

    def start(
        self, words: Sequence[str], *, environment: Mapping[str, str] | None = None, output: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program here; it ends with the machine. A signal to the process that is returned does not reach it.

        Its output goes into a file, or is to be read from what is returned.
        """
        stdout = subprocess.PIPE if output is None else os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        try:
            started = subprocess.Popen(
                [*self.space.enter(*OF_MACHINE), *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                env=_environment(environment),
                start_new_session=True,
            )
        finally:
            if output is not None:
                os.close(stdout)
        self._started.append(started)
        return started

    def run(self, *words: str, limit_s: float = _RUN_S, check: bool = True) -> str:
        """Run a command here and return what it says. Raises AssertionError when it fails and `check` is set."""
        done = subprocess.run(
            [*self.space.enter(*OF_MACHINE), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=_environment(None),
            timeout=limit_s,
            start_new_session=True,  # `kill 0` would reach the tests, and what runs them
        )
        assert not check or not done.returncode, f"{' '.join(words)} on {self.name}: {done.stdout}{done.stderr}"
        return done.stdout

    # --- its cable ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Cut the cable."""
        self.network.cut(self.number)

    def heal(self) -> None:
        """Mend the cable."""
        self.network.heal(self.number)

    def close(self) -> None:
        """End everything on it. Idempotent."""
        if self._space is not None:
            self._space.end()
            self._space = None
        for started in self._started:
            started.wait(_RUN_S)
            if started.stdout is not None:
                started.stdout.close()
        self._started.clear()


class Machines:
    """Some machines, m0 and on, and the network between them. `shared`: folders that all of them see."""

    def __init__(self, count: int, shared: Sequence[Path] = (), *, user: bool | None = None) -> None:
        """`user`: in a user namespace; by default where this process is not root's. Raises CannotMakeMachines."""
        require_programs()
        shared = (*shared, *programs(shared))
        cables = BAD if cables_are_bad() else GOOD
        self.network = Network(user=os.geteuid() != 0 if user is None else user, cables=cables)
        self._machines: list[Machine] = []
        names = (f"{address(number)} m{number}" for number in range(count))
        hosts = "".join(f"{line}\n" for line in ("127.0.0.1 localhost", *names))
        try:
            for number in range(count):
                self._machines.append(Machine(number, self.network, shared, hosts))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Machine:
        """Return a machine by its number."""
        return self._machines[number]

    def __iter__(self) -> Iterator[Machine]:
        """Go through all of them."""
        return iter(self._machines)

    def __len__(self) -> int:
        """Return how many there are, on or off."""
        return len(self._machines)

    def __enter__(self) -> "Machines":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        self.close()

    def close(self) -> None:
        """End everything on all machines, and the switch. Idempotent."""
        self.network.close()  # first: what dies then says good-bye to nobody
        for machine in self._machines:
            machine.close()


def programs(shared: Sequence[Path]) -> list[Path]:
    """Return where midstep and its Python are, if machines would not see it: below /tmp each has files of its own."""
    found: list[Path] = []
    for path in (CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)):
        hidden = any(path.is_relative_to(folder) for folder in OWN_FOLDERS)
        if hidden and not any(path.is_relative_to(other) for other in (*shared, *found)):
            found.append(path)
    return found


def cables_are_bad() -> bool:
    """Say whether the environment asks for cables that delay and lose frames."""
    return os.environ.get(BAD_CABLES) not in {None, ""}


def why_not() -> str:
    """Return why no machines can be made on this computer; the empty string when they can."""
    try:
        with Machines(2):
            return ""
    except CannotMakeMachines as reason:
        return str(reason)


def _boot_script(name: str, shared: Sequence[Path]) -> str:
    """Return the shell's commands that give a machine its name and its own folders, with what is shared in them."""
    lines = [f"hostname {name}", "mount -n -t proc proc /proc", f"mount -n -t tmpfs {name} /mnt"]
    # What is shared may lie in a folder that is to be hidden: each is made ready elsewhere, and then moved.
    stages = {folder: f"/mnt/{number}" for number, folder in enumerate(OWN_FOLDERS)}
    for folder, stage in stages.items():
        lines += [f"mkdir {stage}", f"mount -n -t tmpfs -o mode=1777 {name} {stage}"]
        for path in shared:
            if path.is_relative_to(folder):
                inside = f"{stage}/{path.relative_to(folder)}"
                lines += [f"mkdir -p {inside}", f"mount -n --rbind {path} {inside}"]
    lines += [f"mount -n --move {stage} {folder}" for folder, stage in stages.items()]
    lines += ["umount -n /mnt", "cat > /run/hosts", "mount -n --bind /run/hosts /etc/hosts"]
    return "\n".join(lines)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """Return this process's environment, without what speaks of this computer's folders."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "XDG_RUNTIME_DIR", "HOSTNAME")}
    return {**kept, "PATH": system_path(), **(more or {})}
