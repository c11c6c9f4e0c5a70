"""The world that a seed makes: its size, its policy, its network, and whether the script is resilient at all."""

import random
from typing import Literal

import msgspec

from ...controller.recovery.state import Phase
from ...policies.schema import (
    Budget,
    CheckpointPolicy,
    Deadlines,
    HostCopyPolicy,
    IntegrityPolicy,
    NodePolicy,
    Policy,
    RolePolicy,
    RungPolicy,
    ScalePolicy,
    SlowAction,
    SlowPolicy,
    default_policy,
)
from ...protocol.types import JobSettings, JobSpec, RestoreSource, Rung, StandbyDepth

_STOP = RungPolicy(Rung.STOP)
BUILDING_AHEAD = 0.1  # share of the worlds in which processes are built ahead of faults
RESTARTING_AT_ONCE = 0.2  # share of the worlds that save nothing before a rung restarts everybody
IN_PLACE = 0.5  # share of those that then grow without another process of any rank
SCALING = 0.3  # share of the worlds of several nodes that may go on with fewer

POLICIES: tuple[Policy, ...] = (
    default_policy(),
    default_policy(),
    Policy(ladder=(RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_rank=1, per_job=2)), RungPolicy(Rung.STOP))),
    Policy(
        ladder=(
            RungPolicy(Rung.RETRY_STEP, attempts=1, budget=Budget(per_job=1, window_s=0.0)),
            RungPolicy(Rung.RECOVER_IN_PLACE, attempts=1, budget=Budget(per_rank=1, per_job=3, window_s=10.0)),
            RungPolicy(Rung.RECOVER, attempts=1, budget=Budget(per_job=1)),
            RungPolicy(Rung.RESCHEDULE_POD, attempts=1, budget=Budget(per_job=2)),
            RungPolicy(Rung.RESCHEDULE_JOB, attempts=1, budget=Budget(per_job=1)),
            RungPolicy(Rung.STOP),
        ),
        save_before_reschedule=False,
    ),
    Policy(restore=(RestoreSource.CHECKPOINT,)),
    Policy(
        node=NodePolicy(failures=1),
        roles={
            "trainer": RolePolicy("1-2", ladder=(RungPolicy(Rung.RECOVER_IN_PLACE), RungPolicy(Rung.RECOVER), _STOP)),
            "evaluator": RolePolicy("3"),
        },
    ),
    Policy(ladder=(RungPolicy(Rung.RESCHEDULE_POD), RungPolicy(Rung.STOP)), checkpoint=CheckpointPolicy(every_steps=5)),
    Policy(
        ladder=tuple(
            RungPolicy(rung, attempts=5, budget=Budget(per_job=None))
            for rung in Rung
            if rung not in {Rung.RESCHEDULE_JOB}
        ),
        deadlines=Deadlines(finish_s=20.0, first_step_s=20.0, nodes_s=15.0),
    ),
)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One world. `replicas`: ranks that hold the same shard. `capacity`: nodes that the platform can still make.

    `loss` and `twice` are probabilities per message, `delay_s` is the mean of an exponential delay. A `plain` script
    never becomes resilient, and is restarted as a whole up to `max_restarts` times. With `builds_ahead` nodes say what
    they have prepared, and spares build processes for ranks of others.
    """

    nodes: int
    spares: int
    ranks_per_node: int
    total_steps: int
    checkpoint_every: int
    slow_checkpoints: bool
    policy: Policy
    replicas: int
    can_create_nodes: bool
    capacity: int
    delay_s: float
    loss: float
    twice: float
    plain: bool
    max_restarts: int
    builds_ahead: bool = False

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    def job(self) -> JobSpec:
        """Return the job that the machine gets."""
        return JobSpec(
            job="simulated", command=("train.py",), is_module=False, no_python=False, environment={},
            working_directory="/", job_directory="/", world_size=self.size, ranks_per_node=self.ranks_per_node,
            nodes=self.nodes, spare_nodes=self.spares, max_restarts=self.max_restarts,
            settings=JobSettings(
                standby_depth=StandbyDepth.BUILT if self.builds_ahead else StandbyDepth.IMPORTED,
                integrity_every_steps=None if (every := self.policy.integrity.every_steps) == "auto" else every,
                integrity_then=self.policy.integrity.then,
                integrity_audit_steps=self.policy.integrity.audit_steps,
            ),
        )  # fmt: skip

    def describe(self) -> str:
        """Return it in one line, for the head of a transcript."""
        script = f"plain script, max-restarts {self.max_restarts}" if self.plain else f"{self.replicas} replicas"
        least = self.policy.scale.min_nodes
        smaller = "" if least is None else f"no fewer than {least} nodes, "
        return (
            f"{self.size} ranks, {self.ranks_per_node} per node, {self.spares} spares, {smaller}{script}, "
            f"{self.total_steps} steps, checkpoint every {self.checkpoint_every}, "
            f"creates nodes: {self.can_create_nodes}, loss {self.loss}, twice {self.twice}, ladder "
            + ", ".join(entry.rung for entry in self.policy.ladder)
        )


def _that_scales(setting: Setting, chance: random.Random) -> Setting:
    """Let a world go on with fewer nodes, and mostly have none that could take the place of another."""
    policy = setting.policy
    on_ladder = any(entry.rung is Rung.RESCHEDULE_POD for entry in policy.ladder)
    if not on_ladder or policy.roles or setting.plain or RestoreSource.CHECKPOINT not in policy.restore:
        policy = default_policy()
    scale = ScalePolicy(min_nodes=chance.choice((1, 1, 2)), min_interval_s=chance.choice((0.0, 0.5, 5.0)))
    # Drawn apart: all else of a seed is as it would be without.
    in_place = RestoreSource.REPLICA in policy.restore and random.Random(repr(setting)).random() < IN_PLACE
    scale = msgspec.structs.replace(scale, in_place=in_place)
    lonely = chance.random() < 0.8
    node = policy.node if lonely else NodePolicy(failures=chance.choice((0, 1, 6)))  # left early, if others come
    return msgspec.structs.replace(
        setting,
        policy=msgspec.structs.replace(policy, scale=scale, node=node),
        spares=0 if lonely else setting.spares,
        can_create_nodes=setting.can_create_nodes and not lonely,
        capacity=0 if lonely else setting.capacity,
        replicas=setting.size if in_place else setting.replicas,
        total_steps=max(20, setting.total_steps),
    )


def draw_saving(setting: Setting, chance: random.Random) -> Setting:
    """Have some worlds restart at once, without a checkpoint of what is alive."""
    if chance.random() >= RESTARTING_AT_ONCE:
        return setting
    return msgspec.structs.replace(
        setting, policy=msgspec.structs.replace(setting.policy, save_before_reschedule=False)
    )  # fmt: skip


def with_copies(setting: Setting, chance: random.Random) -> Setting:
    """Have ranks copy their state into host memory, and spread it over more of them than there are replicas."""
    policy, copies = setting.policy, [HostCopyPolicy(), *(HostCopyPolicy(every_steps=every) for every in (1, 1, 2, 5))]
    if chance.random() < 0.5:
        copies = [msgspec.structs.replace(each, copies=2) for each in copies]
    best_first = (RestoreSource.REPLICA, RestoreSource.HOST_COPY, RestoreSource.CHECKPOINT)
    restore = tuple(each for each in best_first if each in {*policy.restore, RestoreSource.HOST_COPY})
    policy = msgspec.structs.replace(policy, restore=restore, host_copy=chance.choice(copies))
    replicas = chance.choice((1, 1, setting.replicas))
    if replicas < setting.size:  # those that join would find nothing
        policy = msgspec.structs.replace(policy, scale=msgspec.structs.replace(policy.scale, in_place=False))
    return msgspec.structs.replace(setting, policy=policy, replicas=replicas)


def with_slow_ranks(setting: Setting, least_nodes: int = 2) -> Setting:
    """Have slow nodes drained, in a long job with replicas."""
    slow = SlowPolicy(then=SlowAction.DRAIN, for_s=0.0)
    policy = msgspec.structs.replace(default_policy(), slow=slow)
    return msgspec.structs.replace(
        setting, policy=policy, plain=False, nodes=max(least_nodes, setting.nodes), spares=max(1, setting.spares),
        replicas=max(least_nodes, setting.nodes) * setting.ranks_per_node, total_steps=240, slow_checkpoints=False,
    )  # fmt: skip


def with_votes(setting: Setting, chance: random.Random) -> Setting:
    """Have at least three ranks that hold the same vote on it, with something to go back to in most worlds."""
    every: tuple[int | Literal["auto"], ...] = (1, 1, 1, 2, 3, "auto")
    integrity = IntegrityPolicy(every_steps=chance.choice(every), strikes=chance.choice((2, 2, 3)))
    copies = (RestoreSource.HOST_COPY,) * (chance.random() < 0.6)
    policy = msgspec.structs.replace(
        default_policy(),
        integrity=integrity,
        restore=(RestoreSource.REPLICA, *copies, RestoreSource.CHECKPOINT),
        host_copy=HostCopyPolicy(every_steps=chance.choice((1, 2))),
    )
    nodes, ranks_per_node = chance.choice(((3, 1), (2, 2), (3, 1), (3, 2)))
    spares = chance.choice((0, 1, 2))
    return msgspec.structs.replace(
        setting, policy=policy, plain=False, nodes=nodes, ranks_per_node=ranks_per_node, spares=spares,
        replicas=nodes * ranks_per_node, total_steps=chance.choice((10, 20, 40)), slow_checkpoints=False,
        checkpoint_every=chance.choice((0, 5, 7)),
    )  # fmt: skip


def with_audits(setting: Setting, chance: random.Random) -> Setting:
    """Have at least three ranks that repeat each other's steps, with votes beside in some worlds."""
    setting = with_votes(setting, chance)
    integrity = msgspec.structs.replace(
        setting.policy.integrity, every_steps=chance.choice((0, 0, 1, 3)), audit_steps=chance.choice((1, 2, 5))
    )
    policy = msgspec.structs.replace(setting.policy, integrity=integrity)
    return msgspec.structs.replace(setting, policy=policy, total_steps=max(20, setting.total_steps))


