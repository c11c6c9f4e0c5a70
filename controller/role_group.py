"""The roles of a job together: which is started, which is stopped, and when the whole ends. Pure.

Each role with a script of its own is a job of its own, with a world, a controller and a ladder; what one of its ranks
needs is decided there, while the other roles train. Here is only what concerns all roles: one that fails may take the
others along, the job ends when the roles that have to finish have finished, and a launcher of a role that dies is
started again.
"""

import msgspec

from ..policies.schema import Budget
from ..protocol.compat import StrEnum

EXIT_FAILED, EXIT_STOPPED = 1, 130
MAX_DEATHS = 5  # of a role's launcher in a row; then something is wrong with the role, or the machine
STABLE_S = 30.0  # a launcher that has lived for so long begins a new row
MAX_RESTARTS_KEPT = 1000
_MAX_REASON = 1000


class RoleState(StrEnum):
    """The state of a role's job, as far as the others are concerned."""

    RUNNING = "running"
    STOPPING = "stopping"  # it has been asked to end
    ENDED = "ended"


class GroupPhase(StrEnum):
    """The phase of the job of roles."""

    RUNNING = "running"
    RESTARTING = "restarting"  # all roles end, and start again from their checkpoints
    ENDING = "ending"
    ENDED = "ended"


class RoleStanding(msgspec.Struct, frozen=True):
    """One role. `attempt`: how often all roles have been started, with this one. `deaths`: of its launcher in a row."""

    role: str
    attempt: int = 1
    state: RoleState = RoleState.RUNNING
    exit_code: int | None = None
    reason: str = ""
    deaths: int = 0

    @property
    def finished(self) -> bool:
        """Return whether all its ranks have come to their end."""
        return self.state is RoleState.ENDED and self.exit_code == 0


class GroupRestart(msgspec.Struct, frozen=True):
    """All roles were restarted: when (wall-clock seconds), for which role, and why."""

    at_s: float
    role: str
    reason: str


class RoleGroup(msgspec.Struct, frozen=True):
    """All that is known of a job of roles. It is written before anything that follows from it is done."""

    standings: tuple[RoleStanding, ...]
    phase: GroupPhase = GroupPhase.RUNNING
    exit_code: int | None = None
    reason: str = ""
    restarts: tuple[GroupRestart, ...] = ()

    def of(self, role: str) -> RoleStanding:
        """Return how a role stands."""
        return next(standing for standing in self.standings if standing.role == role)


class GroupRules(msgspec.Struct, frozen=True):
    """The rules of the file. `until`: the roles that have to finish.

    `failover`: the roles that have all restarted when they fail, and how often each may (per_job, window_s).
    `restarts`: how often all roles may be restarted, for all of them together; None: never.
    """

    roles: tuple[str, ...]
    failover: dict[str, Budget]
    until: frozenset[str]
    restarts: Budget | None


class RoleEnded(msgspec.Struct, frozen=True):
    """The job of a role has ended, and has said how."""

    role: str
    attempt: int
    exit_code: int
    reason: str


class RoleLauncherLost(msgspec.Struct, frozen=True):
    """The launcher of a role has ended, and its job has not: the processes of the role have ended with it."""

    role: str
    attempt: int
    how: str
    lived_s: float


class GroupStopAsked(msgspec.Struct, frozen=True):
    """An operator wants all roles to be stopped."""

    reason: str


GroupEvent = RoleEnded | RoleLauncherLost | GroupStopAsked


class StartRole(msgspec.Struct, frozen=True):
    """Start the launcher of a role, or start it again: a job that has begun in this attempt continues."""

    role: str
    attempt: int


class StopRole(msgspec.Struct, frozen=True):
    """Ask a role to end, with a checkpoint where that is possible."""

    role: str
    attempt: int


class EndGroup(msgspec.Struct, frozen=True):
    """All roles have ended, and so has the job."""

    exit_code: int
    reason: str


GroupAction = StartRole | StopRole | EndGroup
Turn = tuple[RoleGroup, tuple[GroupAction, ...]]


def begin(rules: GroupRules) -> Turn:
    """Return a new job of roles, and what is to be done at its start."""
    group = RoleGroup(tuple(RoleStanding(role) for role in rules.roles))
    return group, _starts(group)


