"""The buttons of the page: what each asks for, which role it takes, and what is said before it is confirmed.

A button is a control of `docs/controls.md`, and what it sends is the request of the command. The browser is sent the
words and the fields; what comes back is held against them, wherever it comes from. Pure.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import click
import msgspec
from msgspec import Meta

from ...controller.endpoints.control_requests import (
    ApplyPolicyRequest,
    ControlRequest,
    LeaveNodeRequest,
    Request,
    StopJobRequest,
    refusal_of,
)
from ...policies.schema import Policy
from ...protocol import controls as c
from ...protocol.compat import StrEnum
from ...protocol.identities import Role
from ...protocol.types import ArmedFault, FaultAction, Rung
from ..numbers import seconds_in

MOST_NAME = 64
MOST_VALUE = 256
_RUNGS = tuple(rung.value for rung in Rung if rung is not Rung.STOP)
_SCOPES = ("job", "node", "rank")
_FAULTS = ("kill", "stop", "raise", "exit", "hang", "kill_node")
Value = Annotated[str, Meta(max_length=MOST_VALUE)]


class ButtonPlace(StrEnum):
    """The part of the page in which a button stands; beside a node or a rank it is about that one."""

    JOB = "job"
    LADDER = "ladder"
    NODE = "node"
    RANK = "rank"
    CONTROLLERS = "controllers"


class FilledIn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something to be filled in. `choices`: one of these; none: a text."""

    name: str
    label: str
    default: str = ""
    choices: tuple[str, ...] = ()


