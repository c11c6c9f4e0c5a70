"""Rules between several keys of a policy: its mistakes, and the settings that the job's processes go by.

`broken_rules` are errors: such a policy could not recover from anything, or would end each recovery by its
own deadlines. `advice` is what an operator may want to know before the job runs; it refuses nothing.
`job_settings` is the part of a policy that agents and processors follow.
"""

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ..devices.kinds import EXTERNAL, device_kind
from ..protocol.faults import OF_JOB, ExceptionPattern
from ..protocol.incidents import NoticeKind
from ..protocol.rules import MOST_LINE_RULES, MOST_RULES, OUT_OF_MEMORY, JobRule, OutOfMemoryAction
from ..protocol.types import FaultKind, IntegrityAction, JobSettings, RestoreSource, Rung, StandbyDepth
from .budgets import WORLD_RESTARTS, parse_ranks
from .fault_codes import DETECTABLE, CodeRule
from .reading import Problem
from .schema import (
    AgentPolicy,
    HostCopyPolicy,
    IntegrityPolicy,
    NodePolicy,
    Policy,
    RungPolicy,
    SlowAction,
    SubHealthAction,
)

_ORDER = tuple(Rung)
MOST_WEBHOOKS = 8
SPARE_MARGIN_S = 10.0  # beyond the time in which all nodes may be without ranks, since others are waited for
WEBHOOK_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
ROLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def broken_rules(policy: Policy) -> list[Problem]:
    """Return every rule that `policy` breaks, empty when it can be used."""
    problems = _ladder_problems(policy.ladder, "ladder")
    for name, role in policy.roles.items():
        if role.ladder is not None:
            problems += _ladder_problems(role.ladder, f"roles.{name}.ladder")
    problems += _role_problems(policy) + _restore_problems(policy) + _deadline_problems(policy)
    problems += _device_problems(policy) + _standby_problems(policy) + _scale_problems(policy)
    problems += exception_problems(policy.exceptions) + _hook_problems(
        policy.on_node_relaunch, brings=policy.node.relaunch_brings
    )
    problems += _job_rule_problems(policy.rules)
    return problems + _notify_problems(policy) + kind_problems(policy.faults.codes, "faults.codes")


def advice(policy: Policy) -> tuple[str, ...]:
    """Return what is allowed, and perhaps not meant."""
    notes = []
    restarts = [rung for rung in (Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB) if policy.rung(rung)]
    if restarts and policy.checkpoint.every_steps == 0:
        notes.append(f"checkpoint.every_steps is 0: after {' or '.join(restarts)} the job starts from its first step")
    if restarts and RestoreSource.CHECKPOINT not in policy.restore:
        notes.append(
            f"restore is without checkpoint: {' and '.join(restarts)} have nothing to start from, and stop the job "
            "where a checkpoint has been complete"
        )
    if policy.host_copy != HostCopyPolicy() and RestoreSource.HOST_COPY not in policy.restore:
        notes.append("host_copy is set, and restore is without host_copy: no copies are made in host memory")
    notes += _integrity_advice(policy)
    if policy.slow.then in {SlowAction.DRAIN, SlowAction.SHRINK} and policy.sub_health is SubHealthAction.IGNORE:
        notes.append(f"slow.then is {policy.slow.then}, and sub_health is ignore: a slow node stays in use")
    if policy.rung(Rung.RECOVER) is None:
        notes.append("ladder is without recover: the loss of a node restarts every process, or stops the job")
    limits = policy.deadlines
    if limits.orders_s <= limits.quiesce_s + limits.save_s:
        notes.append(
            f"deadlines.orders_s ({limits.orders_s:g}) is not above deadlines.quiesce_s + deadlines.save_s: ranks that "
            "have saved give up while others write"
        )
    if policy.standby.depth is StandbyDepth.BUILT and device_kind(policy.device).memory_of_its_own:
        notes.append(
            "standby.depth is built: for each rank a second process opens its device and builds its model there, so "
            f"half of the device's memory has to be free{_on_spares(policy)}"
        )
    notes += _role_notes(policy)
    ladders = {"ladder": policy.ladder}
    ladders |= {f"roles.{name}.ladder": role.ladder for name, role in policy.roles.items() if role.ladder is not None}
    for path, ladder in ladders.items():
        notes += _budget_notes(ladder, path) + _node_notes(path, ladder, policy.node)
    return tuple(notes)


