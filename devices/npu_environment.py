"""Check that the environment of a process allows its NPU to be recovered. Pure.

torch-npu's defaults are made for jobs that end at the first error: its watchdog ends the process. The message of each
rule gives its reason.
"""

from collections.abc import Mapping

from .kinds import NPU_WATCHDOG as WATCHDOG

DESYNC_DEBUG = ("TORCH_HCCL_DESYNC_DEBUG", "HCCL_DESYNC_DEBUG")
CONNECT_TIMEOUT = "HCCL_CONNECT_TIMEOUT"
NO_CACHING = "PYTORCH_NO_NPU_MEMORY_CACHING"
CONNECT_DEFAULT_S, CONNECT_LEAST_S, CONNECT_MOST_S = 120, 120, 7200


def problems(environment: Mapping[str, str], link_up_s: float, allocator: str) -> list[str]:
    """Return the problems, a sentence each with what to do about it; empty if there are none.

    `link_up_s` is the policy's time for one attempt to build the communicators, `allocator` the memory allocator that
    torch-npu reports.
    """
    found = []
    for name in WATCHDOG:
        value = environment.get(name)
        if value is not None and value != "0":
            found.append(
                f"{name}={value}: torch-npu's watchdog would end this process at the first failed collective, before "
                "it can be recovered. Set it to 0"
            )
    if not any(name in environment for name in WATCHDOG):
        found.append(f"{WATCHDOG[-1]} is not set: torch-npu's watchdog is on then. Set {' and '.join(WATCHDOG)} to 0")
    found += [
        f"{name}={environment[name]}: it switches torch-npu's watchdog on again, whatever {WATCHDOG[0]} says. Unset it"
        for name in DESYNC_DEBUG
        if environment.get(name, "0") not in {"", "0"}
    ]
    found += _connect_problems(environment.get(CONNECT_TIMEOUT), link_up_s)
    if environment.get(NO_CACHING, "0") not in {"", "0"}:
        found.append(
            f"{NO_CACHING}={environment[NO_CACHING]}: without the caching allocator check_uce_in_memory cannot tell "
            "which memory was damaged, and every memory error would cost the process. Unset it"
        )
    if allocator != "native":
        found.append(
            f"the memory allocator is {allocator}: only torch-npu's own can tell which memory was damaged. Do not "
            "change the allocator (torch_npu.npu.memory.change_current_allocator, PYTORCH_NPU_ALLOC_CONF)"
        )
    return found


def _connect_problems(value: str | None, link_up_s: float) -> list[str]:
    if value is None:
        limit_s = CONNECT_DEFAULT_S
    elif value.isdigit() and CONNECT_LEAST_S <= int(value) <= CONNECT_MOST_S:
        limit_s = int(value)
    else:
        return [
            f"{CONNECT_TIMEOUT}={value}: not a whole number of seconds from {CONNECT_LEAST_S} to {CONNECT_MOST_S}. "
            f"Unset it for {CONNECT_DEFAULT_S}"
        ]
    if link_up_s > limit_s:
        return [
            f"communicator.link_up_s of the policy is {link_up_s:g}, and HCCL ends a link-up after {limit_s} s "
            f"({CONNECT_TIMEOUT}). Raise {CONNECT_TIMEOUT}, or lower link_up_s"
        ]
    return []
