"""Check that CANN and the chip can do what torch-npu's calls stand for.

torch-npu looks for the functions of CANN by name when they are first used, and a missing one is a warning and counts as
done. So a recovery on an older CANN would go on with a device that was never stopped. `midstep doctor` looks first.
"""

import ctypes
import re
from collections.abc import Callable
from typing import NamedTuple

ASCENDCL, HCCL = "libascendcl.so", "libhccl.so"
# HCCL resumes communicators on these only: A2 (910B1 and on; 910B is of the first generation), A3 (910_93xx), 950.
_RESUMABLE = re.compile(r"Ascend(910B\d|910_93|950)")


class Symbol(NamedTuple):
    """A function of CANN; any one of `names` will do."""

    library: str
    names: tuple[str, ...]
    use: str


SYMBOLS = (
    Symbol(ASCENDCL, ("aclrtDeviceTaskAbort",), "abort what the device is executing"),
    Symbol(ASCENDCL, ("aclrtGetMemUceInfo",), "learn which memory an error has damaged"),
    Symbol(ASCENDCL, ("aclrtRepairError", "aclrtMemUceRepair"), "repair damaged memory"),
    Symbol(HCCL, ("HcclCommResume",), "use communicators again after a stop"),
)


def loaded(library: str, name: str) -> bool:
    """Return whether a shared library has a function. Raises OSError when it cannot be loaded."""
    return hasattr(ctypes.CDLL(library), name)


def missing(has: Callable[[str, str], bool] = loaded) -> list[str]:
    """Return what CANN lacks, a sentence each; empty if there is nothing. `has` looks into a library."""
    found = []
    for symbol in SYMBOLS:
        names = " and ".join(symbol.names)
        try:
            if not any(has(symbol.library, name) for name in symbol.names):
                found.append(
                    f"{symbol.library} of this CANN has no {names}, to {symbol.use}; torch-npu would only warn and go "
                    "on. Install a newer CANN"
                )
        except OSError as error:
            found.append(f"{symbol.library} cannot be loaded, so it is not known whether it has {names}: {error}")
    return found


def chip_problem(chip: str) -> str | None:
    """Return why communicators cannot be resumed on a chip (`torch_npu.npu.get_device_name()`); None if they can."""
    if _RESUMABLE.match(chip):
        return None
    return (
        f"HCCL resumes communicators on Ascend 910B1 and newer (A2, A3, 950); this is {chip}, so a step cannot be "
        "repeated without rebuilding them. Leave retry_step out of the ladder"
    )
