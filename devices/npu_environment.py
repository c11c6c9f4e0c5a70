"""Check that the environment of a process allows its NPU to be recovered. Pure.

torch-npu's defaults are made for jobs that end at the first error: its watchdog ends the process. The message of each
rule gives its reason.
"""

from collections.abc import Mapping

from ..protocol.errors import ConfigurationError
from .kinds import NPU_WATCHDOG as WATCHDOG

DESYNC_DEBUG = ("TORCH_HCCL_DESYNC_DEBUG", "HCCL_DESYNC_DEBUG")
CONNECT_TIMEOUT = "HCCL_CONNECT_TIMEOUT"
NO_CACHING = "PYTORCH_NO_NPU_MEMORY_CACHING"
CONNECT_DEFAULT_S, CONNECT_LEAST_S, CONNECT_MOST_S = 120, 120, 7200

BASE_PORT = "HCCL_IF_BASE_PORT"
# What must not be set, or must be 0, and why.
_REFUSED = {
    "RANK_TABLE_FILE": "torch-npu links groups by this table, which does not follow a rank to another device",
    "ROOTINFO_SUBCOMM_ENABLE": "torch-npu makes groups out of others then, and cannot resume those",
    "HCCL_ZERO_COPY": "torch-npu links groups otherwise then, and cannot resume those",
}


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
    found += [
        f"{name}={environment[name]}: {reason}. Unset it"
        for name, reason in _REFUSED.items()
        if environment.get(name, "0") not in {"", "0"}
    ]
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


def require_recoverable(environment: Mapping[str, str], link_up_s: float, allocator: str) -> None:
    """Raise ConfigurationError that lists every problem, if there is one."""
    wrong = problems(environment, link_up_s, allocator)
    if wrong:
        lines = "\n".join(f"  - {line}." for line in wrong)
        raise ConfigurationError(f"an NPU cannot be recovered in this environment:\n{lines}")


def doubts(environment: Mapping[str, str], link_up_s: float) -> list[str]:
    """Return what makes recoveries slow or fragile, and forbids none, a sentence each with what to do about it."""
    found = []
    value = environment.get(CONNECT_TIMEOUT, "")
    if value.isdigit() and int(value) > max(CONNECT_DEFAULT_S, 2 * link_up_s):
        found.append(
            f"{CONNECT_TIMEOUT}={value}: a link-up that loses a rank stays in HCCL for that long, and nothing ends it; "
            f"all ranks wait, or are replaced. Set it to {max(CONNECT_DEFAULT_S, round(link_up_s))}"
        )
    if environment.get(BASE_PORT):
        found.append(
            f"{BASE_PORT}={environment[BASE_PORT]}: a link-up that was given up still listens there, and the next one "
            "fails. Unset it, or give HCCL a range of ports (HCCL_HOST_SOCKET_PORT_RANGE)"
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
