"""The agent of a machine that joins a job, as a child of `midstep run`: it ends with that, in order if it can."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...platforms.processes import kill_tree, open_log
from ...protocol.agent_end import AgentEnd, read_agent_end
from ...protocol.time_limit import within
from ...protocol.token import TOKEN_VARIABLE

AGENT = (sys.executable, "-m", "midstep.cli.agent")
_KILLED_S = 5.0


class AgentProcess:
    """An agent that has been started."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: int, run_directory: Path) -> None:
        """Not for callers: `start`."""
        self._process = process
        self._pipe = pipe
        self._run_directory = run_directory

    @classmethod
    async def start(
        cls, arguments: Sequence[str], *, token: str, environment: dict[str, str], log: Path, run_directory: Path
    ) -> "AgentProcess":
        """Start an agent that writes to `log`. Raises OSError."""
        theirs, ours = os.pipe()
        try:
            with open(open_log(log), "ab", buffering=0) as output:
                process = await asyncio.create_subprocess_exec(
                    *(*AGENT, *arguments, "--run-dir", str(run_directory), "--life-fd", str(theirs)),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**environment, TOKEN_VARIABLE: token},
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, ours, run_directory)

    async def ended(self) -> AgentEnd:
        """Wait for its end, and return how it ended."""
        status = await self._process.wait()
        said = read_agent_end(self._run_directory)
        if said is not None and said.exit_code == status:
            return said
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return AgentEnd(1 if status < 0 else status, f"the agent of this machine ended with {how}")

    def leave(self) -> None:
        """Ask it to end what runs here, and to leave the job. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def close(self, grace_s: float) -> None:
        """End it: by the pipe, and after `grace_s` with everything below it. Idempotent."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        try:
            await within(grace_s, self._process.wait())
        except TimeoutError:
            kill_tree(self._process.pid)
            with contextlib.suppress(TimeoutError):
                await within(_KILLED_S, self._process.wait())