def with_growth(setting: Setting, chance: random.Random) -> Setting:
    """Have a world that gets smaller with each node that it loses, and grows in place with each that comes."""
    nodes, ranks_per_node = chance.choice((2, 2, 3, 4)), chance.choice((1, 2))
    scale = ScalePolicy(min_nodes=1, min_interval_s=chance.choice((0.0, 0.5)), in_place=True)
    policy = msgspec.structs.replace(default_policy(), scale=scale)
    return msgspec.structs.replace(
        setting, policy=policy, plain=False, nodes=nodes, ranks_per_node=ranks_per_node, spares=0,
        replicas=nodes * ranks_per_node, total_steps=chance.choice((400, 600)), can_create_nodes=False, capacity=0,
        slow_checkpoints=False,
    )  # fmt: skip


def draw_ahead(setting: Setting, chance: random.Random) -> Setting:
    """Have processes built ahead in some worlds."""
    return msgspec.structs.replace(setting, builds_ahead=chance.random() < BUILDING_AHEAD)


def draw_setting(chance: random.Random, focus: Phase | None = None) -> Setting:
    """Draw a world. With a `focus` on its end the job is short."""
    nodes, ranks_per_node = chance.choice((1, 2, 2, 3)), chance.choice((1, 2))
    size = nodes * ranks_per_node
    can_create_nodes = chance.random() < 0.5
    setting = Setting(
        nodes=nodes,
        spares=chance.choice((0, 1, 2)),
        ranks_per_node=ranks_per_node,
        total_steps=3 if focus is Phase.FINISHING else chance.choice((3, 10, 20, 40, 60)),
        checkpoint_every=chance.choice((0, 5, 7)),
        slow_checkpoints=chance.random() < 0.1,
        policy=chance.choice(POLICIES),
        replicas=chance.choice((1, 2, size, size)),
        can_create_nodes=can_create_nodes,
        capacity=chance.choice((0, 1, 3)) if can_create_nodes else 0,
        delay_s=chance.choice((0.0002, 0.001, 0.01)),
        loss=chance.choice((0.0, 0.0, 0.01, 0.05)),
        twice=chance.choice((0.0, 0.02, 0.2)),
        plain=chance.random() < 0.08,
        max_restarts=chance.choice((0, 1, 3)),
    )
    if nodes > 1 and chance.random() < SCALING:
        setting = _that_scales(setting, chance)
    if focus in {Phase.PAUSING, Phase.SUSPECTING}:  # what a drain needs is there
        changes = {
            "nodes": max(2, nodes),
            "spares": 2,
            "replicas": chance.choice((1, 2 * size)),
            "total_steps": max(20, setting.total_steps),
            "plain": False,
        }
        setting = msgspec.structs.replace(setting, policy=default_policy(), **changes)
    return setting
