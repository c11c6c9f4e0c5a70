"""`midstep inject`: cause a fault on purpose in a running job."""

import time
from pathlib import Path
from typing import Any

import click

from ..controller.endpoints.control_requests import (
    INJECTOR,
    ControlRequest,
    InjectRequest,
    KillNodeRequest,
    ReportFaultRequest,
    Request,
)
from ..launch.reached_job import ReachedJob, reached
from ..policies.fault_codes import LevelName, level_named
from ..protocol import types as t
from ..protocol.controls import InjectFault
from .display.plain import echo
from .frame import Command, operator_options, ranks_on, tell
from .numbers import DEVICE, PROBABILITY, RANK, STEP, Real
from .orders import asker, reason, why_option

FAULT_ACTIONS = tuple(
    action.value.replace("_", "-")
    for action in t.FaultAction
    if not action.value.startswith("flip_") and action is not t.FaultAction.SLOW
)
FLIPS = tuple(action.value.removeprefix("flip_") for action in t.FaultAction if action.value.startswith("flip_"))
FLIPPED = (*FLIPS, *(f"{flip}:{bits}" for flip in FLIPS for bits in t.FlippedBits if bits is not t.FlippedBits.ONE))
# Where a flip is to be seen as what it is: memory that changes while the step computes, and an update that is wrong.
FLIP_POINTS = {
    "parameter": "forward",
    "moment": "update",
    "gradient": "update",
    "activation": "forward",
    "checkpoint": "forward",
    "repair": "repair",
}
INJECTION_POINTS = tuple(point.value for point in t.InjectionPoint)
ASK_S = 10.0
WHICH = "name where the fault is to be caused: either --rank R or --node NAME (see `midstep status`)."


