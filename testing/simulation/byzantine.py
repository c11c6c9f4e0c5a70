"""Byzantine messages: of another step, an earlier incarnation, another generation.

What is said of the content of the state is believed, as checksums guard only its way. Everything else must not bring
the controller to break an invariant.
"""

import random

import msgspec

from ...protocol import messages as m
from ...protocol.enums import StrEnum

_FAR = 1_000_000  # steps and messages that no simulated job gets to
_OF_AN_INCARNATION = (m.RankJoined, m.RankQuiesced, m.RankReady, m.StepCommitted, m.RankFinished)
_OF_A_GENERATION = (m.RankQuiesced, m.RankReady, m.StepCommitted, m.RankFinished, m.CheckpointSaved)


class Byzantine(StrEnum):
    """What is wrong with the next message."""

    EARLIER_INCARNATION = "an earlier incarnation"
    LATER_INCARNATION = "an incarnation that is yet to come"
    OLD_GENERATION = "a generation that is over"
    NEW_GENERATION = "a generation that was never opened"
    WRONG_STEP = "a step where it does not stand"
    REPEATED = "again what it said in earlier generations"


def falsified(body: m.Message, kind: Byzantine, chance: random.Random) -> m.Message | None:
    """Return the message with that wrong in it; None where it has no room for it."""
    if kind in {Byzantine.EARLIER_INCARNATION, Byzantine.LATER_INCARNATION} and isinstance(body, _OF_AN_INCARNATION):
        shift = -1 if kind is Byzantine.EARLIER_INCARNATION else 1
        return msgspec.structs.replace(body, incarnation=max(0, body.incarnation + shift))
    if kind in {Byzantine.OLD_GENERATION, Byzantine.NEW_GENERATION} and isinstance(body, _OF_A_GENERATION):
        shift = -1 if kind is Byzantine.OLD_GENERATION else chance.choice((1, 7))
        return msgspec.structs.replace(body, generation=max(0, body.generation + shift))
    if kind is Byzantine.WRONG_STEP and isinstance(body, m.RankReady):
        return msgspec.structs.replace(body, step=max(0, body.step + chance.choice((-1, 1, 3))))
    if kind is Byzantine.WRONG_STEP and isinstance(body, m.StepCommitted):
        return msgspec.structs.replace(body, committed=body.committed + chance.choice((1, 3)))
    return None


def forged(envelope: m.Envelope, rank: int) -> m.Envelope:
    """Return what an agent of another node says in the name of a rank that it overhears: that it has finished."""
    body = m.RankFinished(rank, envelope.generation, envelope.session, _FAR)
    return msgspec.structs.replace(envelope, number=envelope.number + _FAR, body=body)
