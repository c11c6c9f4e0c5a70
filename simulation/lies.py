"""Processes that say what is not true: of another step, an earlier life, another generation.

What is said of the content of the state is believed, as checksums guard only its way. Everything else must not bring
the controller to break an invariant.
"""

import enum
import random

import msgspec

from ..protocol.messages import (
    CheckpointSaved,
    Envelope,
    Message,
    RankFinished,
    RankJoined,
    RankQuiesced,
    RankReady,
    StepCommitted,
)

_FAR = 1_000_000  # steps and messages that no played job gets to
_OF_A_LIFE = (RankJoined, RankQuiesced, RankReady, StepCommitted, RankFinished)
_OF_A_GENERATION = (RankQuiesced, RankReady, StepCommitted, RankFinished, CheckpointSaved)


class Lie(enum.StrEnum):
    """What is wrong with the next message."""

    EARLIER_LIFE = "an earlier incarnation"
    LATER_LIFE = "an incarnation that is yet to come"
    OLD_GENERATION = "a generation that is over"
    NEW_GENERATION = "a generation that nobody has opened"
    WRONG_STEP = "a step where it does not stand"
    OLD_WORDS = "again what it said in earlier generations"


def tell(body: Message, lie: Lie, chance: random.Random) -> Message | None:
    """Return the message with the lie in it; None where it has no room for it."""
    if lie in {Lie.EARLIER_LIFE, Lie.LATER_LIFE} and isinstance(body, _OF_A_LIFE):
        shift = -1 if lie is Lie.EARLIER_LIFE else 1
        return msgspec.structs.replace(body, incarnation=max(0, body.incarnation + shift))
    if lie in {Lie.OLD_GENERATION, Lie.NEW_GENERATION} and isinstance(body, _OF_A_GENERATION):
        shift = -1 if lie is Lie.OLD_GENERATION else chance.choice((1, 7))
        return msgspec.structs.replace(body, generation=max(0, body.generation + shift))
    if lie is Lie.WRONG_STEP and isinstance(body, RankReady):
        return msgspec.structs.replace(body, step=max(0, body.step + chance.choice((-1, 1, 3))))
    if lie is Lie.WRONG_STEP and isinstance(body, StepCommitted):
        return msgspec.structs.replace(body, committed=body.committed + chance.choice((1, 3)))
    return None


def forged(envelope: Envelope, rank: int) -> Envelope:
    """Return what an agent of another node says in the name of a rank that it overhears: that it has finished."""
    body = RankFinished(rank, envelope.generation, envelope.session, _FAR)
    return msgspec.structs.replace(envelope, number=envelope.number + _FAR, body=body)
