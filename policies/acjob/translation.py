"""Translates what an AscendJob (MindCluster's acjob) says about recovery into a policy, key by key.

The table with the reasons is in `docs/acjob.md`. Nothing is dropped in silence: what has no counterpart, and what
midstep does differently, comes along as notes, also in the policy's own comments.
"""

import enum

import msgspec

from ...protocol.types import Rung
from ..schema import DEFAULT_LADDER, Budget, Deadlines, Policy, RungPolicy, ScalePolicy, SubHealthAction
from ..wording import one_line
from .commented import render_commented
from .reading import read_acjob
from .settings import ACTION_TIME_LIMIT, AscendJob, Setting, Strategy

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
_LIMITED = (Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)  # those for which MindCluster starts pods anew
_MOST = 1_000_000_000  # the largest count that a policy can hold
_ORDERS_SPARE_S = 60.0
_OURS = "midstep's own limit; the file sets none"


class NoteKind(enum.StrEnum):
    """What a note is about."""

    NO_COUNTERPART = "no counterpart"
    DIFFERENT = "different"


class Note(msgspec.Struct, frozen=True):
    """What a reader of the policy should know, in words."""

    kind: NoteKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


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
    deadlines, more = _deadlines(read)
    action, origin = _sub_health(read, ladder)
    more["sub_health"] = origin
    scale, scale_origins = _scale(read, ladder)
    more |= scale_origins
    policy = Policy(ladder=ladder, deadlines=deadlines, sub_health=action, scale=scale)
    notes = (*_differences(read, [rung.rung for rung in ladder]), *_without_counterpart(read))
    notes = tuple(Note(note.kind, one_line(note.text)) for note in notes)
    tail = [f"{note.kind.capitalize()}: {note.text}" for note in notes]
    return Translation(policy, render_commented(policy, origins | more, _head(read, source), tail), notes)


def _head(job: AscendJob, source: str) -> list[str]:
    lines = [f"Made by `midstep policy from-acjob` from {source}, line {job.line}: AscendJob {job.name}."]
    if job.nodes and job.ranks_per_node:
        size = f"--nnodes {job.nodes} --nproc-per-node {job.ranks_per_node}"
        lines.append(f"Its replicas and NPUs: midstep run {size} --spares ... --policy THIS_FILE ...")
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
        if limit is not None and rung in _LIMITED:
            budget = Budget(per_job=min(limit.number, _MOST), window_s=0)
            origins[f"ladder.{rung}.budget"] = f"{limit}"
        rungs.append(RungPolicy(rung, attempts=default[rung].attempts, budget=budget))
    origins[f"ladder.{Rung.STOP}"] = "always the last"
    return (*rungs, RungPolicy(Rung.STOP)), origins


def _off(job: AscendJob) -> bool:
    """Whether MindCluster would leave the job alone."""
    return job.fault_scheduling is None or job.fault_scheduling.value == "off"


def _paused(job: AscendJob) -> bool:
    return job.process_recover is not None and job.process_recover.value != "on"


def _process_rungs(job: AscendJob) -> dict[Rung, str]:
    if _off(job) or _paused(job) or job.recover_strategy is None:
        return {}
    line = job.recover_strategy.line
    return {rung: f"line {line}, recover-strategy: {word}" for word, rung in _RUNGS.items() if word in job.strategies}


def _restart_rungs(job: AscendJob) -> dict[Rung, str]:
    if _off(job):
        return {}
    if job.recover_policy_path is not None:
        return {Rung.RESCHEDULE_POD: f"{job.recover_policy_path}"}
    rungs = {Rung.RESCHEDULE_JOB: f"{job.fault_scheduling}"}
    if job.pod_rescheduling is not None and job.pod_rescheduling.value == "on":
        rungs[Rung.RESCHEDULE_POD] = f"{job.pod_rescheduling}"
    return rungs


# --- deadlines --------------------------------------------------------------------------------------------------------


