"""The settings of a job's pods, as the user gives them and as the platform reads them beside the controller."""

import re
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import ConfigurationError

PORT = 29_400
LEASE_SCHEME = "kubernetes://"  # of a store
LONGEST_JOB_NAME = 40  # with what is added to it, it is the name of a pod, a host and a label: 63
_WELL_WHEN_TRUE = frozenset({"Ready"})
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


class Volume(msgspec.Struct, frozen=True):
    """A volume of all pods: a claim (PersistentVolumeClaim) or a folder of the host, absolute, and where it is seen."""

    source: str
    path: str

    @property
    def is_host_path(self) -> bool:
        """True if it is a folder of the host."""
        return self.source.startswith("/")


class Settings(msgspec.Struct, frozen=True):
    """A job's pods. `agent`, `controller`, `launcher`: parts of a Pod's manifest that are laid over midstep's own."""

    job: str
    image: str
    resources: dict[str, str] = {}  # of each agent: limits, which are its requests
    volumes: tuple[Volume, ...] = ()
    environment: dict[str, str] = {}  # of the agents, and so of the ranks
    agent: dict[str, Any] = {}
    controller: dict[str, Any] = {}
    launcher: dict[str, Any] = {}  # of a job of roles
    pod_group: dict[str, Any] | None = None  # a part of a PodGroup's manifest; None: pods are placed one by one
    port: int = PORT
    watch_nodes: bool = False  # cordons, taints and conditions; takes a ClusterRole
    node_conditions: tuple[str, ...] = ()  # those that are a reason to leave a host while they are True
    controllers: int = 1  # pods, of which one leads. Several take a store
    store: str = ""  # what keeps the job: an etcd, or a folder with a Lease; else the journal of one controller
    config_maps: tuple[str, ...] = ()  # namespaces whose ConfigMaps tell of faults; takes a Role in each
    group: str = ""  # the job of roles of which this is one: its account is used
    has_roles: bool = False  # it is such a job: its pod makes the objects of the roles' jobs

    @property
    def has_lease(self) -> bool:
        """True if its controllers are elected by a Lease of its own."""
        return self.store.startswith(LEASE_SCHEME)


def checked_job(name: str) -> str:
    """Return the name of a job, if objects in Kubernetes can be named after it. Raises ConfigurationError."""
    if len(name) > LONGEST_JOB_NAME or _NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"--job {name[:80]!r} cannot name pods: up to {LONGEST_JOB_NAME} small letters, digits and dashes, with a "
            "letter or digit first and last."
        )
    return name


def checked_controllers(controllers: int, store: str, volumes: tuple[Volume, ...]) -> int:
    """Return how many controllers there are, if all can reach the journal. Raises ConfigurationError."""
    if controllers > 1 and not store and not volumes:
        raise ConfigurationError(
            f"--controllers {controllers} needs --volume CLAIM:/PATH, a claim that pods on all hosts can write "
            "(ReadWriteMany) and in which they keep the job, or --store etcd://HOST:PORT."
        )
    return controllers


def checked_condition(kind: str) -> str:
    """Return the type of a condition that can be a reason to leave a host. Raises ConfigurationError."""
    if kind in _WELL_WHEN_TRUE:
        raise ConfigurationError(
            f"--node-condition {kind} is True of every host that is well. Name one that says what is wrong, as "
            "node-problem-detector's KernelDeadlock or ReadonlyFilesystem."
        )
    return kind


def parse_volume(text: str) -> Volume:
    """Return the volume of CLAIM:PATH or /HOST/FOLDER:PATH. Raises ConfigurationError."""
    source, colon, path = text.rpartition(":")
    if not colon or not source or not path.startswith("/"):
        raise ConfigurationError(
            f"--volume {text!r}: write CLAIM:/PATH for a PersistentVolumeClaim, /FOLDER:/PATH for one of the hosts."
        )
    return Volume(source, path)


def parse_resource(text: str) -> tuple[str, str]:
    """Return name and quantity of NAME=QUANTITY. Raises ConfigurationError."""
    name, equals, quantity = text.partition("=")
    if not equals or not name or not quantity:
        raise ConfigurationError(f"--resource {text!r}: write NAME=QUANTITY, as huawei.com/Ascend910=8.")
    return name, quantity


def encode(settings: Settings) -> str:
    """Return the settings as the text of a file."""
    return msgspec.json.format(msgspec.json.encode(settings)).decode()


def read_settings(path: Path) -> Settings:
    """Return the settings of a file. Raises ConfigurationError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} does not say what the job's pods are like: {error}.") from error
