"""`midstep.role()`: which role of a job this process has, and the store that all roles share.

Roles are jobs of their own and have no collectives together. What they hand to each other they leave in the store,
which is in the launcher of the whole job and outlives every training process. Its values are signed: a process outside
the job can disturb, and cannot speak for a role.
"""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from ..communicators.handshake import Authenticator
from ..communicators.key_value_store import KeyValueClient, StoreFull, StoreTimeout
from ..protocol import environment as env
from ..protocol.discovery import read_role_store
from ..protocol.errors import Interrupted, MidstepError, NotUnderMidstep, RoleStoreError
from .runtime import Runtime
from .session import SessionStage

WAIT_S = 600.0
_SLICE_S = 0.1  # orders of this role's own controller are looked for between two waits
_CONNECT_S = 5.0
_PAUSE_S = 0.2

_Answer = TypeVar("_Answer")


class RoleStore:
    """The key-value store of a job of roles. What was set survives the loss of any process, and `midstep resume`.

    On Ray and Kubernetes it does not survive its launcher, see docs/roles.md. A connection that breaks is made again.
    All roles see the same keys. When all roles are restarted together the store is empty again. For all threads of a
    process.
    """

    def __init__(self, file: Path, attempt: int) -> None:
        """Not for scripts: `midstep.role().store`. `file`: says where the store is."""
        self._file = file
        self._attempt = attempt
        self._lock = threading.Lock()
        self._client: KeyValueClient | None = None
        self._authenticator: Authenticator | None = None

    def set(self, key: str, value: bytes, timeout_s: float = WAIT_S) -> None:
        """Set the value of a key, in the place of an earlier one.

        Raises:
            RoleStoreError: The store was not reached within `timeout_s`, or is full.
        """

        def store(client: KeyValueClient, seal: Authenticator, left_s: float) -> None:
            client.set(seal.hashed_key(key), seal.sign(key, value))

        self._ask(key, store, timeout_s)

    def get(self, key: str, timeout_s: float = WAIT_S) -> bytes:
        """Wait for a key, and return its value.

        While it waits, a recovery of the own role interrupts it like a collective. Around a wait that may rightly take
        long put `with state.paused():`, so that it is no stall.

        Raises:
            RoleStoreError: Nothing has come within `timeout_s`, or what is there was not written by a role.
        """

        def fetch(client: KeyValueClient, seal: Authenticator, left_s: float) -> bytes | None:
            hashed = seal.hashed_key(key)
            try:
                client.wait([hashed], timedelta(seconds=min(_SLICE_S, left_s)))
            except StoreTimeout:
                return None
            return client.get(hashed)

        deadline = time.monotonic() + timeout_s
        while (signed := self._ask(key, fetch, deadline - time.monotonic())) is None:
            if time.monotonic() >= deadline:
                raise RoleStoreError(
                    f"no role has set {key!r} within {timeout_s:g} s. See `midstep status` for the other roles."
                )
        assert self._authenticator is not None
        value = self._authenticator.verify(key, signed)
        if value is None:
            raise RoleStoreError(f"what lies as {key!r} in the store of the roles was not written by one of them.")
        return value

    def has(self, key: str) -> bool:
        """Return whether a key has a value. Raises RoleStoreError."""
        return self._ask(key, lambda client, seal, left_s: client.check([seal.hashed_key(key)]), WAIT_S)

    def delete(self, key: str) -> bool:
        """Delete a key, and return whether it was there. Raises RoleStoreError."""
        return self._ask(key, lambda client, seal, left_s: client.delete_key(seal.hashed_key(key)), WAIT_S)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _ask(
        self, key: str, ask: Callable[[KeyValueClient, Authenticator, float], _Answer], timeout_s: float
    ) -> _Answer:
        """Ask until there is an answer; each question can be asked twice. Raises RoleStoreError, Interrupted."""
        deadline = time.monotonic() + timeout_s
        while True:
            if _ordered_to_stop():
                raise Interrupted
            try:
                with self._lock:
                    client, seal = self._connected()
                    return ask(client, seal, max(0.0, deadline - time.monotonic()))
            except StoreFull as error:
                raise RoleStoreError(f"{key!r}: the store of the roles is full. Delete what was read.") from error
            except (OSError, EOFError, ValueError, msgspec.MsgspecError, MidstepError) as error:
                self._client = None
                if time.monotonic() >= deadline:
                    raise RoleStoreError(
                        f"{key!r}: the store of the roles is not reached: {error}. It is with the launcher of the "
                        "whole job: `midstep run`, or its pod."
                    ) from error
                time.sleep(_PAUSE_S)

    def _connected(self) -> tuple[KeyValueClient, Authenticator]:
        if self._client is None or self._authenticator is None:
            place = read_role_store(self._file)
            self._authenticator = Authenticator(place, self._attempt)
            self._client = KeyValueClient(place.host, place.port, timeout=timedelta(seconds=_CONNECT_S))
        return self._client, self._authenticator


class OwnRole:
    """The role of this process, in a job of roles (`midstep run --roles`).

    Attributes:
        name: The name of the role, as in the file.
        sizes: How many ranks each role has, by name. RANK and WORLD_SIZE are those of the own role.
        attempt: How often all roles have been started together, with this time.
        store: What the roles share.
    """

    def __init__(self, name: str, sizes: dict[str, int], attempt: int, store: RoleStore) -> None:
        self.name = name
        self.sizes = sizes
        self.attempt = attempt
        self.store = store


@cache
def role() -> OwnRole:
    """Return the role of this process.

    Raises:
        NotUnderMidstep: It was not started by `midstep run --roles`.
    """
    try:
        name, sizes = os.environ[env.ROLE], msgspec.json.decode(os.environ[env.ROLES], type=dict[str, int])
        attempt, file = int(os.environ[env.ROLE_ATTEMPT]), Path(os.environ[env.ROLE_STORE])
    except KeyError as error:
        raise NotUnderMidstep(
            f"midstep.role() was called, and {error.args[0]} is not set: this process is of no job of roles. Start it "
            "with `midstep run --roles FILE`, see docs/roles.md."
        ) from error
    return OwnRole(name, sizes, attempt, RoleStore(file, attempt))


def _ordered_to_stop() -> bool:
    """Say whether this is the train thread, in its train function, and the controller of the own role wants it out."""
    runtime = Runtime.running()
    if runtime is None or threading.current_thread() is not threading.main_thread():
        return False
    return runtime.session.stage is SessionStage.TRAINING and runtime.interrupted()