def _deadlines(job: AscendJob) -> tuple[Deadlines, dict[str, str]]:
    changes: dict[str, float] = {}
    origins: dict[str, str] = {}
    if job.action_limit is not None:
        for key in ("quiesce_s", "rejoin_s"):
            changes[key] = float(job.action_limit.number)
            origins[f"deadlines.{key}"] = f"{job.action_limit}"
    if job.wait_reschedule is not None:
        changes["nodes_s"] = float(job.wait_reschedule.number)
        origins["deadlines.nodes_s"] = f"{job.wait_reschedule}"
    grace = _stop_grace(job)
    if grace is not None:
        changes["stop_grace_s"] = float(min(grace.number, 31_536_000))
        origins["deadlines.stop_grace_s"] = f"{grace}"
    if job.fault_scheduling is not None and job.fault_scheduling.value == "force":
        changes["stop_grace_s"] = 0.0
        origins["deadlines.stop_grace_s"] = f"{job.fault_scheduling}"
    deadlines = msgspec.structs.replace(Deadlines(), **changes)
    least_s = deadlines.quiesce_s + deadlines.nodes_s + deadlines.start_s
    if deadlines.orders_s <= least_s:
        deadlines = msgspec.structs.replace(deadlines, orders_s=least_s + _ORDERS_SPARE_S)
        origins["deadlines.orders_s"] = "must be above quiesce_s + nodes_s + start_s"
    return deadlines, origins


def _stop_grace(job: AscendJob) -> Setting | None:
    graceful = job.fault_scheduling is not None and job.fault_scheduling.value == "grace"
    return job.grace_period if graceful else None


# --- nodes that are not well ------------------------------------------------------------------------------------------


def _sub_health(job: AscendJob, ladder: tuple[RungPolicy, ...]) -> tuple[SubHealthAction, str]:
    """Return what is done about sub-healthy nodes, and where that comes from."""
    if job.sub_healthy is None:
        return SubHealthAction.IGNORE, "not in the file: MindCluster's default"
    if _off(job):
        return SubHealthAction.IGNORE, f"{job.sub_healthy}, without effect as fault-scheduling is off"
    action = _SUB_HEALTHY[job.sub_healthy.value]
    if action is SubHealthAction.DRAIN and not any(entry.rung is Rung.RECOVER for entry in ladder):
        return SubHealthAction.LEAVE_NOW, f"{job.sub_healthy}; a drain would need recover on the ladder"
    return action, f"{job.sub_healthy}"


# --- fewer nodes ------------------------------------------------------------------------------------------------------


def _scale(job: AscendJob, ladder: tuple[RungPolicy, ...]) -> tuple[ScalePolicy, dict[str, str]]:
    """Return whether the job may go on with fewer nodes, and where that comes from."""
    if not _elastic(job) or not any(entry.rung is Rung.RESCHEDULE_POD for entry in ladder):
        return ScalePolicy(), {}
    line = job.recover_strategy.line if job.recover_strategy is not None else 0
    origin = f"line {line}, recover-strategy: {Strategy.ELASTIC_TRAINING}; the file names no least number of nodes"
    return ScalePolicy(min_nodes=1), {"scale.min_nodes": origin}


def _elastic(job: AscendJob) -> bool:
    return not _off(job) and not _paused(job) and Strategy.ELASTIC_TRAINING in job.strategies


# --- what to know -----------------------------------------------------------------------------------------------------


def _differences(job: AscendJob, rungs: list[Rung]) -> list[Note]:
    texts = [f"{typo}" for typo in job.typos]
    if _off(job):
        said = f"{job.fault_scheduling}" if job.fault_scheduling else "fault-scheduling is not in the file"
        texts.append(
            f"{said}: MindCluster would not reschedule this job, so any fault stops it. For recovery set "
            'fault-scheduling to "grace" and translate again, or add rungs to the ladder.'
        )
        return [Note(NoteKind.DIFFERENT, text) for text in texts]
    texts += _about_processes(job, rungs) + _about_restarts(job, rungs) + _about_sub_health(job, rungs)
    texts += _about_scale(job, rungs)
    return [Note(NoteKind.DIFFERENT, text) for text in texts]


