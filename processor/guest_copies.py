"""Copies in host memory on a second node: handed to a rank of another node, and kept there for it.

Each rank may have a keeper, a rank of another node (`RepairPart.copy_holder`), and a guest, whose keeper it is. The
keeper has two more memory files, for the guest's copies. They outlive its process, as its own do, and the guest's node.

A copy that is whole at home is sent by the thread that has made it, and counts as kept once the keeper has answered
that it is whole there, too. A thread of the keeper takes it in. Neither touches what the train thread works with. What
takes too long, or is refused, leaves the copies of that rank on its own node, which is said once, and tried again with
every so many copies: training waits for none of it.
"""

import logging
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..communicators.copy_links import LIMIT_S, CopyConnection, CopyLinks
from ..protocol.errors import CommunicatorAborted, HostCopyError, MidstepError, RecoveryError
from ..protocol.host_copies import SENT_BYTES, CopyFile, CopyHeader, SentCopy, guest_copies, unpack_sent
from ..protocol.types import GuestCopy, InjectionPoint
from .copy_cadence import file_to_write

if TYPE_CHECKING:
    from ..protocol.messages import Rejoin
    from .runtime import Runtime

STOP_S = 10.0  # for the thread that takes a copy in, when its links were cut: a checksum of what has come
SLOWEST_BYTES_S = 256 << 20  # at which a keeper finds the memory for a copy, and looks at its checksum
AGAIN = 100  # copies later it is tried again, where one could not be handed over
_MOST_REASON_BYTES = 500
_ANSWER = struct.Struct("<qH")  # the step, and how many bytes say why it is not kept; 0: it is
_log = logging.getLogger("midstep")


class GuestCopies:
    """The copies of another rank that are kept here. `steps` and `resumed` are for the train thread."""

    def __init__(self, runtime: "Runtime", fds: Sequence[int], check_room: Callable[[int], None]) -> None:
        """`fds`: the files for them; none: no copies are kept here. `check_room` raises HostCopyError."""
        self._runtime = runtime
        self._fds = fds
        self.files = [CopyFile(fd) for fd in fds]
        self._check_room = check_room
        self._taking: _Taking | None = None

    def kept(self) -> tuple[GuestCopy, ...]:
        """Return what is whole here for this world, for barrier one. Nothing is taken in from here on."""
        if self._taking is not None:
            self._taking.stop()
            self._taking = None
        return guest_copies(self._fds, self._runtime.rank, self._runtime.world_size)

    def file_of(self, rank: int, step: int) -> CopyFile:
        """Return the file with this copy. Raises HostCopyError."""
        for file in self.files:
            header = file.header
            if header is not None and (header.rank, header.step) == (rank, step):
                return file
        raise HostCopyError(f"rank {self._runtime.rank} keeps no whole copy of step {step} of rank {rank}")

    def forget_after(self, step: int) -> None:
        """Drop what is kept of later steps."""
        for file in self.files:
            if file.header is not None and file.header.step > step:
                file.drop()

    def resumed(self, common: int, guest: int | None, links: CopyLinks | None) -> None:
        """Keep what is of the step of which there is a copy of every rank; take in the copies of `guest` from here."""
        for file in self.files:
            if file.header is not None and file.header.step != common:
                file.drop()
        if guest is not None and links is not None and self.files:
            self._taking = _Taking(self._runtime, self.files, guest, links, self._check_room)


