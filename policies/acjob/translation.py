"""Translate what an AscendJob (MindCluster's acjob) says about recovery into a policy, key by key.

The table with the reasons is in `docs/acjob.md`. Nothing is dropped in silence: what has no counterpart, and what
midstep does differently, comes along as notes, also in the policy's own comments.
"""

import msgspec

from ...protocol.types import Rung
from ..schema import DEFAULT_LADDER, Budget, Deadlines, Policy, RungPolicy, ScalePolicy, SubHealthAction
from .commented import render_commented
from .device import base_policy
from .notes import Note, notes_about
from .reading import read_acjob
from .settings import PODS_RESTARTED, AscendJob, Strategy

_RUNGS = {
    Strategy.RETRY: Rung.RETRY_STEP,
    Strategy.RECOVER_IN_PLACE: Rung.RECOVER_IN_PLACE,
    Strategy.RECOVER: Rung.RECOVER,
}
_SUB_HEALTHY = {
    "ignore": SubHealthAction.IGNORE,
    "graceExit": SubHealthAction.DRAIN,
    "hotSwitch": SubHealthAction.DRAIN,
    "forceExit": SubHealthAction.LEAVE_NOW,
}
_MOST = 1_000_000_000  # the largest count that a policy can hold
_ORDERS_SPARE_S = 60.0
_OURS = "midstep's own limit; the file sets none"


class Translation(msgspec.Struct, frozen=True):
    """A policy, the same as commented YAML, and what could not be said in it."""

    policy: Policy
    text: str
    notes: tuple[Note, ...]


def translate(text: str, source: str, job: str | None = None) -> Translation:
    """Make a policy of the AscendJob in `text`. `source` names the file; `job` chooses one of several documents.

    Raises PolicyError, every mistake on its own line, when the document is wrong.
    """
    read = read_acjob(text, source, job)
    ladder, origins = _ladder(read)
    base, more = base_policy(read)
    deadlines, times = _deadlines(read, base)
    more |= times
    action, origin = _sub_health(read, ladder)
    more["sub_health"] = origin
    scale, scale_origins = _scale(read, ladder)
    more |= scale_origins
    policy = msgspec.structs.replace(base, ladder=ladder, deadlines=deadlines, sub_health=action, scale=scale)
    notes = notes_about(read, policy)
    tail = [f"{note.kind.capitalize()}: {note.text}" for note in notes]
    return Translation(policy, render_commented(policy, origins | more, _head(read, source), tail), notes)


def _head(job: AscendJob, source: str) -> list[str]:
    lines = [f"Made by `midstep policy from-acjob` from {source}, line {job.line}: AscendJob {job.name}."]
    if job.nodes and job.ranks_per_node:
        size = f"--nnodes {job.nodes} --nproc-per-node {job.ranks_per_node}"
        if job.nodes == 1:
            lines.append(f"Its replicas and NPUs: midstep run {size} --policy THIS_FILE ...")
        else:  # nodes on one machine would take the same NPUs, so each is a machine that joins
            meeting = f"{size} --rdzv-endpoint HOST:PORT"
            lines.append(f"Its replicas and NPUs, on each machine: midstep run {meeting} --policy THIS_FILE ...")
    return lines


# --- the ladder -------------------------------------------------------------------------------------------------------


def _ladder(job: AscendJob) -> tuple[tuple[RungPolicy, ...], dict[str, str]]:
    """Return the rungs that the job allows, and where each and its budget comes from."""
    why = _process_rungs(job) | _restart_rungs(job)
    default = {entry.rung: entry for entry in DEFAULT_LADDER}
    limit = job.retries
    rungs, origins = [], {}
    for rung in Rung:
        if rung is Rung.STOP or rung not in why:
            continue
        origins[f"ladder.{rung}"] = why[rung]
        budget = default[rung].budget
        origins[f"ladder.{rung}.budget"] = _OURS
        if limit is not None and rung in PODS_RESTARTED:
            budget = Budget(per_job=min(limit.number, _MOST), window_s=0)
            origins[f"ladder.{rung}.budget"] = f"{limit}"
        rungs.append(RungPolicy(rung, attempts=default[rung].attempts, budget=budget))
    origins[f"ladder.{Rung.STOP}"] = "always the last"
    return (*rungs, RungPolicy(Rung.STOP)), origins


