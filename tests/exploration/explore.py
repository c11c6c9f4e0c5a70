"""Visits every state that a bound allows, depth first, and says how it got to one that breaks a rule."""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .cluster import Cluster, key_of
from .moves import Move, moves
from .rules import broken_at_the_end, broken_by_actions, broken_by_state

DIGEST_BYTES = 16
MOST_DEEP = 400  # moves; no way that ends is half as long


class RuleBroken(AssertionError):
    """A rule does not hold: which one, and the way there, move by move."""


class OtherBound(Exception):
    """What was saved belongs to another job, another bound, or another version of the machine."""


class Frontier(msgspec.Struct):
    """How far an exploration has got, without its states: `way` is the number of the move taken at each depth."""

    bound: str
    way: list[int]
    moves: int
    deepest: int
    ends: dict[int, int]


@dataclass
class Level:
    """A state on the way to the present one, and how many of its moves have been taken."""

    cluster: Cluster
    moves: list[Move]
    taken: int = 0
    key: bytes = b""
    left: bool = False  # one of its moves leads to another state


@dataclass
class Exploration:
    """Everything that can be reached from `start`. `ends`: states after which nothing can happen, by exit code."""

    name: str
    start: Cluster
    seen: set[bytes] = field(default_factory=set)
    moves: int = 0
    deepest: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    levels: list[Level] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen.add(key_of(self.start))
        self.levels.append(Level(self.start, list(moves(self.start))))

    @property
    def states(self) -> int:
        """How many states have been visited."""
        return len(self.seen)

    def run(self, *, most_moves: int | None = None) -> bool:
        """Go on; return True when every state has been visited, False after `most_moves`. Raises RuleBroken."""
        collects = gc.isenabled()
        gc.disable()  # no state is part of a cycle; looking for one takes an eighth of the time
        try:
            return self._run(most_moves)
        finally:
            if collects:
                gc.enable()

    def _run(self, most_moves: int | None) -> bool:
        last = None if most_moves is None else self.moves + most_moves
        while self.levels:
            if self.moves == last:
                return False
            level = self.levels[-1]
            if level.taken == len(level.moves):
                if level.key and not level.left:
                    self._hold_rules(lambda: ["5 always ends: nothing that can happen changes anything"])
                self.levels.pop()
                continue
            move = level.moves[level.taken]
            level.taken += 1
            level.left |= self._take(level.cluster, move) != level.key
        return True

    def save(self, path: Path) -> None:
        """Write down how far this has got, so that another process can go on."""
        frontier = Frontier(
            self.name, [level.taken for level in self.levels], self.moves, self.deepest, dict(self.ends)
        )
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.msgpack.encode((frontier, b"".join(self.seen))))
        draft.replace(path)

    def restore(self, path: Path) -> None:
        """Go to where another process has saved. Raises OtherBound."""
        frontier, seen = msgspec.msgpack.decode(path.read_bytes(), type=tuple[Frontier, bytes])
        self.seen = {seen[at : at + DIGEST_BYTES] for at in range(0, len(seen), DIGEST_BYTES)}
        if frontier.bound != self.name or key_of(self.start) not in self.seen:
            raise OtherBound(f"{path} is of {frontier.bound!r} or of another machine; remove it to begin again")
        self.moves, self.deepest, self.ends = frontier.moves, frontier.deepest, Counter(frontier.ends)
        self.levels = []
        cluster = self.start
        for taken in frontier.way:
            self.levels.append(Level(cluster, list(moves(cluster)), taken))
            if 0 < taken <= len(self.levels[-1].moves):
                cluster, _ = self.levels[-1].moves[taken - 1].make()
            if key_of(cluster) not in self.seen:
                raise OtherBound(f"{path} is of another version of the machine; remove it to begin again")

    def _take(self, cluster: Cluster, move: Move) -> bytes:
        """Take a move, and return the key of the state that it leads to."""
        after, actions = move.make()
        self.moves += 1
        self._hold_rules(lambda: [*broken_by_state(after), *broken_by_actions(cluster, after, actions)])
        key = key_of(after)
        if key in self.seen:
            return key
        self.seen.add(key)
        self.deepest = max(self.deepest, len(self.levels))
        following = list(moves(after))
        if following:
            self.levels.append(Level(after, following, key=key))
            if len(self.levels) > MOST_DEEP:
                self._hold_rules(lambda: [f"5 always ends: a way of {MOST_DEEP} moves has no end"])
        else:
            self._hold_rules(lambda: list(broken_at_the_end(after)))
            self.ends[_exit_code(after)] += 1
        return key

    def _hold_rules(self, broken: Callable[[], list[str]]) -> None:
        found = broken()
        if found:
            way = [level.moves[level.taken - 1].name for level in self.levels]
            told = "\n".join(f"{number:3} {name}" for number, name in enumerate(way, 1))
            raise RuleBroken("\n".join([*found, "after:", told]))


def _exit_code(cluster: Cluster) -> int:
    result = cluster.controller.machine.state.result
    return 0 if result is None else result.exit_code


__all__ = ["Exploration", "OtherBound", "RuleBroken"]