def _on_spares(policy: Policy) -> str:
    most = policy.standby.nodes_per_spare
    return f"; each device of a spare node has {most} such processes" if most > 1 else ""


def _standby_problems(policy: Policy) -> list[Problem]:
    if policy.standby.warm or policy.standby.depth is not StandbyDepth.BUILT:
        return []
    return [Problem("standby.depth", f"found {policy.standby.depth}, which needs standby.warm: true")]


def _scale_problems(policy: Policy) -> list[Problem]:
    if policy.scale.min_nodes is None:
        needs = "which needs scale.min_nodes"
        smaller = policy.slow.then is SlowAction.SHRINK
        problems = [Problem("slow.then", f"found shrink, {needs}")] if smaller else []
        return [*problems, *[Problem("scale.in_place", f"found true, {needs}")] * policy.scale.in_place]
    problems = []
    if policy.scale.in_place and RestoreSource.REPLICA not in policy.restore:
        problems.append(Problem("scale.in_place", "needs replica in restore, from which new ranks get their state"))
    if RestoreSource.CHECKPOINT not in policy.restore:
        problems.append(Problem("scale.min_nodes", "needs checkpoint in restore, from which another world starts"))
    if policy.roles:
        problems.append(Problem("scale.min_nodes", "found with roles, whose ranks a smaller world may not have"))
    if policy.rung(Rung.RESCHEDULE_POD) is None:
        problems.append(Problem("scale.min_nodes", "needs reschedule_pod on the ladder, which restarts all processes"))
    return problems


def _hook_problems(command: str | None, *, brings: bool) -> list[Problem]:
    if command is None:
        return [Problem("node.relaunch_brings", "needs on_node_relaunch, the command that brings nodes")] * brings
    try:
        words = shlex.split(command)
    except ValueError as error:
        return [Problem("on_node_relaunch", f"{error}; allowed: a command, quoted as for a shell")]
    return [] if words else [Problem("on_node_relaunch", "found an empty command; allowed: a command, or null")]


def _notify_problems(policy: Policy) -> list[Problem]:
    webhooks, problems = policy.notify.webhooks, list[Problem]()
    if len(webhooks) > MOST_WEBHOOKS:
        problems.append(Problem("notify.webhooks", f"found {len(webhooks)}; allowed: up to {MOST_WEBHOOKS}"))
    names: dict[str, int] = {}
    for index, each in enumerate(webhooks):
        key = f"notify.webhooks[{index}]"
        if not WEBHOOK_NAME.fullmatch(each.name):
            allowed = "up to 32 lower-case letters, digits, - and _, of which the first is a letter"
            problems.append(Problem(f"{key}.name", f"found the text {each.name[:64]!r}; allowed: {allowed}"))
        elif each.name in names:
            problems.append(Problem(f"{key}.name", f"{each.name} is the name of notify.webhooks[{names[each.name]}]"))
        names.setdefault(each.name, index)
        for field, path in (("url_file", each.url_file), ("header_file", each.header_file)):
            if path is not None and not path.strip():
                problems.append(Problem(f"{key}.{field}", "empty; allowed: the path of a file"))
        if not each.events:
            allowed = ", ".join(NoticeKind)
            problems.append(Problem(f"{key}.events", f"empty; allowed: {allowed}; leave the key out for all of them"))
    if policy.notify.checkpoint_age_s is not None and (policy.script_writes or not policy.checkpoint.every_steps):
        why = "checkpoints are written by the script" if policy.script_writes else "checkpoint.every_steps is 0"
        problems.append(Problem("notify.checkpoint_age_s", f"needs checkpoints that midstep writes, and {why}"))
    return problems


