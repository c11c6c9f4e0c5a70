"""The sentence on top of the page: is the job training, and is anything asked of the operator? Pure."""

import msgspec

from ...controller.role_group import GroupPhase
from ...protocol.compat import StrEnum
from ...protocol.incidents import BudgetUse, Incident, JobStatus, NodeStatus, Outcome
from ...protocol.types import Rung
from ...protocol.wording import count, ranks_text
from ..views.causes import headline_cause, root_report
from ..views.wording import cell, duration_text, telling_line

NEARLY_SPENT = 0.8
MOST_NAMED = 3  # of nodes that are not used
_STARTING = frozenset({"waiting", "starting"})
_HOW = {
    Rung.RETRY_STEP: "the step is repeated",
    Rung.RECOVER_IN_PLACE: "in place",
    Rung.RECOVER: "on a spare node",
    Rung.RESCHEDULE_POD: "on a new node, all processes start again",
    Rung.RESCHEDULE_JOB: "on new nodes, all processes start again",
    Rung.STOP: "the job is being stopped",
}


class Mood(StrEnum):
    """The colour of the sentence."""

    TRAINING = "training"
    STARTING = "starting"
    RECOVERING = "recovering"
    ASKS = "asks"
    ENDED = "ended"
    FAILED = "failed"


class WholeJob(msgspec.Struct, frozen=True):
    """The job of several roles that a role belongs to. `reason`: why all begin again, or why the job ends or ended."""

    phase: GroupPhase
    exit_code: int | None = None
    reason: str = ""


