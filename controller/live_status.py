"""How a job stands, as its active controller knows it: the machine's view, with what is in no journal."""

import msgspec

from ..protocol.errors import JournalError
from ..protocol.incidents import JobStatus
from .endpoints.remote_operators import OperatorRequests
from .journal.store import JournalStore
from .liveness import Liveness, ProgressBoard
from .recovery.machine import Machine
from .switchover import Switchover
from .wire import Wire


class LiveStatus:
    """Adds to the machine's view the latest heartbeats, what was refused, and what stands in the way."""

    def __init__(
        self,
        machine: Machine,
        board: ProgressBoard,
        liveness: Liveness,
        *,
        wire: Wire,
        control: OperatorRequests,
        journal: JournalStore,
        switchover: Switchover,
    ) -> None:
        self._machine = machine
        self._board = board
        self._liveness = liveness
        self._wire = wire
        self._control = control
        self._term = journal.term
        self._switchover = switchover

    def at(self, now: float, error: JournalError | None) -> JobStatus:
        """Return the status. `error`: why the journal cannot be written, if so."""
        status = self._board.overlay(self._machine.status(now))
        controllers, paused_until_s = self._switchover.standing()
        return msgspec.structs.replace(
            status,
            refused={**status.refused, **self._wire.refused, **self._control.refused},
            reason=status.reason if error is None else f"the journal cannot be written: {error}",
            term=self._term,
            holding=self._liveness.holding(now),
            controllers=controllers,
            failover_paused_until_s=paused_until_s,
        )