def _job_rule_problems(rules: tuple[JobRule, ...]) -> list[Problem]:
    """Return what is wrong with the rules on reported values and lines of logs."""
    of_lines = sum(each.line is not None for each in rules)
    problems = [
        Problem("rules", f"found {found}{of_what}; allowed: up to {most}")
        for found, of_what, most in ((len(rules), "", MOST_RULES), (of_lines, " on lines", MOST_LINE_RULES))
        if found > most
    ]
    names: dict[str, int] = {}
    for index, each in enumerate(rules):
        if each.name == OUT_OF_MEMORY.name:
            problems.append(Problem(f"rules[{index}].name", f"{each.name} is the name of the key out_of_memory"))
        problems += [Problem(f"rules[{index}]", mistake) for mistake in each.mistakes()]
        if each.name in names:
            problems.append(Problem(f"rules[{index}].name", f"{each.name} is the name of rules[{names[each.name]}]"))
        names.setdefault(each.name, index)
    return problems


def kind_problems(codes: Mapping[str, CodeRule], key: str) -> list[Problem]:
    """Return the codes whose kind is nothing that a detector can see."""
    allowed = ", ".join(sorted(DETECTABLE - {FaultKind.DETECTOR}))
    return [
        Problem(f"{key}.{code}.kind", f"found {rule.kind}, which no code stands for; allowed: {allowed}")
        for code, rule in codes.items()
        if rule.kind not in DETECTABLE or rule.kind is FaultKind.DETECTOR
    ]


def _budget_notes(ladder: tuple[RungPolicy, ...], path: str) -> list[str]:
    notes = []
    for index, entry in enumerate(ladder):
        budget = entry.budget
        limits = [("per_rank", budget.per_rank), ("per_node", budget.per_node), ("per_job", budget.per_job)]
        known = [(name, limit) for name, limit in limits if limit is not None]
        for (narrow, low), (wide, high) in pairwise(known):
            if low > high:
                notes.append(f"{path}[{index}].budget.{narrow} ({low}) can never be reached: {wide} is {high}")
        if entry.rung is not Rung.STOP and budget.per_job is None:
            notes.append(f"{path}[{index}].budget.per_job is null: {entry.rung} has no limit in the job")
    return notes


def _node_notes(path: str, ladder: tuple[RungPolicy, ...], node: NodePolicy) -> list[str]:
    """Return budgets per node that the count of the node's failures makes unreachable."""
    if node.failures is None or not any(entry.rung in {Rung.RECOVER, *WORLD_RESTARTS} for entry in ladder):
        return []
    return [
        f"{path}[{index}].budget.per_node ({entry.budget.per_node}) can never be reached: node.failures is "
        f"{node.failures}, and a node that fails more often is left"
        for index, entry in enumerate(ladder)
        if entry.rung in {Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE}
        and entry.budget.per_node is not None
        and entry.budget.per_node > node.failures
        and entry.budget.window_s == node.window_s
    ]


def _ladder_problems(ladder: tuple[RungPolicy, ...], path: str) -> list[Problem]:
    if not ladder:
        return [Problem(path, f"empty; allowed: rungs in this order, with stop as the last: {_names()}")]
    problems = []
    highest = -1
    seen: dict[Rung, int] = {}
    for index, entry in enumerate(ladder):
        key = f"{path}[{index}].rung"
        place = _ORDER.index(entry.rung)
        if entry.rung in seen:
            problems.append(Problem(key, f"{entry.rung} is on the ladder already, at {path}[{seen[entry.rung]}]"))
        elif place < highest:
            problems.append(
                Problem(key, f"{entry.rung} is cheaper than {_ORDER[highest]} before it; the order is {_names()}")
            )
        seen.setdefault(entry.rung, index)
        highest = max(highest, place)
    last = len(ladder) - 1
    if Rung.STOP not in seen:
        problems.append(Problem(f"{path}[{last}].rung", "the last rung must be stop, so that every incident ends"))
    return problems