def reopen(group: RoleGroup, rules: GroupRules, *, roles_live: bool) -> Turn:
    """Return a job of roles whose launcher was lost, and with it the store that the roles share.

    `roles_live`: an engine keeps the processes of the roles alive; else all of them were lost, too. Those that live
    have worked with what lay in the store, so all begin again, each from a checkpoint of its last committed step. It
    costs no budget, as no role has failed.
    """
    if group.phase is GroupPhase.ENDED:
        return group, ()
    if roles_live:
        return _begun_again(group, rules)
    if group.phase is GroupPhase.RUNNING:
        return group, _starts(group)
    ended = [_ended(standing, None, "it ended with its launcher") for standing in group.standings]
    return _settled(msgspec.structs.replace(group, standings=tuple(ended)), rules)


def handle(group: RoleGroup, rules: GroupRules, event: GroupEvent, now_s: float) -> Turn:
    """Return what follows from an event. One of an earlier attempt, or of a role that has ended, changes nothing.

    Args:
        group: What was known.
        rules: What the job's file says.
        event: What has happened.
        now_s: Wall-clock seconds, by which the budget of restarts is counted.

    Returns:
        What is known now, which has to be made durable first, and what is to be done, in order.
    """
    if isinstance(event, GroupStopAsked):
        return _ending(group, rules, EXIT_STOPPED, event.reason)
    standing = group.of(event.role)
    if standing.attempt != event.attempt or standing.state is RoleState.ENDED:
        return group, ()
    if isinstance(event, RoleEnded):
        return _role_ended(group, rules, standing, event, now_s)
    return _launcher_lost(group, rules, standing, event, now_s)


def used(group: RoleGroup, budget: Budget, now_s: float, role: str | None = None) -> int:
    """Return how many restarts of all roles count against the budget: that of one role, or (None) the job's."""
    since_s = now_s - budget.window_s if budget.window_s > 0 else float("-inf")
    return sum(restart.at_s > since_s and role in {None, restart.role} for restart in group.restarts)


# --- inside -------------------------------------------------------------------------------------------------------


def _role_ended(group: RoleGroup, rules: GroupRules, standing: RoleStanding, event: RoleEnded, now_s: float) -> Turn:
    reason = event.reason[:_MAX_REASON]
    group = _with(group, _ended(standing, event.exit_code, reason))
    if group.phase is GroupPhase.RESTARTING and all(group.of(role).finished for role in rules.until):
        return _role_finished(group, rules)  # the last of them had finished before it could be stopped
    if group.phase is not GroupPhase.RUNNING:
        return _settled(group, rules)
    if event.exit_code == 0:
        return _role_finished(group, rules)
    if event.exit_code == EXIT_STOPPED:
        return _ending(group, rules, EXIT_STOPPED, f"role {event.role} was stopped: {reason}")
    return _failed(group, rules, event.role, reason, now_s)


def _launcher_lost(
    group: RoleGroup, rules: GroupRules, standing: RoleStanding, event: RoleLauncherLost, now_s: float
) -> Turn:
    how = event.how[:_MAX_REASON]
    if group.phase is not GroupPhase.RUNNING:  # it was about to end
        return _settled(_with(group, _ended(standing, None, how)), rules)
    deaths = 1 if event.lived_s >= STABLE_S else standing.deaths + 1
    if deaths >= MAX_DEATHS:
        group = _with(group, _ended(standing, None, how))
        return _failed(group, rules, event.role, f"its launcher {how}, {deaths} times in a row", now_s)
    again = msgspec.structs.replace(standing, deaths=deaths)
    return _with(group, again), (StartRole(event.role, event.attempt),)


def _role_finished(group: RoleGroup, rules: GroupRules) -> Turn:
    if not all(group.of(role).finished for role in rules.until):
        return group, ()
    names = ", ".join(sorted(rules.until, key=rules.roles.index))
    every = "all roles have finished" if len(rules.until) == len(rules.roles) else f"finished: {names}"
    return _ending(group, rules, 0, every)


