"""Prepares what this machine brings to a job on several machines: an agent, and the controller if it runs here.

Of several processes on one machine that could run the controller, the one that claims the endpoint does. It follows the
file with the job's token, so that an operator replaces the token while the job runs: the file is written again, or is a
Secret that changes underneath. It is read each second, as what is mounted has no events that could be relied on.
"""

import contextlib
import logging
import os
import socket
import threading
from pathlib import Path
from types import TracebackType

import msgspec

from ..agent.main import OwnProgram, write_program
from ..protocol.discovery import endpoint
from ..protocol.errors import ConfigurationError
from ..protocol.private_files import make_private_directory
from ..protocol.run_directories import RunDirectory
from ..protocol.token import FullToken, Token, full, job_of, read_token, token_text
from ..protocol.transport import bound
from .directories import base_directory, checked_name, claim_free_run_directory
from .job import PreparedJob, Start, create_job, let_nodes_join, require_script, require_unexpired
from .meeting import RendezvousPoint, Wishes, host_name, is_own, listening_at, own_addresses

_PROGRAM = "program.json"
_MOST_DIRECTORIES = 1000
_GRACE_S = 30.0  # for the agent of a machine that does not know the job's own grace
_MARGIN_S = 10.0
_log = logging.getLogger(__name__)
TOKEN_LOOK_S = 1.0
_THREAD_S = 5.0


class EndpointClaim:
    """Holds an endpoint for this process, until `close` or its end, before anything listens there.

    The claim is a name in the kernel, as far as the endpoint is seen: machines and containers with an address of their
    own do not disturb each other.
    """

    def __init__(self, name: socket.socket) -> None:
        self._name = name

    @classmethod
    def take(cls, endpoint: str) -> "EndpointClaim | None":
        """Claim an endpoint; None when another process has claimed it, or listens there. Raises ConfigurationError."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0midstep {endpoint}")
        except OSError:
            name.close()
            return None
        try:
            with contextlib.closing(bound(endpoint)) as probe:
                probe.listen()
        except OSError:
            name.close()
            return None
        except ConfigurationError:
            name.close()
            raise
        return cls(name)

    def close(self) -> None:
        """Let another process have it. Idempotent."""
        self._name.close()


class JoiningMachine(msgspec.Struct, frozen=True):
    """A machine's part in a job. `job`: the one whose controller it runs; None: another machine does.

    `endpoint`: where this machine reaches the controller. `token`: what its agent joins with, as text. `program`: the
    file with its own command. `claim`: keeps other processes of this machine from being the controller's, too.
    `signals_all`: a signal to end this machine's part of the job is one to all machines.
    """

    name: str
    endpoint: str
    token: str
    held: RunDirectory
    directory: Path
    wishes: Wishes
    join_s: float
    program: Path
    grace_s: float
    job: PreparedJob | None = None
    claim: EndpointClaim | None = None
    signals_all: bool = False


def prepare(where: RendezvousPoint, token: Token, start: Start, wishes: Wishes) -> JoiningMachine:
    """Decide whether this machine runs the controller, and make what its part of the job needs. Nothing has run then.

    Raises ConfigurationError.
    """
    name = checked_name(job_of(token, where.job))
    listen = listening_at(where.host, where.port)
    claim = _claim(where, listen)
    job = None
    if claim is None:
        require_script(start)
        held = claim_free_run_directory(f"{name}.node")
        directory = start.job_directory or _own_directory(name)
    else:
        secret = full(token)
        require_unexpired(secret)
        job = create_job(msgspec.structs.replace(start, job=name, listen=listen, token=secret))
        held, directory = job.held, job.job_directory
        _warn_of_checkpoints(job)
        if wishes.proxies and not job.policy.controller.proxies:
            _log.warning("no node can speak through a proxy: the policy lets none in (`controller.proxies: true`)")
    try:
        make_private_directory(directory / "logs")
        write_program(held.path / _PROGRAM, _program(start))
    except (ConfigurationError, OSError) as error:
        held.remove()
        raise ConfigurationError(f"{directory} cannot be used: {error}") from error
    return JoiningMachine(
        name=name,
        endpoint=endpoint(where.host, where.port),
        token=token_text(token.for_joining(name) if isinstance(token, FullToken) else token),
        held=held,
        directory=directory,
        wishes=msgspec.structs.replace(wishes, host=where.local_addr),
        join_s=where.join_s,
        program=held.path / _PROGRAM,
        grace_s=_GRACE_S if job is None else job.spec.settings.stop_grace_s + _MARGIN_S,
        job=job,
        claim=claim,
        signals_all=where.signals_all,
    )


def _claim(where: RendezvousPoint, listen: str) -> EndpointClaim | None:
    """Return this machine's claim to run the controller; None if another process does."""
    hosts = is_own(where.host, own_addresses()) if where.hosts is None else where.hosts
    if not hosts:
        return None
    claim = EndpointClaim.take(listen)
    if claim is None and where.hosts:
        raise ConfigurationError(
            f"this machine is to run the controller, and another process listens at {listen} already: choose another "
            "port, or end that process."
        )
    return claim


def _warn_of_checkpoints(job: PreparedJob) -> None:
    if job.policy.checkpoint.directory is None:
        _log.warning(
            "checkpoints are written to %s on each machine: name a directory that all of them see, in the policy "
            "(checkpoint.directory), or a rank that moves finds none",
            job.spec.settings.checkpoint_directory,
        )


def _own_directory(job: str) -> Path:
    """Return a new directory for the logs of this machine's ranks."""
    stem = f"{job}@{host_name()}"
    for number in range(1, _MOST_DIRECTORIES):
        path = base_directory() / (stem if number == 1 else f"{stem}-{number}")
        try:
            make_private_directory(path.parent)
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be made: {error.strerror}. Choose another --job-dir.") from error
        return path
    raise ConfigurationError(f"{base_directory()} has {_MOST_DIRECTORIES} directories of {stem}: remove some.")


def _program(start: Start) -> OwnProgram:
    return OwnProgram(
        command=start.command,
        is_module=start.is_module,
        no_python=start.no_python,
        working_directory=os.getcwd(),
        environment=start.environment,
    )


class TokenWatch:
    """Gives the controller of a job the token that a file holds, whenever that has changed. Use it in a `with`.

    It has a thread of its own, which ends with it. Without a file there is nothing to follow.
    """

    def __init__(self, file: Path | None, token: Token, keys: Path, job: str) -> None:
        """`token`: the one that counts so far. `keys`: the job's, which the controller reads."""
        self._file = file
        self._token = token
        self._keys = keys
        self._job = job
        self._complaint = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="midstep-token", daemon=True)

    def __enter__(self) -> "TokenWatch":
        if self._file is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._file is not None:
            self._thread.join(_THREAD_S)

    def look(self) -> None:
        """Take the token that the file holds now."""
        try:
            token = self._read()
            if token == self._token:
                self._complaint = ""
                return
            let_nodes_join(self._keys, token, self._job)
        except (ConfigurationError, OSError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("the job keeps the token that it has: %s", error)
            return
        self._token, self._complaint = token, ""
        _log.warning("%s holds another token: nodes join and operators connect with that one only", self._file)

    def _read(self) -> FullToken:
        assert self._file is not None
        token = read_token(self._file, {})
        assert token is not None
        job_of(token, self._job)
        return full(token)

    def _run(self) -> None:
        while not self._ending.wait(TOKEN_LOOK_S):
            self.look()
