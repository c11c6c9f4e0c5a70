"""What each node last said of what its ranks printed, until the node is lost. In no journal before that.

Nothing is decided by it. With the loss it becomes a part of the event, so that each controller has the same report.
"""

import msgspec

from ..protocol.messages import NodeLost
from ..protocol.rank_logs import in_lines
from ..protocol.reports import NodeWords
from .recovery.events import Event

MOST_NODES = 4096  # those that spoke last


class KeptWords:
    """The newest words of each node."""

    def __init__(self) -> None:
        self._words: dict[str, NodeWords] = {}

    def take(self, words: NodeWords) -> None:
        """Keep what a node says, in place of what it said before."""
        self._words.pop(words.node, None)
        self._words[words.node] = words
        if len(self._words) > MOST_NODES:
            del self._words[next(iter(self._words))]

    def completed(self, event: Event) -> Event:
        """Return the loss of a node with what was last heard of it, and forget that; other events as they are."""
        words = self._words.pop(event.node, None) if isinstance(event, NodeLost) else None
        return event if words is None else msgspec.structs.replace(event, output=in_lines(words))