def _process_rungs(job: AscendJob) -> dict[Rung, str]:
    if job.left_alone or job.paused or job.recover_strategy is None:
        return {}
    line = job.recover_strategy.line
    return {rung: f"line {line}, recover-strategy: {word}" for word, rung in _RUNGS.items() if word in job.strategies}


def _restart_rungs(job: AscendJob) -> dict[Rung, str]:
    if job.left_alone:
        return {}
    if job.recover_policy_path is not None:
        return {Rung.RESCHEDULE_POD: f"{job.recover_policy_path}"}
    rungs = {Rung.RESCHEDULE_JOB: f"{job.fault_scheduling}"}
    if job.pod_rescheduling is not None and job.pod_rescheduling.value == "on":
        rungs[Rung.RESCHEDULE_POD] = f"{job.pod_rescheduling}"
    return rungs


# --- deadlines --------------------------------------------------------------------------------------------------------


def _deadlines(job: AscendJob, base: Policy) -> tuple[Deadlines, dict[str, str]]:
    changes: dict[str, float] = {}
    origins: dict[str, str] = {}
    if job.action_limit is not None:
        asked_s = float(job.action_limit.number)
        changes["quiesce_s"], origins["deadlines.quiesce_s"] = asked_s, f"{job.action_limit}"
        link_up_s = base.communicator.link_up_s * base.communicator.link_up_attempts
        if asked_s > link_up_s:
            changes["rejoin_s"], origins["deadlines.rejoin_s"] = asked_s, f"{job.action_limit}"
    if job.wait_reschedule is not None:
        changes["nodes_s"] = float(job.wait_reschedule.number)
        origins["deadlines.nodes_s"] = f"{job.wait_reschedule}"
    grace = job.stop_grace
    if grace is not None:
        changes["stop_grace_s"] = float(min(grace.number, 31_536_000))
        origins["deadlines.stop_grace_s"] = f"{grace}"
    if job.fault_scheduling is not None and job.fault_scheduling.value == "force":
        changes["stop_grace_s"] = 0.0
        origins["deadlines.stop_grace_s"] = f"{job.fault_scheduling}"
    deadlines = msgspec.structs.replace(base.deadlines, **changes)
    least_s = deadlines.quiesce_s + deadlines.nodes_s + deadlines.device_s + deadlines.start_s
    if deadlines.orders_s <= least_s:
        deadlines = msgspec.structs.replace(deadlines, orders_s=least_s + _ORDERS_SPARE_S)
        origins["deadlines.orders_s"] = "must be above quiesce_s + nodes_s + device_s + start_s"
    return deadlines, origins


# --- nodes that are not well ------------------------------------------------------------------------------------------


def _sub_health(job: AscendJob, ladder: tuple[RungPolicy, ...]) -> tuple[SubHealthAction, str]:
    """Return what is done about sub-healthy nodes, and where that comes from."""
    if job.sub_healthy is None:
        return SubHealthAction.IGNORE, "not in the file: MindCluster's default"
    if job.left_alone:
        return SubHealthAction.IGNORE, f"{job.sub_healthy}, without effect as fault-scheduling is off"
    action = _SUB_HEALTHY[job.sub_healthy.value]
    if action is SubHealthAction.DRAIN and not any(entry.rung is Rung.RECOVER for entry in ladder):
        return SubHealthAction.LEAVE_NOW, f"{job.sub_healthy}; a drain would need recover on the ladder"
    return action, f"{job.sub_healthy}"


# --- fewer nodes ------------------------------------------------------------------------------------------------------


def _scale(job: AscendJob, ladder: tuple[RungPolicy, ...]) -> tuple[ScalePolicy, dict[str, str]]:
    """Return whether the job may continue with fewer nodes, and where that comes from."""
    if not job.elastic or not any(entry.rung is Rung.RESCHEDULE_POD for entry in ladder):
        return ScalePolicy(), {}
    line = job.recover_strategy.line if job.recover_strategy is not None else 0
    origin = f"line {line}, recover-strategy: {Strategy.ELASTIC_TRAINING}; the file names no least number of nodes"
    return ScalePolicy(min_nodes=1), {"scale.min_nodes": origin}
