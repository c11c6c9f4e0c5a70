"""`midstep run --platform kubernetes`: makes a job's objects and follows the job, from any machine."""

from pathlib import Path
from typing import Protocol

import msgspec


class PodFlags(msgspec.Struct, frozen=True):
    """The command line's settings of pods."""

    image: str | None = None
    namespace: str | None = None
    dry_run: bool = False
    detach: bool = False
    resources: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    pod_template: Path | None = None
    controller_template: Path | None = None
    launcher_template: Path | None = None
    pod_group: Path | None = None
    watch_nodes: bool = False
    node_conditions: tuple[str, ...] = ()
    controllers: int = 1
    store: str | None = None
    acjob: str | None = None
    config_maps: tuple[str, ...] = ()


class Echo(Protocol):
    """Prints a line for the user, which may hold what other programs wrote."""

    def __call__(self, text: str, *, err: bool = False) -> None:
        """Print to stdout, or to stderr."""
