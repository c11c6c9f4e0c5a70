"""Which devices of a machine the ranks of a node compute on, by the numbers that the machine has for them.

Documents of detectors speak of a machine's devices; a rank takes the one of its local rank, of those that it can see.
"""

from collections.abc import Mapping

CONTAINER = "ASCEND_VISIBLE_DEVICES"  # what the container runtime has put in: numbers of the machine
PROCESS = "ASCEND_RT_VISIBLE_DEVICES"  # what CANN shows of those that are there
MOST = 4096


def visible_devices(environment: Mapping[str, str]) -> tuple[int, ...]:
    """Return the machine's number of each device, in the order of local ranks; empty: 0, 1, ...

    In a container that has devices 4 to 7 of its machine, CANN numbers them 0 to 3, and PROCESS chooses among these.
    What is not a list of numbers is passed over: CANN will say so.
    """
    given, chosen = _numbers(environment.get(CONTAINER, "")), _numbers(environment.get(PROCESS, ""))
    if not given or not chosen:
        return chosen or given
    if max(chosen) < len(given):
        return tuple(given[place] for place in chosen)
    return chosen  # more than the container has: they are the machine's numbers already


def _numbers(text: str) -> tuple[int, ...]:
    """Return `0,2`, `4-7` or `Ascend910-4,Ascend910-5` as numbers; empty if it is nothing of the kind."""
    found: list[int] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        first, dash, last = part.rpartition("-")
        low = first if first.isdigit() else last  # a range, or a name
        if dash and not first:
            return ()
        if not (low.isascii() and low.isdigit() and last.isascii() and last.isdigit()):
            return ()
        if int(last) >= MOST or int(low) > int(last):
            return ()
        found += range(int(low), int(last) + 1)
    return tuple(dict.fromkeys(found))
