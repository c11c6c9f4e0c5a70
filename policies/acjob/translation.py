"""Translate what an AscendJob (MindCluster's acjob) says about recovery into a policy, key by key.

The table with the reasons is in `docs/acjob.md`. Nothing is dropped in silence: what has no counterpart, and what
midstep does differently, comes along as notes, also in the policy's own comments.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources

import msgspec

from ...protocol.compat import StrEnum
from ...protocol.plain_yaml import write_yaml
from ...protocol.types import Rung
from ...protocol.wording import one_line
from ..files import parse_policy
from ..schema import DEFAULT_LADDER, Budget, Deadlines, Policy, RungPolicy, SubHealthAction, default_policy
from .reading import ACTION_TIME_LIMIT, PODS_RESTARTED, WAITS_FOR_PROCESSES, AscendJob, Strategy, read_acjob

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
_NPU_FILE = "npu.yaml"
_SECTIONS = ("communicator", "deadlines", "stall")
KEEPS_PROCESSES = frozenset({Rung.RETRY_STEP, Rung.RECOVER_IN_PLACE, Rung.RECOVER})
_LONGEST = 200  # of a comment, or a value in it


class NoteKind(StrEnum):
    """The subject of a note."""

    NO_COUNTERPART = "no counterpart"
    DIFFERENT = "different"


class Note(msgspec.Struct, frozen=True):
    """One note on a translated policy, in words."""

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
    base, more = base_policy(read)
    deadlines, times = _deadlines(read, base)
    more |= times
    action, origin = _sub_health(read, ladder)
    more["sub_health"] = origin
    policy = msgspec.structs.replace(base, ladder=ladder, deadlines=deadlines, sub_health=action)
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
            lines.append(
                "All machines need the job's token, which `midstep token` makes: MIDSTEP_TOKEN, or --token-file."
            )
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
    """Return the action for sub-healthy nodes, and the line that it comes from."""
    if job.sub_healthy is None:
        return SubHealthAction.IGNORE, "not in the file: MindCluster's default"
    if job.left_alone:
        return SubHealthAction.IGNORE, f"{job.sub_healthy}, without effect as fault-scheduling is off"
    action = _SUB_HEALTHY[job.sub_healthy.value]
    if action is SubHealthAction.DRAIN and not any(entry.rung is Rung.RECOVER for entry in ladder):
        return SubHealthAction.LEAVE_NOW, f"{job.sub_healthy}; a drain would need recover on the ladder"
    return action, f"{job.sub_healthy}"


# --- the device -------------------------------------------------------------------------------------------------------


@cache
def npu_policy() -> Policy:
    """Return the policy for NPUs that comes along."""
    return parse_policy(resources.files("midstep.configs").joinpath(_NPU_FILE).read_text(), _NPU_FILE)


def base_policy(job: AscendJob) -> tuple[Policy, dict[str, str]]:
    """Return the policy that the job's own settings change, and where each key of it comes from."""
    plain = default_policy()
    if not job.ranks_per_node:
        return plain, {}
    ours = npu_policy()
    sections = {name: getattr(ours, name) for name in _SECTIONS}
    origins = {"device": f"its pods ask for {job.ranks_per_node} NPUs each"}
    for name, section in sections.items():
        for key in section.__struct_fields__:
            if getattr(section, key) != getattr(getattr(plain, name), key):
                origins[f"{name}.{key}"] = f"as NPUs need it, see configs/{_NPU_FILE}"
    return msgspec.structs.replace(plain, device=ours.device, **sections), origins


# --- notes ------------------------------------------------------------------------------------------------------------


def notes_about(job: AscendJob, policy: Policy) -> tuple[Note, ...]:
    """Return the notes on the policy that was made of a job, those on differences first."""
    rungs = [entry.rung for entry in policy.ladder]
    notes = (*_differences(job, policy, rungs), *_without_counterpart(job, rungs))
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


def _without_counterpart(job: AscendJob, rungs: list[Rung]) -> list[Note]:
    texts = []
    if job.elastic and job.recover_strategy is not None:
        needs = "" if Rung.RESCHEDULE_POD in rungs else ", and pod-rescheduling to on, since that needs reschedule_pod"
        texts.append(
            f"line {job.recover_strategy.line}, recover-strategy: elastic-training. The file names no least number of "
            "nodes, and not every framework can train on fewer (Megatron cannot), so the world keeps its size. Where "
            f"your script can, set scale.min_nodes{needs}: all processes then restart from a checkpoint of the last "
            "step."
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


# --- the commented file -----------------------------------------------------------------------------------------------


def render_commented(policy: Policy, origins: Mapping[str, str], head: Iterable[str], tail: Iterable[str]) -> str:
    """Return `policy` as a file whose keys are those of `origins`, each with its origin as a comment.

    Keys are paths: `ladder.recover`, `ladder.recover.budget`, `deadlines.nodes_s`, `sub_health`. The whole ladder is
    always written. `head` and `tail` become comment lines. `parse_policy` makes the same policy of the text, if every
    key of `policy` that is not its default is among `origins`.
    """
    lines = [*(comment(line) for line in head), "", "ladder:"]
    for rung in policy.ladder:
        lines += _rung_lines(rung, origins)
    for key in origins:
        if "." not in key:
            lines += ["", f"{key}: {_flow(msgspec.to_builtins(getattr(policy, key)))}{_behind(origins, key)}"]
    for section in policy.__struct_fields__:
        keys = [key.partition(".")[2] for key in origins if key.startswith(f"{section}.") and section != "ladder"]
        lines += ["", f"{section}:"] if keys else []
        for key in keys:
            value = msgspec.to_builtins(getattr(getattr(policy, section), key))
            lines.append(f"  {key}: {_flow(value)}{_behind(origins, f'{section}.{key}')}")
    ending = [comment(line) for line in tail]
    return "\n".join([*lines, *([""] if ending else []), *ending]) + "\n"


def comment(text: str) -> str:
    """Return `text` as one comment line: whatever it holds, nothing of it becomes YAML."""
    return f"# {one_line(text)}".rstrip()


def _rung_lines(rung: RungPolicy, origins: Mapping[str, str]) -> list[str]:
    lines = [f"  - rung: {rung.rung.value}{_behind(origins, f'ladder.{rung.rung}')}"]
    if rung.rung is not Rung.STOP:
        lines.append(f"    attempts: {rung.attempts}")
        limits = msgspec.to_builtins(rung.budget)
        budget = _flow({key: value for key, value in limits.items() if value is not None or key == "per_job"})
        lines.append(f"    budget: {budget}{_behind(origins, f'ladder.{rung.rung}.budget')}")
    return lines


def _behind(origins: Mapping[str, str], key: str) -> str:
    return f" # {one_line(origins[key], _LONGEST)}" if key in origins else ""


def _flow(value: object) -> str:
    """Return a value as YAML on one line."""
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in plain.items()) + "}"
    return write_yaml(plain, on_one_line=True).splitlines()[0]