class _Taking:
    """The thread that takes in the copies of one rank, in one generation."""

    def __init__(
        self,
        runtime: "Runtime",
        files: Sequence[CopyFile],
        guest: int,
        links: CopyLinks,
        check_room: Callable[[int], None],
    ) -> None:
        self._runtime, self._files, self._guest = runtime, files, guest
        self._links, self._check_room = links, check_room
        self._lock = threading.Lock()
        self._stopped = False
        self._idle = threading.Event()  # no file is being written
        self._idle.set()
        threading.Thread(target=self._run, name="midstep-guest", daemon=True).start()

    def stop(self) -> None:
        """End it: no file is written from here on. Raises RecoveryError if it cannot be ended."""
        with self._lock:
            self._stopped = True
        self._links.cut()
        if not self._idle.wait(STOP_S):
            raise RecoveryError(
                f"rank {self._runtime.rank}: the thread that keeps copies of rank {self._guest} has not ended within "
                f"{STOP_S:g} s after its sockets were cut"
            )

    def _run(self) -> None:
        try:
            self._links.listen()
            while not self._stopped:
                connection = self._links.accept(self._guest)
                try:
                    while not self._stopped:
                        self._take(connection)
                except MidstepError as error:  # the guest may connect again
                    self._note(error)
                finally:
                    connection.close()
        except Exception as error:  # whatever it is, the guest finds that nobody answers
            self._note(error)

    def _note(self, error: Exception) -> None:
        if not isinstance(error, CommunicatorAborted):
            self._runtime.debug_log.note(f"copies of rank {self._guest} are not taken in", error)

    def _take(self, connection: CopyConnection) -> None:
        """Take in one copy, and answer. Raises what the connection raises."""
        header, checksum = unpack_sent(connection.receive(SENT_BYTES, limit_s=None))
        if (header.rank, header.world_size) != (self._guest, self._runtime.world_size):
            raise HostCopyError(f"rank {self._guest} sends a copy of rank {header.rank} of {header.world_size}")
        with self._lock:
            if self._stopped:
                return
            self._idle.clear()
        try:
            self._write(connection, header, checksum)
        except HostCopyError as error:
            said = str(error).encode()[:_MOST_REASON_BYTES]
            connection.send(_ANSWER.pack(header.step, len(said)) + said)
        finally:
            self._idle.set()

    def _write(self, connection: CopyConnection, header: CopyHeader, checksum: int) -> None:
        """Take in what follows. Raises HostCopyError if this rank cannot keep it, and what the connection raises."""
        steps = [0 if file.header is None else file.header.step for file in self._files]
        file = self._files[file_to_write(steps)]
        self._check_room(header.content_bytes)
        content = file.accept(header)
        connection.send(_ANSWER.pack(header.step, 0))
        connection.receive_into(content)
        self._runtime.injection_points.reached(InjectionPoint.GUEST_COPY, header.step - 1)
        file.finish(checksum)
        connection.send(_ANSWER.pack(header.step, 0))


class Keeper:
    """The way of this rank's copies to the rank that keeps them, in one generation."""

    def __init__(self, runtime: "Runtime", order: "Rejoin | None", *, wanted: bool, before: "Keeper | None") -> None:
        """`wanted`: the policy asks for copies on two nodes. `before`: that of the last generation, which is closed."""
        self.links: CopyLinks | None = None  # also for the copies of others
        self._rank = runtime.rank
        self._connection: CopyConnection | None = None
        self._keeper: int | None = None
        self._skipped = 0  # copies that are not handed over before the next try
        self._trouble = ""  # why they are not
        self._said = ""
        if before is not None:
            self._said = before._said
            if before.links is not None:
                before.links.close()
        if wanted and order is not None:
            self._keeper = order.part.copy_holder
            self.links = CopyLinks(runtime.rank, order.generation, order.store, runtime.settings.link_up_s)
            if self._keeper is None:
                self._trouble = "no rank of another node is free to keep them"

    def hand_over(self, copy: SentCopy) -> None:
        """Send a copy, and wait until it is whole at the keeper. In the thread that copies; raises nothing."""
        if self.links is None or self._keeper is None:
            return
        if self._skipped:
            self._skipped -= 1
            return
        try:
            if self._connection is None:
                self._connection = self.links.connect(self._keeper)
            reason = self._deliver(self._connection, copy)
        except CommunicatorAborted:
            return  # a recovery comes, and says who keeps them then
        except MidstepError as error:
            reason = str(error)
            if self._connection is not None:
                self._connection.close()
            self._connection = None
        self._trouble = f"rank {self._keeper} does not keep them: {reason}" if reason else ""
        self._skipped = AGAIN if reason else 0

    @staticmethod
    def _deliver(connection: CopyConnection, copy: SentCopy) -> str:
        """Return why the keeper refuses it; empty: it is whole there. Raises what the connection raises."""
        limit_s = LIMIT_S + len(copy.content) / SLOWEST_BYTES_S
        for part in (copy.packed(), copy.content):
            connection.send(part)
            step, length = _ANSWER.unpack(connection.receive(_ANSWER.size, limit_s=limit_s))
            if step != copy.header.step or length > _MOST_REASON_BYTES:
                raise HostCopyError(f"an answer about step {step} has come to the copy of step {copy.header.step}")
            if length:
                return connection.receive(length).decode(errors="replace")
        return ""

    def cut(self) -> None:
        """Have nothing handed over or taken in any more, before the state of this rank is reported."""
        if self.links is not None:
            self.links.cut()

    def say(self) -> None:
        """Log, once each, that the copies stay on one node, and that they do not any more. When all ranks are well."""
        if self._trouble and self._trouble != self._said:
            _log.warning("copies of rank %d are on its own node only: %s", self._rank, self._trouble)
        elif self._said and not self._trouble:
            _log.info("copies of rank %d are with rank %s again", self._rank, self._keeper)
        self._said = self._trouble
