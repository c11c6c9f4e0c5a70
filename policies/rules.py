"""The rules between the keys of a policy: what no single key can be wrong about.

`broken_rules` are errors: such a policy could not recover from anything, or would end each recovery by its
own deadlines. `advice` is what an operator may want to know before the job runs; it refuses nothing.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise

from ..protocol.types import FaultKind, RestoreSource, Rung
from .fault_codes import DETECTABLE, CodeRule
from .reading import Problem
from .schema import Policy

_ORDER = tuple(Rung)


def broken_rules(policy: Policy) -> list[Problem]:
    """Return every rule that `policy` breaks, empty when it can be used."""
    problems = _ladder_problems(policy) + _restore_problems(policy) + _deadline_problems(policy)
    return problems + kind_problems(policy.faults.codes, "faults.codes")


def advice(policy: Policy) -> tuple[str, ...]:
    """Return what is allowed, and perhaps not meant."""
    notes = []
    restarts = [rung for rung in (Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB) if policy.rung(rung)]
    if restarts and policy.checkpoint.every_steps == 0:
        notes.append(f"checkpoint.every_steps is 0: after {' or '.join(restarts)} the job starts from its first step")
    if restarts and RestoreSource.CHECKPOINT not in policy.restore:
        notes.append(f"restore is without checkpoint: {' and '.join(restarts)} have nothing to start from")
    if policy.rung(Rung.RECOVER) is None:
        notes.append("ladder is without recover: the loss of a node restarts every process, or stops the job")
    for index, entry in enumerate(policy.ladder):
        budget = entry.budget
        limits = [("per_rank", budget.per_rank), ("per_node", budget.per_node), ("per_job", budget.per_job)]
        known = [(name, limit) for name, limit in limits if limit is not None]
        for (narrow, low), (wide, high) in pairwise(known):
            if low > high:
                notes.append(f"ladder[{index}].budget.{narrow} ({low}) can never be reached: {wide} is {high}")
        if entry.rung is not Rung.STOP and budget.per_job is None:
            notes.append(f"ladder[{index}].budget.per_job is null: {entry.rung} has no limit in the job")
    return tuple(notes)


def kind_problems(codes: Mapping[str, CodeRule], key: str) -> list[Problem]:
    """Return the codes whose kind is nothing that a detector can see."""
    allowed = ", ".join(sorted(DETECTABLE - {FaultKind.DETECTOR}))
    return [
        Problem(f"{key}.{code}.kind", f"found {rule.kind}, which no code stands for; allowed: {allowed}")
        for code, rule in codes.items()
        if rule.kind not in DETECTABLE or rule.kind is FaultKind.DETECTOR
    ]


def _ladder_problems(policy: Policy) -> list[Problem]:
    if not policy.ladder:
        return [Problem("ladder", f"empty; allowed: rungs in this order, with stop as the last: {_names()}")]
    problems = []
    highest = -1
    seen: dict[Rung, int] = {}
    for index, entry in enumerate(policy.ladder):
        key = f"ladder[{index}].rung"
        place = _ORDER.index(entry.rung)
        if entry.rung in seen:
            problems.append(Problem(key, f"{entry.rung} is on the ladder already, at ladder[{seen[entry.rung]}]"))
        elif place < highest:
            problems.append(
                Problem(key, f"{entry.rung} is cheaper than {_ORDER[highest]} before it; the order is {_names()}")
            )
        seen.setdefault(entry.rung, index)
        highest = max(highest, place)
    last = len(policy.ladder) - 1
    if Rung.STOP not in seen:
        problems.append(Problem(f"ladder[{last}].rung", "the last rung must be stop, so that every incident ends"))
    return problems


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
    return problems


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


def _names() -> str:
    return ", ".join(_ORDER)
