"""Exact deduplication of numbered messages, in a few hundred bytes per sender.

A sender never has two messages to one receiver in flight whose numbers lie `WINDOW` or more apart. So a number that
is that far behind the highest one is old news, and one bit for each of the others is enough.
"""

import math

WINDOW = 4096
_MASK = (1 << WINDOW) - 1


class SenderMemory:
    """What is remembered of one sender: its session, when it was heard, which of its last `WINDOW` numbers were taken.

    Bit i of `taken` and `acknowledged` stands for the number `highest - i`.
    """

    __slots__ = ("acknowledged", "heard_s", "highest", "session", "taken")

    def __init__(self, session: int) -> None:
        self.session = session
        self.heard_s = -math.inf  # by this process of the receiver
        self.highest = 0
        self.taken = 0
        self.acknowledged = 0

    def mark_taken(self, number: int) -> bool:
        """Remember `number`; False if it was known already."""
        ahead = number - self.highest
        if ahead > 0:
            shift = min(ahead, WINDOW)
            self.taken = (self.taken << shift) & _MASK | 1
            self.acknowledged = (self.acknowledged << shift) & _MASK
            self.highest = number
            return True
        bit = 1 << -ahead if -ahead < WINDOW else 0
        if not bit or self.taken & bit:
            return False
        self.taken |= bit
        return True

    def was_taken(self, number: int) -> bool:
        """Say whether `number` is known. What is older than the window is."""
        age = self.highest - number
        return age >= WINDOW or (age >= 0 and bool(self.taken >> age & 1))

    @classmethod
    def of(cls, session: int, highest: int, taken: int) -> "SenderMemory":
        """Return the memory of a receiver that has acknowledged all that it had taken."""
        made = cls(session)
        made.highest, made.taken, made.acknowledged = highest, taken, taken
        return made

    def mark_acknowledged(self, number: int) -> None:
        """Remember that a repeated `number` may be acknowledged at once."""
        age = self.highest - number
        if 0 <= age < WINDOW:
            self.acknowledged |= 1 << age

    def was_acknowledged(self, number: int) -> bool:
        """Say whether the message has been taken in. What is older than the window has been."""
        age = self.highest - number
        return age >= WINDOW or (age >= 0 and bool(self.acknowledged >> age & 1))
