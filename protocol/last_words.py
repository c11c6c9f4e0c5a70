"""What a node and its ranks last printed: how much of it an agent tells, and how it reads. Pure.

A machine that loses its power keeps its logs to itself. So its agent tells the end of them while it lives, and when the
node is lost that is what the report has of it.
"""

from .bounds import LONGEST_WORDS, MOST_OF_NODES_WORDS, MOST_WITH_WORDS
from .reports import NodeWords

LONGEST_OUTPUT = 8000  # characters, of all that a node said
AGENT = "agent"


def room_of_each(ranks: int) -> int:
    """Return how many bytes each of so many ranks may have told, and the agent at least as many."""
    return min(LONGEST_WORDS, MOST_OF_NODES_WORDS // (1 + min(ranks, MOST_WITH_WORDS)))


def end_of(text: str, most_bytes: int) -> str:
    """Return the end of a text, of so many bytes at most, as a message can carry it."""
    return text.encode("utf-8", "replace")[-most_bytes:].decode("utf-8", "ignore")


def size_of(words: NodeWords) -> int:
    """Return how many bytes of text a node says."""
    return sum(len(text.encode("utf-8", "replace")) for text in (words.agent, *(each.text for each in words.ranks)))


def in_lines(words: NodeWords) -> str:
    """Return what a node said: each line with who has printed it, the ranks in their order and then the agent."""
    speakers = [(f"rank {each.rank}", each.text) for each in words.ranks if each.text.strip()]
    speakers += [(AGENT, words.agent)] if words.agent.strip() else []
    room = LONGEST_OUTPUT // max(1, len(speakers))
    return "\n".join(line for who, text in speakers for line in _last_lines(f"[{who}] ", text, room))


def _last_lines(prefix: str, text: str, room: int) -> list[str]:
    """Return the last lines that fit, and of a last one that does not its end."""
    lines: list[str] = []
    for line in reversed([line for line in text.splitlines() if line.strip()]):
        said = prefix + (line if lines else line[-max(1, room - len(prefix) - 1) :])
        room -= len(said) + 1
        if room < 0 and lines:
            break
        lines.insert(0, said)
    return lines
