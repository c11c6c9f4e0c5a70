"""What was started is ended in its event loop, which alone can close its pipes."""

import asyncio
import gc
import sys
import threading
import time

import pytest

from midstep.protocol import own_programs
from midstep.protocol.own_programs import end

PATIENCE_S = 30.0
SLEEPS = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("program", [SLEEPS, DEAF, ""])
def test_a_process_that_is_ended_leaves_no_pipe_to_a_loop_that_is_closed(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is only killed the collector would close them at any later time, and fail."""
    met: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: met.append(unraisable.exc_value))

    async def scenario() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe)
        await end(process)

    asyncio.run(scenario())
    for thread in threading.enumerate():
        if thread.name.startswith("asyncio-waitpid"):  # it holds the process until that has been reaped
            thread.join(PATIENCE_S)
    gc.collect()
    assert met == []


def test_a_process_that_the_kernel_does_not_let_go_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        """Waits in a driver."""

        returncode = None
        killed = False

        def kill(self) -> None:
            self.killed = True

        async def wait(self) -> int:
            await asyncio.sleep(600)
            return 0

    monkeypatch.setattr(own_programs, "KILLED_S", 0.05)
    stuck, began_s = Stuck(), time.monotonic()
    asyncio.run(end(stuck))  # type: ignore[arg-type]
    assert stuck.killed
    assert time.monotonic() - began_s < PATIENCE_S
