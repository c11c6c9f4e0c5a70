"""How long a rank tries to link up: at first as short as a healthy network takes, then longer.

A link-up fails mostly because a peer is dead, and is given up soon. But a network may be slow today:
packets are lost, or come from far away. Then every attempt would fail alike.
"""

GROWTH = 2
MOST = 4  # times the first limit: below the deadline of a rejoin, which is longer than all attempts of the first length


class LinkPatience:
    """The limit of the next attempt of one process. All ranks fail together, so theirs grow together."""

    def __init__(self) -> None:
        self._factor = 1

    def next_s(self, first_s: float) -> float:
        """Return the limit of the attempt that begins now; `first_s` is that of a first one."""
        limit_s = first_s * self._factor
        self._factor = min(self._factor * GROWTH, MOST)
        return limit_s

    def linked_up(self) -> None:
        """Begin with the first limit again: the world is connected."""
        self._factor = 1
