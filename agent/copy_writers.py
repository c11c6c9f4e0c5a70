"""Has copies in host memory written to disk as checkpoints, each by a process of its own, which is not the rank's.

A rank marks its copy when it is to be a checkpoint. An idle process, which has torch, writes it then and answers: the
rank may have died by then, and a file system that hangs holds up nothing here. When all is said the copy is marked
again, and the rank may write another one into its file.
"""

import asyncio
import logging
from collections.abc import Iterable

from ..protocol.compat import within
from ..protocol.errors import AgentError
from ..protocol.host_copies import CopyHeader, Disk, note_disk, read_disk, read_header
from ..protocol.types import JobSpec
from . import channel
from .fork_server_host import receive
from .warm_pool import WarmPool

SPARE_S = 10.0  # a process that has not answered by then, after its own limit, is killed
_log = logging.getLogger(__name__)


class CopyWriters:
    """The processes of one node. Belongs to the running loop; at most one process writes for a rank."""

    def __init__(self, pool: WarmPool) -> None:
        self._pool = pool
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def look(self, job: JobSpec, rank: int, fds: Iterable[int]) -> None:
        """Begin to write the copy of a rank that is marked in one of its files; nothing while one is being written.

        Of two the older one comes first, on all ranks: a newer one that is complete would have its parts removed.
        """
        if not job.settings.checkpoint_asynchronous or rank in self._tasks:
            return
        headers = [(fd, header) for fd in fds if (header := read_header(fd)) is not None and header.rank == rank]
        wanted = [(fd, header) for fd, header in headers if read_disk(fd)[0] is Disk.WANTED]
        if wanted:
            fd, header = min(wanted, key=lambda each: each[1].step)
            self._tasks[rank] = task = asyncio.get_running_loop().create_task(self._write(job, fd, header))
            task.add_done_callback(lambda _: self._tasks.pop(rank, None))

    async def close(self, limit_s: float) -> None:
        """Wait for what is being written, and end what is not written within `limit_s`. Idempotent."""
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=limit_s)
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _write(self, job: JobSpec, fd: int, header: CopyHeader) -> None:
        directory, limit_s = job.settings.checkpoint_directory, job.settings.save_s
        assert directory is not None
        order = channel.WriteCheckpoint(job.job, directory, job.settings.checkpoint_keep, limit_s)
        error = "the agent ends"
        try:
            error = await within(limit_s + SPARE_S, self._written(order, fd))
        except TimeoutError:
            error = f"it was not written within {limit_s:g} s (deadlines.save_s)"
        except (AgentError, OSError) as found:
            error = str(found)
        finally:
            if read_header(fd) == header:
                note_disk(fd, Disk.OVER)
            if error:
                _log.error("no checkpoint of step %d from the copy of rank %d: %s", header.step, header.rank, error)

    async def _written(self, order: channel.WriteCheckpoint, fd: int) -> str:
        """Have it written; return what went wrong. Raises AgentError where there is no process for it, or it ends."""
        idle = await self._pool.take()
        end, theirs = channel.pair()
        try:
            process = idle.assign(order, (theirs.fileno(), fd), lambda _: None)
        except BaseException:
            end.close()
            raise
        finally:
            theirs.close()
        try:
            end.setblocking(False)
            received = await receive(end)
        finally:
            end.close()
            process.kill()
        if received is None or not isinstance(received[0], channel.CheckpointWritten):
            raise AgentError("the process that was writing it has ended")
        return received[0].error