def _role_problems(policy: Policy) -> list[Problem]:
    problems, spans = [], []
    order = list(policy.roles)
    for name, role in policy.roles.items():
        if not ROLE_NAME.fullmatch(name):
            allowed = "letters, digits, - and _, of which the first is a letter"
            problems.append(Problem(f"roles.{name[:64]}", f"is not the name of a role; allowed: {allowed}"))
        try:
            spans += [(first, last, name) for first, last in parse_ranks(role.ranks)]
        except ValueError as error:
            allowed = "ranks and ranges of ranks, e.g. 0-5,8"
            problems.append(Problem(f"roles.{name}.ranks", f"{error}; allowed: {allowed}"))
    for (_, high, one), (low, _, other) in pairwise(sorted(spans)):
        if low <= high:
            earlier, later = sorted((one, other), key=order.index)
            owner = "this role" if one == other else f"role {earlier}"
            problems.append(Problem(f"roles.{later}.ranks", f"rank {low} belongs to {owner} already"))
    return problems


def _gaps(policy: Policy) -> list[str]:
    """Return the ranks below the highest one with a role that have none."""
    spans = sorted(span for role in policy.roles.values() for span in parse_ranks(role.ranks))
    gaps, expected = [], 0
    for first, last in spans:
        if first > expected:
            gaps.append(f"rank {expected}" if first == expected + 1 else f"ranks {expected} to {first - 1}")
        expected = last + 1
    return gaps


def _role_notes(policy: Policy) -> list[str]:
    notes = []
    gaps = _gaps(policy)
    if gaps:
        verb = "has" if len(gaps) == 1 and gaps[0].startswith("rank ") else "have"
        notes.append(f"roles: {', '.join(gaps)} {verb} no role and recover by the job's ladder, as all ranks above do")
    for name, role in policy.roles.items():
        if role.ladder is not None:
            continue
        notes.append(f"roles.{name} has no ladder: a fault of one of its ranks restarts the whole job")
        if not any(policy.rung(rung) for rung in WORLD_RESTARTS):
            notes.append(
                f"roles.{name} has no ladder, and the job's has no restart of the world: its faults stop the job"
            )
    return notes


def _integrity_advice(policy: Policy) -> list[str]:
    integrity = policy.integrity
    if integrity == IntegrityPolicy():
        return []
    if policy.script_writes and (integrity.every_steps or integrity.audit_steps):
        key, what = ("every_steps", "vote") if integrity.every_steps else ("audit_steps", "repeat steps")
        return [f"integrity.{key} is set, and midstep does not see what the script holds: ranks do not {what}"]
    if not integrity.every_steps:
        return [] if integrity.audit_steps else ["integrity is set, and integrity.every_steps is 0: ranks do not vote"]
    copies = RestoreSource.HOST_COPY in policy.restore
    if integrity.then is IntegrityAction.ROLLBACK and not copies and not policy.checkpoint.every_steps:
        return [
            "integrity.then is rollback, restore is without host_copy, and no checkpoints are written: where no copy "
            "of a majority is exact, no state is there to go back to"
        ]
    return []


def _restore_problems(policy: Policy) -> list[Problem]:
    allowed = ", ".join(source for source in RestoreSource if source is not RestoreSource.NOTHING)
    if not policy.restore:
        return [Problem("restore", f"empty; allowed: {allowed}, the best first")]
    problems = []
    for index, source in enumerate(policy.restore):
        if source is RestoreSource.NOTHING:
            problems.append(Problem(f"restore[{index}]", f"found nothing; allowed: {allowed}"))
        elif source in policy.restore[:index]:
            problems.append(Problem(f"restore[{index}]", f"{source} is listed already"))
        elif source is RestoreSource.HOST_COPY and policy.script_writes:
            problems.append(Problem(f"restore[{index}]", f"found host_copy, {_UNSEEN}"))
    if policy.replica == "buddy" and policy.script_writes:
        problems.append(Problem("replica", f"found buddy, {_UNSEEN}"))
    if policy.checkpoint.asynchronous and RestoreSource.HOST_COPY not in policy.restore:
        said = "found true; such checkpoints are written from copies in host memory: restore has to name host_copy"
        problems.append(Problem("checkpoint.asynchronous", said))
    return problems


