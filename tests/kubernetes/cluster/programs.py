"""The programs of Kubernetes, built once into a cache keyed by how they are built, and whether they can run here."""

import fcntl
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import IO

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ...machines.machines import why_not as why_no_machines
from .cgroups import why_not as why_no_groups

_BUILD = Path(__file__).with_name("build.sh")
_KEY = hashlib.sha256(_BUILD.read_bytes()).hexdigest()[:12]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "midstep-kubernetes" / _KEY
_BUILT = ("kubelet", "kube-scheduler", "kube-controller-manager", "kube-apiserver")
_BUILD_S = 3600.0
_TIMED_OUT = 124  # what timeout(1) says then
_END_OF_LOG = 400  # characters


class NoKubernetes(Exception):
    """There is none to be had on this computer; the text says why."""


class Programs(msgspec.Struct, frozen=True):
    """Where they are."""

    folder: Path

    @property
    def path(self) -> str:
        """The folders with programs, as in PATH."""
        inside = (self.folder / "bin", *(self.folder / "root" / name for name in ("usr/bin", "usr/sbin", "bin")))
        return ":".join(map(str, inside))

    @property
    def network_plugins(self) -> Path:
        """The folder with the programs that give a pod its network."""
        return self.folder / "root/usr/lib/cni"

    @property
    def busybox(self) -> Path:
        """A program that needs no library, for an image with nothing else in it."""
        return self.folder / "root/bin/busybox"

    def are_there(self) -> bool:
        """Say whether everything is built."""
        return self.busybox.exists() and all((self.folder / "bin" / name).exists() for name in _BUILT)


def why_not() -> str:
    """Return why this computer can have no cluster, built or not; the empty string where it can."""
    if os.geteuid() != 0:
        return "kubelets need root"
    if platform.machine() != "x86_64":
        return f"it was never built for {platform.machine()}"
    return why_no_groups() or why_no_machines()


def require_programs() -> Programs:
    """Return the programs of the cache. Raises NoKubernetes where they were not built."""
    programs = Programs(CACHE)
    if not programs.are_there():
        raise NoKubernetes(f"nothing is built in {CACHE}: `python -m tests.kubernetes.cluster build`, 5 to 20 minutes")
    return programs


def build() -> None:
    """Build what is missing, once at a time on this computer. Raises NoKubernetes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock, (CACHE / "build.log").open("wb") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if Programs(CACHE).are_there():
            return
        status = _run_build(["timeout", "--kill-after=10", f"{_BUILD_S:.0f}", "bash", str(_BUILD), str(CACHE)], log)
    if status == _TIMED_OUT:
        raise NoKubernetes(f"the build was not ready within {_BUILD_S:.0f} s: it continues from there the next time")
    if status:
        end = (CACHE / "build.log").read_text(errors="replace")[-_END_OF_LOG:]
        raise NoKubernetes(f"the build has failed, see {CACHE}/build.log: {end}")


def _run_build(command: list[str], log: IO[bytes]) -> int:
    """Run it, show on a terminal which step it is at and how long it takes, and return its exit status."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as building:
            assert building.stdout is not None
            for line in building.stdout:
                log.write(line)
                log.flush()
                progress.update(task, description=line.decode().strip())
            return building.wait()
