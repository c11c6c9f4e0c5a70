"""Follows the file with a job's token, so that an operator replaces the token while the job runs.

The file is written again, or is a Secret that changes underneath. It is read each second: what is mounted has no
events that could be relied on. A token that cannot be taken changes nothing, and is said once.
"""

import logging
import threading
from pathlib import Path
from types import TracebackType

from ...protocol.errors import ConfigurationError
from ...protocol.secret_files import read_token
from ...protocol.token import FullToken, Token, full, job_of
from .opening import let_nodes_join

LOOK_S = 1.0
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


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
            self._thread.join(_JOIN_S)

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
        while not self._ending.wait(LOOK_S):
            self.look()
