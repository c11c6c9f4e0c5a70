"""Notes on a translated policy: where midstep differs, and what has no counterpart in it."""

import msgspec

from ...protocol.enums import StrEnum
from ...protocol.types import Rung
from ...protocol.wording import one_line
from ..schema import Policy
from .settings import ACTION_TIME_LIMIT, PODS_RESTARTED, WAITS_FOR_PROCESSES, AscendJob, Strategy

KEEPS_PROCESSES = frozenset({Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER})


class NoteKind(StrEnum):
    """What a note is about."""

    NO_COUNTERPART = "no counterpart"
    DIFFERENT = "different"


class Note(msgspec.Struct, frozen=True):
    """One note on a translated policy, in words."""

    kind: NoteKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def notes_about(job: AscendJob, policy: Policy) -> tuple[Note, ...]:
    """Return the notes on the policy that was made of a job, those on differences first."""
    rungs = [entry.rung for entry in policy.ladder]
    notes = (*_differences(job, policy, rungs), *_without_counterpart(job, policy))
    return tuple(Note(note.kind, one_line(note.text)) for note in notes)


def _differences(job: AscendJob, policy: Policy, rungs: list[Rung]) -> list[Note]:
    texts = [f"{typo}" for typo in job.typos]
    if job.left_alone:
        said = f"{job.fault_scheduling}" if job.fault_scheduling else "fault-scheduling is not in the file"
        texts.append(
            f"{said}: MindCluster would not reschedule this job, so any fault stops it. For recovery set "
            'fault-scheduling to "grace" and translate again, or add rungs to the ladder.'
        )
        return [Note(NoteKind.DIFFERENT, text) for text in texts]
    texts += _about_processes(job, rungs) + _about_restarts(job, rungs) + _about_sub_health(job, rungs)
    texts += _about_scale(policy)
    return [Note(NoteKind.DIFFERENT, text) for text in texts]


def _about_processes(job: AscendJob, rungs: list[Rung]) -> list[str]:
    kept = [rung for rung in rungs if rung in KEEPS_PROCESSES]
    if job.paused and job.recover_strategy is not None:
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
            "recover takes a spare node (`midstep run --spares`), or waits up to deadlines.nodes_s for one that the "
            "platform creates, with all other processes parked; without either the ladder continues."
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
    if job.sub_healthy is None or job.sub_healthy.value not in WAITS_FOR_PROCESSES:
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


def _about_scale(policy: Policy) -> list[str]:
    if policy.scale.min_nodes is None:
        return []
    return [
        "elastic-training: whole nodes leave, and all processes restart from a checkpoint of the last step; in "
        "MindCluster the healthy ones stay. Set scale.min_nodes to the fewest nodes that the job can train on."
    ]


def _about_restarts(job: AscendJob, rungs: list[Rung]) -> list[str]:
    texts = []
    restarts = [rung for rung in rungs if rung in (Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)]
    limited = [rung for rung in rungs if rung in PODS_RESTARTED]
    if job.retries is not None and len(limited) > 1:
        texts.append(
            f"{job.retries} limits each of {', '.join(limited)} by itself, over the whole job; in MindCluster all "
            "restarts of pods are one count."
        )
    if job.retries is None:
        texts.append("neither fault-retry-times nor backoffLimit sets a limit, so midstep's own budgets hold.")
    spared = "as dump asks for" if Strategy.DUMP in job.strategies else "though dump is not asked for"
    texts.append(
        f"an emergency checkpoint is written before a stop, {spared}, and before {' and '.join(restarts)}: "
        "training continues from it. Where the healthy processes do not hold everything, what follows the last "
        "periodic one is lost: set checkpoint.every_steps to what may be."
    )
    if Rung.RESCHEDULE_JOB in restarts:
        texts.append(
            "reschedule_job gives all nodes back, so it is passed over where the platform cannot create nodes."
        )
    return texts


def _without_counterpart(job: AscendJob, policy: Policy) -> list[Note]:
    texts = []
    if job.recover_strategy is not None and job.elastic and policy.scale.min_nodes is None:
        texts.append(
            f"line {job.recover_strategy.line}, recover-strategy: elastic-training. A smaller world is a way of "
            "reschedule_pod, which is not on the ladder: set pod-rescheduling to on."
        )
    if job.grace_period is not None and job.stop_grace is None:
        texts.append(f"{job.grace_period}. It has a meaning with fault-scheduling grace only.")
    for other in job.others:
        texts.append(f"{other}. {_why_idle(other.path)}")
    return [Note(NoteKind.NO_COUNTERPART, text) for text in texts]


def _why_idle(key: str) -> str:
    if key == "restartPolicy":
        return "Processes are restarted by midstep's agents; a pod that restarts by itself is a lost node to them."
    if key == "TTP_PORT":
        return "midstep chooses its ports."
    if key == "MINDIO_WAIT_MINDX_TIME":
        return "How long a parked process waits is deadlines.orders_s, which must cover the wait for nodes."
    return f"It sets up MindCluster's own processes, of which midstep has none ({ACTION_TIME_LIMIT} is understood)."