def _about_processes(job: AscendJob, rungs: list[Rung]) -> list[str]:
    kept = [rung for rung in rungs if rung in _RUNGS.values()]
    if _paused(job) and job.recover_strategy is not None:
        return [f"{job.process_recover}: recover-strategy is not translated, as MindCluster would not follow it now."]
    if not kept:
        return ["no rung keeps processes alive, as recover-strategy names none; midstep could (`midstep policy show`)."]
    texts = [
        "a rung that fails hands over to the next one. In MindCluster only retry does; a failed recover or "
        "recover-in-place goes to dump or exit.",
        "rank 0 is a rank like any other. In MindCluster a fault of its pod reschedules the job.",
    ]
    if Rung.RECOVER in kept:
        texts.append(
            "recover takes a spare node that is there already (`midstep run --spares`), and waits for none; "
            "without one the ladder goes on."
        )
    if job.fault_retry_times is None or job.fault_retry_times.number == 0:
        texts.append(
            "fault-retry-times is not above 0: MindCluster would not see ended processes; midstep always does."
        )
    if job.fault_scheduling is not None and job.fault_scheduling.value == "force":
        texts.append(
            f"{job.fault_scheduling}: for process-level recovery MindCluster asks for grace; midstep does not."
        )
    return texts


def _about_sub_health(job: AscendJob, rungs: list[Rung]) -> list[str]:
    if job.sub_healthy is None or _SUB_HEALTHY[job.sub_healthy.value] is not SubHealthAction.DRAIN:
        return []
    if Rung.RECOVER in rungs:
        return [
            f"{job.sub_healthy}: no process has to exit for it. The node's ranks move to a spare node between two "
            "steps, and no step is repeated; without a spare the node stays in use."
        ]
    return [
        f"{job.sub_healthy}: recover is not on the ladder, so the node cannot be drained; it is left at once, and no "
        "checkpoint is written before."
    ]


def _about_scale(job: AscendJob, rungs: list[Rung]) -> list[str]:
    if not _elastic(job) or Rung.RESCHEDULE_POD not in rungs:
        return []
    return [
        "elastic-training: whole nodes leave, and all processes start anew from a checkpoint of the last step; in "
        "MindCluster the healthy ones stay. Set scale.min_nodes to the fewest nodes that the job can train on."
    ]


def _about_restarts(job: AscendJob, rungs: list[Rung]) -> list[str]:
    texts = []
    restarts = [rung for rung in rungs if rung in (Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)]
    limited = [rung for rung in rungs if rung in _LIMITED]
    if job.retries is not None and len(limited) > 1:
        texts.append(
            f"{job.retries} limits each of {', '.join(limited)} by itself, over the whole job; in MindCluster all "
            "restarts of pods are one count."
        )
    if job.retries is None:
        texts.append("neither fault-retry-times nor backoffLimit sets a limit, so midstep's own budgets hold.")
    spared = "as dump asks for" if Strategy.DUMP in job.strategies else "though dump is not asked for"
    texts.append(
        f"an emergency checkpoint is written before a stop, {spared}. {' and '.join(restarts)} start from the last "
        "periodic one: set checkpoint.every_steps to what may be lost."
    )
    if Rung.RESCHEDULE_JOB in restarts:
        texts.append(
            "reschedule_job gives all nodes back, so it is passed over where the platform cannot create nodes."
        )
    return texts


def _without_counterpart(job: AscendJob) -> list[Note]:
    texts = []
    if job.recover_strategy is not None and _elastic(job) and _scale(job, _ladder(job)[0])[0].min_nodes is None:
        texts.append(
            f"line {job.recover_strategy.line}, recover-strategy: elastic-training. A smaller world is a way of "
            "reschedule_pod, which is not on the ladder: set pod-rescheduling to on."
        )
    if job.grace_period is not None and _stop_grace(job) is None:
        texts.append(f"{job.grace_period}. It has a meaning with fault-scheduling grace only.")
    for other in job.others:
        texts.append(f"{other}. {_why_idle(other.path)}")
    return [Note(NoteKind.NO_COUNTERPART, text) for text in texts]


def _why_idle(key: str) -> str:
    if key == "restartPolicy":
        return "Processes are started anew by midstep's agents; a pod that restarts by itself is a lost node to them."
    if key == "TTP_PORT":
        return "midstep chooses its ports."
    if key == "MINDIO_WAIT_MINDX_TIME":
        return "How long a parked process waits is deadlines.orders_s, which must cover the wait for nodes."
    return f"It sets up MindCluster's own processes, of which midstep has none ({ACTION_TIME_LIMIT} is understood)."