_UNSEEN = "and midstep does not see what a script holds whose groups are its framework's own"
_Sum = Callable[[Policy], float]

# (key, its value, what it must be above, in words, as a value)
_RELATIONS: tuple[tuple[str, _Sum, str, _Sum], ...] = (
    (
        "deadlines.quiesce_s",
        lambda policy: policy.deadlines.quiesce_s,
        "deadlines.suspect_s",
        lambda policy: policy.deadlines.suspect_s,
    ),
    (
        "deadlines.rejoin_s",
        lambda policy: policy.deadlines.rejoin_s,
        "communicator.link_up_s x communicator.link_up_attempts",
        lambda policy: policy.communicator.link_up_s * policy.communicator.link_up_attempts,
    ),
    (
        "deadlines.orders_s",
        lambda policy: policy.deadlines.orders_s,
        "deadlines.quiesce_s + deadlines.nodes_s + deadlines.device_s + deadlines.start_s",
        lambda policy: (
            policy.deadlines.quiesce_s + policy.deadlines.nodes_s + policy.deadlines.device_s + policy.deadlines.start_s
        ),
    ),
    (
        "agent.spare_s",  # all nodes are without ranks while some are waited for
        lambda policy: math.inf if policy.agent.spare_s in {None, AgentPolicy().spare_s} else policy.agent.spare_s,
        "deadlines.nodes_s",
        lambda policy: policy.deadlines.nodes_s,
    ),
    (
        "communicator.collective_s",
        lambda policy: policy.communicator.collective_s,
        "stall.grace_s",
        lambda policy: policy.stall.grace_s,
    ),
)


def _deadline_problems(policy: Policy) -> list[Problem]:
    return [
        Problem(key, f"found {value(policy):g}; allowed: above {words}, which is {least(policy):g}")
        for key, value, words, least in _RELATIONS
        if value(policy) <= least(policy)
    ]


def _device_problems(policy: Policy) -> list[Problem]:
    fitting = [each.name for each in device_kind(policy.device).communicators]
    if policy.communicator.name in {*fitting, EXTERNAL}:
        return []
    allowed = " or ".join(fitting)
    found = f"found {policy.communicator.name}; allowed: {allowed}, which is what the device {policy.device} has"
    return [Problem("communicator.name", found)]


def _names() -> str:
    return ", ".join(_ORDER)


MAX_PATTERNS = 100  # they travel in the environment of each process
# What an exception in a process can stand for. The other kinds are seen from outside of it.
KINDS = frozenset(
    {
        FaultKind.EXCEPTION,
        FaultKind.COMMUNICATION,
        FaultKind.DEVICE,
        FaultKind.MEMORY,
        FaultKind.MEMORY_MULTI_BIT,
        FaultKind.LINK,
        FaultKind.OUT_OF_MEMORY,
    }
)


def exception_problems(patterns: Sequence[ExceptionPattern]) -> list[Problem]:
    """Return every rule that the patterns break, empty when they can be used."""
    problems = []
    if len(patterns) > MAX_PATTERNS:
        problems.append(Problem("exceptions", f"found {len(patterns)} patterns; allowed: up to {MAX_PATTERNS}"))
    names: dict[str, int] = {}
    for index, pattern in enumerate(patterns):
        key = f"exceptions[{index}]"
        problems += [Problem(key, mistake) for mistake in pattern.mistakes()]
        if pattern.name in names:
            problems.append(Problem(f"{key}.name", f"{pattern.name} is the name of exceptions[{names[pattern.name]}]"))
        names.setdefault(pattern.name, index)
        if pattern.library != OF_JOB or pattern.versions:
            said = "library and versions are for the patterns that come along with midstep; leave them out"
            problems.append(Problem(key, said))
        if pattern.fault is not None and pattern.fault.kind not in KINDS:
            allowed = ", ".join(sorted(KINDS))
            text = f"found {pattern.fault.kind}, which no exception stands for; allowed: {allowed}"
            problems.append(Problem(f"{key}.fault.kind", text))
    return problems


