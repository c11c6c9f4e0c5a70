"""Training processes as values, and what each becomes by what happens to it: found out once, and remembered.

A generator cannot be copied. So a process is known by the digest of everything in it, together with one way that leads
there; what comes next is found by going that way again (`life.py`), once for each state and each thing that can happen.
"""

from types import GeneratorType
from typing import Any

import msgspec

from midstep.processor.session import SessionStage
from midstep.protocol.messages import Report
from midstep.protocol.types import Activity, LocalStateCopy, RepairPart

from .inputs import Birth, Input, Wait, pid_of
from .life import Life
from .snapshot import ATOMS, digest


class Standpoint(msgspec.Struct, frozen=True):
    """Where a process stands. `digest` stands for all of it; `way` leads there from its birth."""

    digest: bytes
    birth: Birth
    way: tuple[Input, ...]
    generation: int
    stage: SessionStage
    wait: Wait
    count: int
    held: int
    gradients: int | None
    ready: bool
    clean: bool
    linked: int
    box: tuple[LocalStateCopy, ...]
    part: RepairPart | None
    activity: Activity
    wrong: bool
    said: bytes | None  # at the commit barrier of its step, of what it holds
    proven: bool  # what it holds has passed a vote
    held_back: bool  # at a broken commit barrier, with its gradients


class Outcome(msgspec.Struct, frozen=True):
    """What has come of something: where the process stands now, what it has said, checkpoints that became complete."""

    at: Standpoint
    said: tuple[Report, ...]
    published: tuple[int, ...]
    broken: tuple[str, ...]


class Process(msgspec.Struct, frozen=True):
    """The process of a rank on a node. `hung`: it does nothing any more. `harmed`: something was done to it."""

    rank: int
    node: str
    incarnation: int
    at: Standpoint
    hung: bool = False
    harmed: bool = False
    stalled: bool = False  # its agent has reported that its step takes too long
    since: float = 0.0  # when something happened to it last

    @property
    def name(self) -> str:
        """Rank and incarnation."""
        return f"{self.rank}.{self.incarnation}"

    @property
    def pid(self) -> int:
        """A number that no other process has."""
        return pid_of(self.at.birth.order)

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others."""
        return (
            self.rank,
            self.node,
            self.incarnation,
            self.hung,
            self.harmed,
            self.stalled,
            self.since,
            self.at.digest,
        )

    @property
    def parked(self) -> bool:
        """Whether it has answered for barrier one and waits."""
        return self.at.stage is SessionStage.PARKED


class Lives:
    """Remembers what has come of what, for all processes of one exploration."""

    def __init__(self) -> None:
        self._known: dict[bytes, Standpoint] = {}
        self._outcomes: dict[tuple[object, object], Outcome] = {}

    def born(self, birth: Birth) -> Outcome:
        """Return a process in front of its train function."""
        key = (b"", digest(birth))
        if key not in self._outcomes:
            self._outcomes[key] = self._outcome(Life(birth), birth, ())
        return self._outcomes[key]

    def after(self, at: Standpoint, given: Input) -> Outcome:
        """Return what comes of `given` for a process that stands there."""
        key = (at.digest, digest(given))
        if key not in self._outcomes:
            life = Life(at.birth)
            for earlier in (*at.way, given):
                life.take(earlier)
            self._outcomes[key] = self._outcome(life, at.birth, (*at.way, given))
        return self._outcomes[key]

    def _outcome(self, life: Life, birth: Birth, way: tuple[Input, ...]) -> Outcome:
        stands = digest(_everything(life))
        if stands not in self._known:
            self._known[stands] = Standpoint(
                digest=stands,
                birth=birth,
                way=way,
                generation=life.session.generation,
                stage=life.session.stage,
                wait=life.wait,
                count=life.step_state.count,
                held=life.holdings.step,
                gradients=life.holdings.gradients,
                ready=life.step_state.ready,
                clean=life.step_state.clean,
                linked=life.linked,
                box=life.holdings.box,
                part=life.part,
                activity=life.activity,
                wrong=life.holdings.wrong,
                said=None if life.voting is None else life.voting.said,
                proven=life.voting is not None and bool(life.voting.votes._proven),
                held_back=len(life.stack) > 2,
            )
        return Outcome(self._known[stands], tuple(life.said), tuple(life.published), tuple(life.holdings.broken))


def _everything(life: Life) -> list[object]:
    """Return all that decides what the process will ever do."""
    order = life.birth.order
    return [
        (order.rank, order.incarnation, order.world_size, life.birth.node),
        (
            life.holdings.step,
            life.holdings.gradients,
            life.linked,
            life.holdings.struck,
            life.failed is None,
            life.activity,
            life.wait,
            life.to_publish,
            life.holdings.wrong,
            life.holdings.flipped,
        ),
        [] if life.voting is None else life.voting.everything,
        (life.holdings.box, life.met, life.entered, life.barrier, life.part),
        _atoms(vars(life.session)),
        _atoms(vars(life.step_state)),
        _atoms(vars(life.steps)),
        _atoms({"held": life.loop._held, "first": life.loop._first_step, "early": life.loop._early}),
        [_frames(generator) for generator in life.stack],
    ]


def _frames(generator: Any) -> list[object]:
    """Return where a generator and those in it stand."""
    frames: list[object] = []
    while isinstance(generator, GeneratorType) and generator.gi_frame is not None:
        frame = generator.gi_frame
        frames.append((frame.f_code.co_name, frame.f_lasti, _atoms(frame.f_locals)))
        generator = generator.gi_yieldfrom
    return frames


def _atoms(values: dict[str, Any]) -> list[object]:
    return [
        (name, sorted(value) if isinstance(value, frozenset) else value)
        for name, value in values.items()
        if isinstance(value, ATOMS)
    ]
