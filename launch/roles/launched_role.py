"""What the launcher of a role is to do: one role, in one attempt."""

import msgspec

from ...policies.scripted_roles import PlannedRole
from ..jobs.start import Start

STOP = "--stop"  # of a role's launcher


class LaunchedRole(msgspec.Struct, frozen=True):
    """The job of a role in one attempt. `stop`: it may be alive without a launcher, and is only to be ended."""

    start: Start
    role: PlannedRole
    attempt: int
    quiet: bool
    stop: bool