def job_settings(policy: Policy, job_directory: str | Path, *, spares: int = 0) -> JobSettings:
    """Return the part of `policy` that agents and processors follow. Paths are taken from `job_directory`.

    `spares`: how many nodes the job asks for beyond those that it needs.
    """
    directory = Path(job_directory) / (policy.checkpoint.directory or "checkpoints")
    return JobSettings(
        checkpoint_directory=str(directory),
        checkpoint_every_steps=policy.checkpoint.every_steps,
        checkpoint_keep=policy.checkpoint.keep,
        checkpoint_format=policy.checkpoint.format,
        checkpoint_asynchronous=policy.checkpoint.asynchronous,
        save_s=policy.deadlines.save_s,
        preload=policy.standby.preload,
        warm_standby=policy.standby.warm,
        standby_depth=_standby_depth(policy),
        heartbeat_s=policy.heartbeat.interval_s,
        stall_factor=policy.stall.factor,
        stall_grace_s=policy.stall.grace_s,
        stall_after_steps=policy.stall.after_steps,
        stall_learns=policy.stall.learned,
        stall_suspended_s=policy.stall.suspended_s,
        orders_s=policy.deadlines.orders_s,
        link_up_s=policy.communicator.link_up_s,
        collective_s=policy.communicator.collective_s,
        stop_grace_s=policy.deadlines.stop_grace_s,
        black_box_bytes=policy.black_box_bytes,
        communicator=policy.communicator.name,
        device=policy.device,
        restore=tuple(source.value for source in policy.restore),
        buddies=policy.replica == "buddy",
        host_copies=RestoreSource.HOST_COPY in policy.restore,
        host_copy_every_steps=0 if policy.host_copy.every_steps == "auto" else policy.host_copy.every_steps,
        host_copy_bytes=policy.host_copy.memory_bytes or 0,
        host_copy_nodes=policy.host_copy.copies,
        integrity_every_steps=None if policy.integrity.every_steps == "auto" else policy.integrity.every_steps,
        integrity_audit_steps=policy.integrity.audit_steps,
        integrity_then=policy.integrity.then,
        resizes=policy.scale.min_nodes is not None,
        grows_in_place=policy.scale.in_place,
        leave_s=policy.agent.leave_s,
        spare_s=None if spares else _spare_s(policy),
        exceptions=policy.exceptions,
        retry_unknown_exceptions=policy.retry_unknown_exceptions,
        rules=policy.rules,
        skips_out_of_memory=policy.out_of_memory is OutOfMemoryAction.SKIP_BATCH,
    )


def _standby_depth(policy: Policy) -> StandbyDepth:
    """Return how far the next process of a rank gets. No node can tell how much memory of a device will be needed."""
    depth, may_choose = policy.standby.depth, policy.standby.warm and not device_kind(policy.device).memory_of_its_own
    return StandbyDepth.IMPORTED if depth is StandbyDepth.AUTO and not may_choose else depth


def _spare_s(policy: Policy) -> float | None:
    """Return how long a node waits that the job has no place for; one that it may still grow by waits longer."""
    if policy.agent.spare_s is None:
        return None
    grows_s = 0.0 if policy.scale.min_nodes is None else policy.scale.min_interval_s
    return max(policy.agent.spare_s + grows_s, policy.deadlines.nodes_s + SPARE_MARGIN_S)