def _failed(group: RoleGroup, rules: GroupRules, role: str, reason: str, now_s: float) -> Turn:
    """A role has failed for good: all roles begin again, or the job ends."""
    if role not in rules.failover:
        return _ending(group, rules, EXIT_FAILED, f"role {role} failed, by its own ladder: {reason}")
    refused = _refused(group, rules, role, now_s)
    if refused:
        return _ending(
            group, rules, EXIT_FAILED, f"role {role} failed: {reason}; all roles are not restarted: {refused}"
        )
    restarts = (*group.restarts, GroupRestart(now_s, role, reason))[-MAX_RESTARTS_KEPT:]
    group = msgspec.structs.replace(group, phase=GroupPhase.RESTARTING, restarts=restarts)
    return _stopped(group, rules)


def _refused(group: RoleGroup, rules: GroupRules, role: str, now_s: float) -> str:
    """Say why a role may not have all roles restarted; empty where it may."""
    if rules.restarts is None:
        return "reschedule_job is not on the job's ladder"
    for budget, owner in ((rules.failover[role], role), (rules.restarts, None)):
        if budget.per_job is not None and used(group, budget, now_s, owner) >= budget.per_job:
            within = f"within {budget.window_s:g} s" if budget.window_s > 0 else "in the whole job"
            whose = "the job's" if owner is None else f"role {owner}'s"
            return f"{whose} budget per_job of reschedule_job is spent: {budget.per_job} of {budget.per_job} {within}"
    return ""


def _ending(group: RoleGroup, rules: GroupRules, exit_code: int, reason: str) -> Turn:
    """Begin to end the job. The first reason stays, and a stop takes the place of a restart."""
    if group.phase in {GroupPhase.ENDING, GroupPhase.ENDED}:
        return group, ()
    group = msgspec.structs.replace(group, phase=GroupPhase.ENDING, exit_code=exit_code, reason=reason)
    return _stopped(group, rules)


def _stopped(group: RoleGroup, rules: GroupRules) -> Turn:
    """Ask all roles that run to end; go on at once where none does."""
    running = [standing for standing in group.standings if standing.state is RoleState.RUNNING]
    for standing in running:
        group = _with(group, msgspec.structs.replace(standing, state=RoleState.STOPPING))
    group, actions = _settled(group, rules)
    return group, (*(StopRole(standing.role, standing.attempt) for standing in running), *actions)


def _begun_again(group: RoleGroup, rules: GroupRules) -> Turn:
    """Follow the roles that live, and ask them to end: to begin again, unless the job was about to end."""
    if group.phase is GroupPhase.RUNNING:
        group = msgspec.structs.replace(group, phase=GroupPhase.RESTARTING)
    alive = [standing for standing in group.standings if standing.state is not RoleState.ENDED]
    for standing in alive:
        group = _with(group, msgspec.structs.replace(standing, state=RoleState.STOPPING))
    group, actions = _settled(group, rules)
    followed = [StartRole(standing.role, standing.attempt) for standing in alive]
    stopped = [StopRole(standing.role, standing.attempt) for standing in alive]
    return group, (*followed, *stopped, *actions)


def _settled(group: RoleGroup, rules: GroupRules) -> Turn:
    """Do what was waited for, if all roles have ended: start them all again, or end the job."""
    if any(standing.state is not RoleState.ENDED for standing in group.standings):
        return group, ()
    if group.phase is GroupPhase.RESTARTING:
        again = [RoleStanding(standing.role, standing.attempt + 1) for standing in group.standings]
        group = msgspec.structs.replace(group, standings=tuple(again), phase=GroupPhase.RUNNING)
        return group, _starts(group)
    assert group.exit_code is not None, "the job ends for a reason"
    group = msgspec.structs.replace(group, phase=GroupPhase.ENDED)
    return group, (EndGroup(group.exit_code or 0, group.reason),)


def _starts(group: RoleGroup) -> tuple[StartRole, ...]:
    return tuple(
        StartRole(standing.role, standing.attempt)
        for standing in group.standings
        if standing.state is RoleState.RUNNING
    )


def _ended(standing: RoleStanding, exit_code: int | None, reason: str) -> RoleStanding:
    """Return a role that has ended; what one that ended before has said stays."""
    if standing.state is RoleState.ENDED:
        return standing
    return msgspec.structs.replace(standing, state=RoleState.ENDED, exit_code=exit_code, reason=reason)


def _with(group: RoleGroup, standing: RoleStanding) -> RoleGroup:
    standings = tuple(standing if each.role == standing.role else each for each in group.standings)
    return msgspec.structs.replace(group, standings=standings)
