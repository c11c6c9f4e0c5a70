"""Kernel namespaces with a pid 1 of their own: what a machine, and the switch between machines, are made of.

Everything that runs in them ends when their pid 1 does, and that one ends when this process does, however it ends: its
standard input is a pipe from here.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Orphans of the namespace become its children, and are reaped without being waited for.
_PID_1 = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b".")
os.read(0, 1)
"""
_PACKAGES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/bin:/bin"  # a user's path may lack the first two
_END_S = 10.0
COMMAND_S = 20.0  # for one command that changes namespaces
# As two machines never do, two of these do not agree on the monotonic clock: where the kernel can do that.
OF_MACHINE = ("net", "pid", "mount", "uts", "ipc", *(("time",) if Path("/proc/self/ns/time").exists() else ()))
OF_SWITCH = ("net", "pid")


class CannotMakeMachines(Exception):
    """This computer does not allow it; the text says why, and what to install where that helps."""


def system_path() -> str:
    """Return where programs are looked for."""
    return f"{os.environ.get('PATH', '')}:{_SYSTEM_FOLDERS}"


def require_programs() -> None:
    """Raise CannotMakeMachines when a program is missing, naming the packages that have it."""
    missing = [name for name in _PACKAGES if shutil.which(name, path=system_path()) is None]
    if missing:
        packages = sorted({_PACKAGES[name] for name in missing})
        raise CannotMakeMachines(f"there is no {', '.join(missing)}: install {', '.join(packages)}")


class Namespaces:
    """One set of namespaces. `pid`: their pid 1, as it is seen from here.

    With `user` they belong to a user namespace in which the present user is root. `beside`: take the user namespace of
    these. Raises CannotMakeMachines.
    """

    def __init__(
        self, kinds: Sequence[str], *, user: bool = False, beside: "Namespaces | None" = None, uptime_s: int = 0
    ) -> None:
        """`uptime_s`: what the monotonic clock is ahead by, where `kinds` has "time"."""
        self._user = user or (beside is not None and beside.has_user)
        self._kinds = tuple(kinds)
        command = [] if beside is None else beside.enter()
        command += ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "--kill-child=SIGKILL"]
        command += ["--user", "--map-root-user"] if user else []
        command += ["--propagation", "private"] if "mount" in kinds else []
        command += [f"--monotonic={uptime_s}"] if "time" in kinds else []
        self._outer = subprocess.Popen(
            [*command, sys.executable, "-ISc", _PID_1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": system_path()},
            start_new_session=True,
        )
        assert self._outer.stdout is not None
        assert self._outer.stderr is not None
        if self._outer.stdout.read(1) != b".":
            said = self._outer.stderr.read().decode(errors="replace").strip()
            self._outer.wait()
            raise CannotMakeMachines(f"`{' '.join(command)}` says: {said}")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
        self.pid = int(children.split()[0])

    @property
    def has_user(self) -> bool:
        """Whether there is a user namespace among them."""
        return self._user

    def enter(self, *kinds: str) -> list[str]:
        """Return the words that go before a command to run it here; with `kinds` in these namespaces alone."""
        user = ["--user", "--preserve-credentials"] if self._user else []
        return ["nsenter", "--target", str(self.pid), *user, *(f"--{kind}" for kind in kinds), "--"]

    def run(self, words: Sequence[str], *, said: str = "", kinds: Sequence[str] = ()) -> str:
        """Run a command of this computer in `kinds`, with `said` as its input; return its output.

        Raises CannotMakeMachines when it fails.
        """
        done = subprocess.run(
            [*self.enter(*(kinds or self._kinds)), *words],
            input=said,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": system_path()},
            timeout=COMMAND_S,
        )
        if done.returncode:
            raise CannotMakeMachines(f"`{' '.join(words)}` with {said!r} says: {done.stderr.strip()}")
        return done.stdout

    def network(self, *commands: str) -> None:
        """Carry out commands of `ip` in the network namespace. A pid in them is one of this computer."""
        self.run(["ip", "-batch", "-"], said="".join(f"{command}\n" for command in commands), kinds=("net",))

    def end(self) -> None:
        """Kill all that runs here, at once and without a word. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            if self._outer.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self._outer.wait(_END_S)
        for stream in (self._outer.stdin, self._outer.stdout, self._outer.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
