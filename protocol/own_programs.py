"""Start midstep's own programs without the code that lies in the current directory, and end what was started.

`python -m` puts the current directory at the front of the import path, where a `yaml.py` of the user would run with the
job's keys. Only the user's own script imports from its folder.
"""

import contextlib
import sys
from typing import TYPE_CHECKING

from .compat import within

if TYPE_CHECKING:
    import asyncio.subprocess

KILLED_S = 5.0

# Python 3.10 has no `-P`.
_BEFORE_3_11 = (
    "import sys; del sys.path[0]; name = sys.argv.pop(1); "
    "import runpy; runpy.run_module(name, run_name='__main__', alter_sys=True)"
)


def own_program(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of midstep, by its whole name; arguments follow it."""
    if sys.version_info >= (3, 11):
        return (sys.executable, "-P", "-m", module)
    return (sys.executable, "-c", _BEFORE_3_11, module)


async def end(process: "asyncio.subprocess.Process") -> None:
    """Kill a process that has not ended, and wait for that: its pipes can be closed in its event loop only.

    One that the kernel does not let go is left to it after KILLED_S.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            await within(KILLED_S, process.wait())
