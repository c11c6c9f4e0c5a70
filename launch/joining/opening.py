"""Opens a job to machines that join by themselves."""

import time
from pathlib import Path

from ...protocol.errors import ConfigurationError
from ...protocol.keys import JobKeys, JoiningTerms
from ...protocol.operators import Role, family_of
from ...protocol.token import FullToken, Token, expiry_text
from ...protocol.types import DETECTOR_PREFIX, PLATFORM
from .own_addresses import is_loopback

_TCP = "tcp://"
_ANY = "*"


def let_nodes_join(keys: Path, token: FullToken, job: str) -> None:
    """Give the controller the keys that follow from the token, and admit those who ask with it, operators too.

    A job continues when its token has expired; no more nodes join, and no operators connect. A renewed token may be
    given at any time, to a controller that runs, too. Raises ConfigurationError when the job has been run with other
    keys.
    """
    pair = token.controller_keys(job)
    JobKeys.create(keys, [], server=pair)
    if JobKeys.load_server(keys).public != pair.public:
        raise ConfigurationError(
            f"{keys} holds keys of another token: give this controller the token that it had, or one that "
            "`midstep token --renew` has made of that."
        )
    families = {family_of(role): token.operator_keys(job, role).public for role in Role}
    families[DETECTOR_PREFIX] = token.detector_keys(job).public
    JobKeys.admit(keys, PLATFORM, token.platform_keys(job).public)
    JobKeys.open_for_joining(keys, JoiningTerms(token.invitation(job).join.public, token.expires_s, families))


def required(token: Token | None) -> Token:
    """Refuse to work with other machines without a token. Raises ConfigurationError."""
    if token is None:
        raise ConfigurationError(
            "several machines need the job's token: `(umask 077; midstep token > job.token)` on one of them, and "
            "--token-file job.token, or its text in MIDSTEP_TOKEN, on all."
        )
    return token


def require_unexpired(token: FullToken) -> None:
    """Refuse to begin a job that no node could join. Raises ConfigurationError."""
    if token.expires_s and time.time() >= token.expires_s:
        raise ConfigurationError(
            f"the token expired at {expiry_text(token.expires_s)}: `midstep token` makes a new one."
        )


def require_loopback(listen: str) -> None:
    """Refuse to listen where other machines get to, without a token. Raises ConfigurationError."""
    host = listen.removeprefix(_TCP).rpartition(":")[0].removeprefix("[").removesuffix("]")
    if listen.startswith(_TCP) and (host == _ANY or not is_loopback(host)):
        raise ConfigurationError(
            f"--listen {listen}: other machines could connect. Give the job's token (--token-file, MIDSTEP_TOKEN), or "
            "listen at 127.0.0.1."
        )