class Sentence(msgspec.Struct, frozen=True):
    """The state of a job in one sentence. `asks`: all that an operator is asked for, the most pressing thing first.

    `headline` changes when the state does, so that it can be read out; `figures` may change at each look.
    """

    mood: Mood
    headline: str
    figures: str
    asks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole of it."""
        return f"{self.headline} ({self.figures})" if self.figures else self.headline


def sentence(status: JobStatus, note: str = "", whole: WholeJob | None = None) -> Sentence:
    """Return the sentence for a status. `note`: why the status is not live; empty if it is. `whole`: of a role."""
    if status.exit_code is not None:
        return _ended(status) if whole is None else _ended_in(whole, status)
    asks = asked(status)
    if note:
        first = "a controller: none answers, and until one does no fault is answered"
        return Sentence(
            Mood.ASKS, f"Asks you for {first}", f"last known at step {status.committed:,}", (first, note, *asks)
        )
    if status.held and status.controls.pause is not None:
        pause = status.controls.pause
        left = duration_text(max(0.0, pause.until_s - status.at_s))
        headline = f"Paused for {telling_line(pause.asked.text)}"
        return Sentence(Mood.RECOVERING, headline, f"{_step(status)}, trains on in {left} at the latest", asks)
    incident = status.incidents[-1] if status.incidents else None
    if incident is not None and incident.outcome is Outcome.OPEN:
        return _recovering(status, incident, asks)
    if status.holding:
        return Sentence(Mood.RECOVERING, f"Waits: {telling_line(status.holding)}", _step(status), asks)
    return _undisturbed(status, asks)


def is_over(status: JobStatus, whole: WholeJob | None = None) -> bool:
    """Tell whether a job has ended, and does not begin again by itself. `whole`: of a role, the job it belongs to."""
    return status.exit_code is not None and (whole is None or whole.phase is not GroupPhase.RESTARTING)


def asked(status: JobStatus) -> tuple[str, ...]:
    """Return what an operator could do for a job that has not ended, the most pressing thing first."""
    return (*_small_world(status), *_spares(status), *_budgets(status.budgets), *_unused(status.nodes))


def _undisturbed(status: JobStatus, asks: tuple[str, ...]) -> Sentence:
    if status.phase in _STARTING:
        return Sentence(Mood.STARTING, _starting(status), f"{_ranks(status)}", asks)
    if status.phase == "saving":
        return Sentence(Mood.RECOVERING, "Writes a checkpoint before it ends", _step(status), asks)
    if status.phase == "finishing":
        return Sentence(Mood.TRAINING, "Training is done, the processes wind up", _step(status), asks)
    doing = "Training up to a step boundary, for a planned change" if status.phase == "pausing" else "Training"
    if asks:
        more = f", and {count(len(asks) - 1, 'more thing')}" if len(asks) > 1 else ""
        return Sentence(Mood.ASKS, f"{doing}, and asks you for {asks[0]}{more}", _figures(status), asks)
    return Sentence(Mood.TRAINING, f"{doing}, nothing is asked of you", _figures(status))


def _starting(status: JobStatus) -> str:
    if status.phase == "waiting":
        return "Waits for nodes"
    # A script that does not call midstep is never further than this.
    run = bool(status.ranks) and all(rank.pid and rank.state == "starting" for rank in status.ranks)
    return "Its processes run, and none has called midstep so far" if run else "Starts its processes"


def _ended(status: JobStatus) -> Sentence:
    reason = telling_line(status.reason) or "no reason is known"
    if status.exit_code == 0:
        return Sentence(Mood.ENDED, f"Ended well: {reason}", _step(status))
    asks = (f"what to do now: `midstep report {cell(status.job)}` tells why it ended",)
    return Sentence(Mood.FAILED, f"Ended with exit code {status.exit_code}: {reason}", _step(status), asks)


def _ended_in(whole: WholeJob, status: JobStatus) -> Sentence:
    """Return the sentence for a role that has ended: it may have been stopped because of another one."""
    reason = telling_line(whole.reason) or "no reason is known"
    if whole.phase is GroupPhase.RESTARTING:
        return Sentence(Mood.RECOVERING, f"All roles begin again from their checkpoints: {reason}", _step(status))
    if whole.exit_code is None:  # the others train
        return _ended(status)
    if whole.exit_code == 0:
        return Sentence(Mood.ENDED, f"Ended well, with the job: {reason}", _step(status))
    asks = ("what to do now: `midstep report JOB/ROLE` tells why each role ended",)
    return Sentence(Mood.FAILED, f"Ended with the job, exit code {whole.exit_code}: {reason}", _step(status), asks)


def _recovering(status: JobStatus, incident: Incident, asks: tuple[str, ...]) -> Sentence:
    root = root_report(incident)
    if incident.replaced:
        who = ranks_text(incident.replaced)
    elif root is not None and root.rank is not None:
        who = ranks_text((root.rank,))
    else:
        who = cell(root.node) if root is not None and root.node else "the world"
    how = "not yet decided" if incident.rung is None else _HOW[incident.rung]
    so_far = duration_text(max(0.0, status.at_s - incident.began_s))
    figures = f"{so_far} so far, {cell(status.phase)}; {headline_cause(incident)}"
    homeless = tuple(rank.rank for rank in status.ranks if not rank.node)
    if homeless and status.phase in {"waiting", "quiescing"}:
        first = f"a node: {ranks_text(homeless)} {'has' if len(homeless) == 1 else 'have'} none"
        return Sentence(Mood.ASKS, f"Asks you for {first}", figures, (first, *asks))
    return Sentence(Mood.RECOVERING, f"Recovering: {who}, {how}", figures, asks)


def _small_world(status: JobStatus) -> tuple[str, ...]:
    present = len(status.ranks)
    if not 0 < present < status.ranks_asked:
        return ()
    return (f"more nodes: it trains with {present} of {status.ranks_asked} ranks",)


def _spares(status: JobStatus) -> tuple[str, ...]:
    """Ask for a spare node where one was used up: a job that never had one did not want any."""
    states = [node.state for node in status.nodes]
    gone = sum(state in {"lost", "isolated", "unfit"} for state in states)
    if not gone or "spare" in states or "requested" in states:
        return ()
    return (f"a spare node: none is left, {count(gone, 'node')} of the job {'is' if gone == 1 else 'are'} gone",)


def _budgets(budgets: tuple[BudgetUse, ...]) -> tuple[str, ...]:
    """Return the budgets that are spent, or nearly: when all are, the next fault stops the job."""
    spent = [each for each in budgets if each.limit and each.used >= each.limit]
    nearly = [each for each in budgets if each.limit > each.used >= NEARLY_SPENT * each.limit]
    told = [f"a look at the budget {each.name}: it is spent ({each.used} of {each.limit})" for each in spent]
    told += [f"a look at the budget {each.name}: {each.limit - each.used} of {each.limit} left" for each in nearly]
    return tuple(told)


def _unused(nodes: tuple[NodeStatus, ...]) -> tuple[str, ...]:
    unused = [node for node in nodes if node.state in {"isolated", "unfit"}]
    told = [
        f"a repair of node {cell(node.node)}, which is {node.state}"
        + (f": {telling_line(node.note)}" if node.note else "")
        for node in unused[:MOST_NAMED]
    ]
    if len(unused) > MOST_NAMED:
        told.append(f"a repair of {count(len(unused) - MOST_NAMED, 'more node')}")
    return tuple(told)


def _step(status: JobStatus) -> str:
    return f"step {status.committed:,}" if status.committed else "no step is known"


def _ranks(status: JobStatus) -> str:
    nodes = sum(node.state == "active" for node in status.nodes)
    return f"{len(status.ranks):,} rank{'' if len(status.ranks) == 1 else 's'} on {count(nodes, 'node')}"


def _figures(status: JobStatus) -> str:
    if not status.median_step_s:
        return f"{_step(status)}, {_ranks(status)}"
    rate = 1.0 / status.median_step_s
    pace = f"{rate:.1f} steps/s" if rate >= 1.0 else f"{duration_text(status.median_step_s)} a step"
    return f"{_step(status)}, {pace}, {_ranks(status)}"