class Press(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A button that was pressed and confirmed: by whom, as they say, and why."""

    button: Value
    by: Annotated[str, Meta(min_length=1, max_length=MOST_NAME)]
    why: c.Why
    values: Annotated[dict[Value, Value], Meta(max_length=4)] = {}


class InForce(msgspec.Struct, frozen=True):
    """The policy that a job goes by, after so many changes while it ran."""

    policy: Policy
    changes: int


class Button(msgspec.Struct, frozen=True):
    """One control. `says`: what will happen, with the node or rank in braces. `paused`: only then, or only else."""

    name: str
    label: str
    place: ButtonPlace
    says: str
    request: Callable[[Mapping[str, str], str, str, InForce | None], Request]
    fields: tuple[FilledIn, ...] = ()
    role: Role = Role.OPERATOR
    paused: bool | None = None


class WrongPress(ValueError):
    """Raised for what is no button, and for values that do not fit; the text says what is wrong."""


def request_of(press: Press, role: Role, in_force: InForce | None = None) -> Request:
    """Return what is asked of the controller. Raises WrongPress, and PermissionError where the role may not.

    `in_force`: the policy that a change would be made to; None: it is not known here.
    """
    button = next((each for each in BUTTONS if each.name == press.button), None)
    if button is None:
        raise WrongPress(f"there is no button {press.button!r}")
    expected = {field.name for field in button.fields} | _OF_PLACE.get(button.place, set())
    if set(press.values) != expected:
        raise WrongPress(f"{button.label} takes {', '.join(sorted(expected)) or 'no values'}")
    for field in button.fields:
        if field.choices and press.values[field.name] not in field.choices:
            raise WrongPress(f"{field.label}: one of {', '.join(field.choices)}")
    why = press.why.strip()
    if not why or not press.by.strip():
        raise WrongPress("a name and a reason are needed")
    try:
        request = button.request(press.values, f"{press.by.strip()}, {role} of the page", why, in_force)
        request = msgspec.convert(msgspec.to_builtins(request), type(request))  # within the bounds of the wire
    except (click.BadParameter, ValueError, msgspec.ValidationError) as error:
        raise WrongPress(getattr(error, "message", "") or str(error)) from error
    refused = refusal_of(role, request)
    if refused is not None:
        raise PermissionError(refused.reason)
    return request


def told_buttons(role: Role) -> list[dict[str, Any]]:
    """Return the buttons that a role has, for the browser."""
    return [
        {
            "name": each.name,
            "label": each.label,
            "place": str(each.place),
            "says": each.says,
            "paused": each.paused,
            "fields": msgspec.to_builtins(each.fields),
        }
        for each in BUTTONS
        if role.covers(each.role)
    ]


_Asks = Callable[[Mapping[str, str], str, str, InForce | None], Request]


def _control(make: Callable[[Mapping[str, str]], c.Control]) -> _Asks:
    return lambda values, by, why, in_force: ControlRequest(make(values), by, why)


def _leave(*, at_once: bool) -> _Asks:
    return lambda values, by, why, in_force: LeaveNodeRequest(values["node"], by, why, at_once)


def _limited(values: Mapping[str, str], by: str, why: str, in_force: InForce | None) -> Request:
    """Change the limit of a budget, and nothing else of the policy in force."""
    if in_force is None:
        raise ValueError("the policy in force is not known here: open the page again")
    ladder, rung, scope = in_force.policy.ladder, Rung(values["rung"]), f"per_{values['scope']}"
    if in_force.policy.rung(rung) is None:
        raise ValueError(f"the policy's ladder has no {rung}")
    limit = _number(values["limit"], "limit")
    changed = tuple(
        each
        if each.rung is not rung
        else msgspec.structs.replace(each, budget=msgspec.structs.replace(each.budget, **{scope: limit}))
        for each in ladder
    )
    policy = msgspec.structs.replace(in_force.policy, ladder=changed)
    if policy == in_force.policy:
        raise ValueError("that is the limit already")
    return ApplyPolicyRequest(policy, in_force.changes + 1, by, why)


def _lasting_s(values: Mapping[str, str]) -> int:
    for_s = seconds_in(values["for"])
    if for_s > c.MOST_S:
        raise ValueError("for: at most 7d")
    return for_s


def _failover(values: Mapping[str, str]) -> c.Control:
    for_s = seconds_in(values["for"])
    if for_s > c.MOST_FAILOVER_S:
        raise ValueError("for: at most 1d")
    return c.PauseFailover(for_s)


def _fault(values: Mapping[str, str]) -> c.Control:
    return c.InjectFault(ArmedFault(_rank(values), FaultAction(values["do"])))


def _rank(values: Mapping[str, str]) -> int:
    return _number(values["rank"], "rank")


def _number(text: str, what: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ValueError(f"{what}: a number")
    return int(text)


_OF_PLACE = {ButtonPlace.NODE: {"node"}, ButtonPlace.RANK: {"rank"}}
_FOR = FilledIn("for", "For how long (90s, 20m, 2h)", "1h")
BUTTONS = (
    Button(
        "pause",
        "Pause",
        ButtonPlace.JOB,
        "All ranks stop at a step boundary about a second ahead. They keep their processes and devices, repeat no "
        "step, and train on when the time is over, or when somebody has them resume.",
        _control(lambda values: c.PauseTraining(_lasting_s(values))),
        (_FOR,),
        paused=False,
    ),
    Button(
        "resume",
        "Resume",
        ButtonPlace.JOB,
        "The pause ends now: the same processes train on from where they stand.",
        _control(lambda values: c.EndPause()),
        paused=True,
    ),
    Button(
        "save",
        "Save now",
        ButtonPlace.JOB,
        "All ranks stop at the next step boundary, write a checkpoint, and train on.",
        _control(lambda values: c.SaveNow()),
    ),
    Button(
        "acknowledge",
        "Acknowledge",
        ButtonPlace.JOB,
        "Nothing happens to the job. It is shown that you have seen what it asks for, with your reason.",
        _control(lambda values: c.Acknowledge()),
    ),
    Button(
        "stop",
        "Stop the job",
        ButtonPlace.JOB,
        "The job ends: a checkpoint is written where that is possible, then all its processes end. It can be "
        "resumed later. Pressed again, it does not wait for the checkpoint any more.",
        lambda values, by, why, in_force: StopJobRequest(f"{why} ({by})"),
    ),
    Button(
        "budget",
        "Set a budget",
        ButtonPlace.LADDER,
        "From the next decision on the rung may be taken so many times within the window of its budget, for the job, "
        "on one node or for one rank. What is spent already stays spent. It is a change of the policy in force.",
        _limited,
        (
            FilledIn("rung", "Rung", _RUNGS[1], _RUNGS),
            FilledIn("scope", "For", _SCOPES[0], _SCOPES),
            FilledIn("limit", "How many times"),
        ),
    ),
    Button(
        "forbid",
        "Forbid a rung",
        ButtonPlace.LADDER,
        "For this time the rung is taken for no incident. The next one that fits is taken in its place, which may be "
        "the stop of the job.",
        _control(lambda values: c.ForbidRung(Rung(values["rung"]), _lasting_s(values))),
        (FilledIn("rung", "Rung", _RUNGS[0], _RUNGS), _FOR),
    ),
    Button(
        "force",
        "Force a rung",
        ButtonPlace.LADDER,
        "For this time each incident begins at the rung: no cheaper one is taken. Budgets count as ever.",
        _control(lambda values: c.ForceRung(Rung(values["rung"]), _lasting_s(values))),
        (FilledIn("rung", "Rung", _RUNGS[1], _RUNGS), _FOR),
    ),
    Button(
        "allow",
        "Allow all rungs",
        ButtonPlace.LADDER,
        "All that was forbidden or forced ends: the ladder is the policy's again.",
        _control(lambda values: c.AllowRungs()),
    ),
    Button(
        "drain",
        "Drain",
        ButtonPlace.NODE,
        "The ranks of {node} move to a spare node at a step boundary, and {node} is not used until it is released. No "
        "step is repeated; it takes from the budget of recover.",
        _leave(at_once=False),
    ),
    Button(
        "isolate",
        "Isolate",
        ButtonPlace.NODE,
        "{node} is left now: its ranks get other processes elsewhere, by the ladder, and the step is repeated. It is "
        "not used until it is released.",
        _leave(at_once=True),
    ),
    Button(
        "release",
        "Release",
        ButtonPlace.NODE,
        "{node} may be used again, if no detector speaks against it.",
        _control(lambda values: c.ReleaseNode(values["node"])),
    ),
    Button(
        "restart",
        "Restart",
        ButtonPlace.RANK,
        "Rank {rank} gets another process on its node, at a step boundary. No step is repeated, no budget is spent.",
        _control(lambda values: c.RestartRank(_rank(values))),
    ),
    Button(
        "inject",
        "Cause a fault",
        ButtonPlace.RANK,
        "The fault is caused in rank {rank} now, on purpose. The job recovers as from any fault: that takes from its "
        "budgets, and may stop it. kill_node kills the whole node of the rank.",
        _control(_fault),
        (FilledIn("do", "What happens", _FAULTS[0], _FAULTS),),
    ),
    Button(
        "promote",
        "Promote a controller",
        ButtonPlace.CONTROLLERS,
        "The controller of this name, which stands by, leads from now on, and the present one stands by.",
        _control(lambda values: c.PromoteController(values["controller"])),
        (FilledIn("controller", "Name of the controller"),),
        Role.ADMIN,
    ),
    Button(
        "pause-failover",
        "Pause failover",
        ButtonPlace.CONTROLLERS,
        "For this time no controller that stands by takes over. If the present one ends meanwhile, faults are not "
        "answered.",
        _control(_failover),
        (FilledIn("for", "For how long (90s, 20m, 2h)", "10m"),),
        Role.ADMIN,
    ),
    Button(
        "end-failover-pause",
        "End the pause of the failover",
        ButtonPlace.CONTROLLERS,
        "Controllers that stand by take over again.",
        _control(lambda values: c.PauseFailover(0)),
        role=Role.ADMIN,
    ),
)