@click.command("inject", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--rank", type=RANK, metavar="R", help="The rank in which it is caused.")
@click.option(
    "--node",
    metavar="NAME",
    help="A node: it is killed, agent and processes at once; with --do, the fault is caused in each of its ranks.",
)
@click.option(
    "--do", "action", type=click.Choice(FAULT_ACTIONS), help="What happens.  [default: kill; for --node, kill-node]"
)
@click.option(
    "--at",
    "point",
    type=click.Choice(INJECTION_POINTS),
    help="The injection point: a place in a step or in a recovery.",
)
@click.option("--step", type=STEP, metavar="S", help="Only in the step with this index, from 0.")
@click.option("--operation", default="", metavar="OP", help="Only in this collective (allreduce, allgather, ...).")
@click.option("--group", "group", metavar="R,R,...", help="Only in the process group of these ranks.")
@click.option(
    "--flip",
    type=click.Choice(FLIPPED),
    metavar=f"{'|'.join(FLIPS)}[:BITS]",
    help="Instead of --do: flip a bit of an element, or BITS: sign, exponent, element, tensor (a bit of each element).",
)
@click.option(
    "--slow",
    "slow_s",
    type=Real(0.001, 3600.0),
    metavar="S",
    help="Instead of --do: S seconds more in each forward pass, for as long as the process lives.",
)
@click.option("--rate", type=PROBABILITY, default=0.0, metavar="P", help="Again and again, with this probability.")
@click.option(
    "--device-fault", metavar="CODE|LEVEL", help="Report a fault of the rank's device, or of the node, instead."
)
@click.option("--device", type=DEVICE, metavar="D", help="With --device-fault: a device of --node.")
@click.option("--recover", is_flag=True, help="With --device-fault: report that it has recovered.")
@click.option("--once", is_flag=True, help="With --device-fault: report it as a single event, which does not last.")
@why_option
@operator_options
def command(
    *,
    job: str | None,
    controller: str | None,
    token_file: Path | None,
    rank: int | None,
    node: str | None,
    action: str | None,
    point: str | None,
    step: int | None,
    operation: str,
    group: str | None,
    flip: str | None,
    slow_s: float | None,
    rate: float,
    device_fault: str | None,
    device: int | None,
    recover: bool,
    once: bool,
    why: str | None,
) -> None:
    """Cause a fault on purpose, to see the job recover. Without --at it happens now.

    \b
    What --do can be:
      kill       SIGKILL to the process of the rank
      stop       SIGSTOP: the process stalls
      raise      an exception in the train function
      exit       the process ends with status 1
      hang       the train thread sleeps for ever
      kill-node  the rank's node is killed, with its agent and all processes

    \b
    Only on the fake device (`midstep run --device fake`), at an injection point:
      memory-temporary, memory-persistent, memory-outside, suspect-memory, multi-bit, multi-bit-late, unsafe-tensor,
      out-of-memory, link-down, link-broken, link-up-fails, remote, hang-collective, task-queue-dead, drop-device

    Injection points of a step: forward, backward, collective, barrier, update, checkpoint; on Megatron reduction (of
    the gradients) and gather (of the parameters), too. Injection points of a recovery, for faults that come while
    another one is repaired: stop, clean, join, rebuild, repair, rollback. For a flip nothing is raised: votes of the
    ranks find it, or a peer that repeats the step, which is the point replay (docs/integrity.md). A slow rank is found
    by its own time of a step (docs/stragglers.md).

    A device fault is reported as by a detector, and lasts until --recover ends it: see docs/faults.md. A job whose
    policy says `allow_inject: false` refuses all of it.
    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant.

    \b
    Examples:
      midstep inject --rank 1                                  kill rank 1 of the latest job, now
      midstep inject demo --rank 0 --do raise --at backward    at the next backward pass
      midstep inject --rank 3 --do stop --at update --step 40  in step 40, during the update
      midstep inject --node node1                              the whole node
      midstep inject --rank 0 --do link-down --operation allreduce --group 0,1 --rate 0.01
      midstep inject --rank 2 --flip moment:sign               the sign of an element of the optimizer's state
      midstep inject --rank 1 --slow 0.2                       0.2 s more in each step
      midstep inject --device-fault 80E01801 --rank 1          report a fault of its device, by code or level
    """
    action, point = _flipped(flip, action, point, step, device_fault, chosen=bool(operation or group))
    if slow_s is not None:
        action, rate = _slowed(rank, slow_s, (action, point, step, operation, group, flip, rate, device_fault))
    _require_apart(device_fault is not None, (action, point, step, operation, group, rate), (device, recover, once))
    request: Request | None = None
    if device_fault is not None:
        request = report_of(device_fault, rank, node, device, recover=recover, once=once)
    elif node is None or action in {None, "kill-node"}:
        request = build(
            rank, node, action, point, step, operation=operation, group=group, rate=rate, for_s=slow_s or 0.0
        )
    elif rank is not None:
        raise click.UsageError(WHICH)
    target = reached(job, controller, token_file)
    ranks = ranks_on(target, node, ASK_S) if request is None and node is not None else ()
    of_ranks = [build(each, None, action, point, step, operation=operation, group=group, rate=rate) for each in ranks]
    for each in [request] if request is not None else of_ranks:
        echo(tell(target, each if why is None else _with_reason(target, each, why), ASK_S))


def _with_reason(job: ReachedJob, request: Request, why: str) -> Request:
    """Return the control that the journal keeps with its reason. Raises UsageError where there is none."""
    if not isinstance(request, InjectRequest):
        raise click.UsageError("--why is for a fault of a rank: --rank R, or --node NAME with --do.")
    return ControlRequest(InjectFault(request.fault), asker(job), reason(why))


def _flipped(
    flip: str | None,
    action: str | None,
    point: str | None,
    step: int | None,
    device_fault: str | None,
    *,
    chosen: bool,
) -> tuple[str | None, str | None]:
    """Return what is done and where, if it is to flip bits. `chosen`: a collective is named as the place."""
    if flip is None:
        return action, point
    if action is not None or device_fault is not None:
        raise click.UsageError("--flip says what is done: leave out --do and --device-fault.")
    kind = flip.partition(":")[0]
    if step is not None and f"flip_{kind}" == t.FaultAction.FLIP_REPAIR:
        raise click.UsageError("--flip repair strikes in the next repair of another rank: leave out --step.")
    return f"flip_{flip}", point if point is not None or chosen else FLIP_POINTS[kind]


def _slowed(rank: int | None, slow_s: float, others: tuple[object, ...]) -> tuple[str, float]:
    """Return what is done, and how often, to a rank that is to be slow. `others`: what says something else."""
    if rank is None or any(others):
        raise click.UsageError("--slow S is for a rank, and says all of it: --rank R --slow S, and nothing else.")
    return t.FaultAction.SLOW.value, 1.0


def _require_apart(of_device: bool, caused: tuple[Any, ...], reported: tuple[Any, ...]) -> None:
    """Refuse options of a fault that is caused with those of one that is only reported."""
    if reported != (None, False, False) and not of_device:
        raise click.UsageError("--device, --recover and --once are for --device-fault CODE|LEVEL.")
    if caused != (None, None, None, "", None, 0.0) and of_device:
        raise click.UsageError(
            "--device-fault only reports a fault: leave out --do, --at, --step, --operation, --group and --rate."
        )


def build(
    rank: int | None,
    node: str | None,
    action: str | None,
    point: str | None,
    step: int | None,
    *,
    operation: str = "",
    group: str | None = None,
    rate: float = 0.0,
    for_s: float = 0.0,
) -> Request:
    """Return what to ask the controller for. Raises UsageError where the options do not fit together."""
    if (rank is None) == (node is None):
        raise click.UsageError(WHICH)
    done, _, bits = (action or "kill").partition(":")
    what = t.FaultAction(done.replace("-", "_"))
    if node is not None:
        if (point, step, operation, group, rate) != (None, None, "", None, 0.0):
            raise click.UsageError(
                "--node NAME kills the node now. To kill it at an injection point: --rank R --do kill-node --at POINT."
            )
        return KillNodeRequest(node)
    assert rank is not None
    if operation or group:
        if point not in {None, t.InjectionPoint.COLLECTIVE.value}:
            raise click.UsageError(
                f"--operation and --group choose a collective: leave --at out, or write --at collective, not {point}."
            )
        point = t.InjectionPoint.COLLECTIVE.value
    if point is None and (step is not None or rate > 0):
        point = t.InjectionPoint.FORWARD.value  # the beginning of the step
    at = None if point is None else t.InjectionPoint(point)
    flipped = t.FlippedBits(bits or t.FlippedBits.ONE)
    members = _members(group)
    return InjectRequest(
        t.ArmedFault(rank, what, at, step, operation=operation, group=members, bits=flipped, rate=rate, for_s=for_s)
    )


def _members(group: str | None) -> tuple[int, ...]:
    try:
        return () if group is None else tuple(RANK(member) for member in group.split(","))
    except click.BadParameter:
        raise click.UsageError(f"--group {group!r}: write the ranks with commas between them, e.g. 0,1,2.") from None


def report_of(
    what: str, rank: int | None, node: str | None, device: int | None, *, recover: bool = False, once: bool = False
) -> ReportFaultRequest:
    """Return the report to make of a fault that is named by its level or by its code.

    What was reported is recovered by the same options with `recover`. Raises UsageError where they do not fit together.
    """
    if (rank is None) == (node is None):
        raise click.UsageError("name where the fault is: either --rank R or --node NAME (see `midstep status`).")
    if rank is not None and device is not None:
        raise click.UsageError("--device is for --node: a rank has its own device.")
    if recover and once:
        raise click.UsageError(
            "--once and --recover exclude each other: a single event does not last, so it cannot recover."
        )
    levels = {name.value.lower(): name for name in LevelName}
    named = levels.get(what.lower())
    where = f"rank{rank}" if rank is not None else f"{node}/{'' if device is None else device}"
    report = t.FaultReport(
        kind=t.FaultKind.DEVICE if rank is not None or device is not None else t.FaultKind.NODE,
        at_s=time.time(),
        seen_by=INJECTOR,
        detail="injected",
        rank=rank,
        node=node,
        device=device,
        level=t.FaultLevel.SOFTWARE if named is None else level_named(named),
        code=what if named is None else None,
        fault_id=f"{where}/{what.lower()}",
        assertion=t.Assertion.RECOVER if recover else t.Assertion.ONCE if once else t.Assertion.OCCUR,
    )
    return ReportFaultRequest(report)
