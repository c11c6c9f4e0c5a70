"""From a token to an agent: the node asks for admission, and gets its name, its session and its keys."""

import os
import re
import socket
from pathlib import Path

import msgspec

from ...agent.main import AgentOptions
from ...protocol.controller_addresses import split
from ...protocol.enrolment import LONGEST_NODE_NAME, EnrolmentRequested
from ...protocol.joining import ask_for_admission
from ...protocol.key_pairs import random_pair
from ...protocol.keys import JobKeys
from ...protocol.private_files import make_private_directory
from ...protocol.token import Invitation
from ...protocol.types import node_address
from .own_addresses import address_towards

KEYS_NAME = "keys"
JOIN_S = 600.0  # torchrun's join_timeout


class Wishes(msgspec.Struct, frozen=True):
    """What a node would like to be. Empty: found out by itself."""

    node: str = ""
    failure_domain: str = ""
    host: str = ""


def admitted(
    endpoints: tuple[str, ...],
    invitation: Invitation,
    wishes: Wishes,
    run_directory: Path,
    *,
    limit_s: float = JOIN_S,
    life_fd: int | None = None,
) -> AgentOptions:
    """Ask for admission until there is an answer, and return what the agent is started with. Blocks.

    Raises NotAdmitted or ConfigurationError.
    """
    pair = random_pair()
    domain = wishes.failure_domain or host_name()
    request = EnrolmentRequested(wishes.node or host_name(), bool(wishes.node), pair.public, domain)
    launcher = os.getppid()
    admission = ask_for_admission(
        endpoints,
        invitation,
        request,
        limit_s=limit_s,
        wanted=lambda: life_fd is None or os.getppid() == launcher,
    )
    name = admission.enrolled.node
    make_private_directory(run_directory / KEYS_NAME)
    JobKeys.save_client(run_directory / KEYS_NAME, node_address(name), pair, invitation.server_public)
    return AgentOptions(
        job=invitation.job,
        node=name,
        controller=admission.endpoint,
        keys=str(run_directory / KEYS_NAME),
        run_directory=str(run_directory),
        failure_domain=admission.enrolled.failure_domain,
        host=wishes.host or address_towards(*split(admission.endpoint)),
        life_fd=life_fd,
        session=admission.enrolled.session,
        endpoints=endpoints,
    )


def host_name() -> str:
    """Return this machine's name, as it can be that of a node."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0]).strip("-_")
    return name[:LONGEST_NODE_NAME] or "node"
