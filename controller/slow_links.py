"""Find the machines whose links are slow, by how long data was on its way. Pure.

Of each connection the kernel counts for how long sent data was not yet acknowledged (`agent/link_use.py`). In a step
that is a while for every link that is used, and much longer for one that is slow: all others wait for it, idle. A link
is held against those that carry about as much in the same round. What is slow at a machine is so for all that it sends
and all that it gets, since acknowledgements take the same way: of the machines at both ends of slow links, the one
that is at most of them is to blame, the rest is explained by it. A busy machine makes single links slow for a while,
but seldom what it sends and what it gets at once. What differs by less than the kernel lets an acknowledgement wait for
another one says nothing of a link: in steps of some 50 ms that alone may be most of a step.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest

import msgspec

from ..protocol.types import LinkUse

Ends = tuple[str, str]  # addresses: from, to
LEAST_FACTOR = 2.0  # times as long on its way as on others, whatever the policy says: links are less even than ranks
DELAYED_ACK_S = 0.04  # TCP_DELACK_MIN of Linux
LEAST_OTHERS = 2  # that carry about as much, for a link to be held against them
ALIKE = 2.0  # times as much, or as little, is about as much
MOST_COMPARED = 10_000
LEAST_TRAFFIC = 0.1  # of that of the busiest link: what carries less is not looked at


class ComparedLink(msgspec.Struct, frozen=True):
    """A link, and how much of a step data was on its way there; `usual_s`: on others that carry about as much."""

    ends: Ends
    busy_s: float
    usual_s: float

    def is_slow(self, factor: float, least_s: float) -> bool:
        """Say whether data is longer on its way than on others: by a factor, and by `least_s` in a step."""
        return self.busy_s > factor * self.usual_s and self.busy_s - self.usual_s > least_s


class Blamed(msgspec.Struct, frozen=True):
    """The slow links of a machine: the slowest one, and whether both what it sends and what it gets is slow."""

    slowest: ComparedLink
    both_ways: bool


class Carried(msgspec.Struct):
    """How much a link has carried in a round, and how long data was on its way, for each step."""

    busy_s: float = 0.0
    sent_bytes: float = 0.0

    def add(self, busy_s: float, sent_bytes: float) -> None:
        """Take in the connections of one more process."""
        self.busy_s += busy_s
        self.sent_bytes += sent_bytes


def carried(rounds: Iterable[tuple[Sequence[LinkUse], Sequence[LinkUse], int]]) -> dict[Ends, Carried]:
    """Return what each link has carried in a step: for each process its links before and after, and its steps."""
    links: dict[Ends, Carried] = {}
    for before, after, steps in rounds:
        base = {(each.here, each.there): each for each in before}
        for each in after:
            ends = each.here, each.there
            if (began := base.get(ends)) is not None:
                busy_s = max(0, each.busy_us - began.busy_us) / steps / 1e6
                links.setdefault(ends, Carried()).add(busy_s, max(0, each.sent_bytes - began.sent_bytes) / steps)
    return links


def compared(links: Mapping[Ends, Carried]) -> list[ComparedLink]:
    """Return the links that carry most, each with what is usual; without those that have too few to be held against."""
    most = nlargest(MOST_COMPARED, links.items(), key=lambda link: link[1].sent_bytes)
    used = [(ends, each) for ends, each in most if each.sent_bytes > LEAST_TRAFFIC * most[0][1].sent_bytes]
    usual = _of_alike([each for _, each in used])
    return [
        ComparedLink(ends, each.busy_s, usual_s)
        for (ends, each), usual_s in zip(used, usual, strict=True)
        if usual_s is not None
    ]


def _of_alike(links: Sequence[Carried]) -> list[float | None]:
    """Return for each link the low third of the others that carry about as much; None: there are too few.

    In a ring of three machines two thirds of the links are those of the one that is slow.

    A window of those moves over all links in the order of what they carry, as there may be thousands.
    """
    order = sorted(range(len(links)), key=lambda place: links[place].sent_bytes)
    sent = [links[place].sent_bytes for place in order]
    thirds: list[float | None] = [None] * len(links)
    window: list[float] = []  # how long data is on its way there, in order
    first = last = 0
    for place, own_bytes in zip(order, sent, strict=True):
        while last < len(order) and sent[last] <= own_bytes * ALIKE:
            insort(window, links[order[last]].busy_s)
            last += 1
        while sent[first] < own_bytes / ALIKE:
            del window[bisect_left(window, links[order[first]].busy_s)]
            first += 1
        if len(window) > LEAST_OTHERS:
            third = _third(len(window) - 1)
            thirds[place] = window[third + (bisect_left(window, links[place].busy_s) <= third)]
    return thirds


def low_third(values: Sequence[float]) -> float:
    """Return the smallest value that is at least as large as a third of them."""
    return sorted(values)[_third(len(values))]


def _third(count: int) -> int:
    return (count - 1) // 3


def blamed(slow: Iterable[ComparedLink]) -> dict[str, Blamed]:
    """Return the addresses whose machines explain all slow links, each with those of its own.

    A single slow link is its sender's: where it is slow in one direction only, nothing tells which end it is.
    """
    left = list(slow)
    found: dict[str, Blamed] = {}
    while left:
        lost_s: dict[str, tuple[int, float]] = {}
        for link in left:
            for end in link.ends:
                count, sum_s = lost_s.get(end, (0, 0.0))
                lost_s[end] = count + 1, sum_s + link.busy_s - link.usual_s
        worst = max(lost_s, key=lambda end: lost_s[end])
        own = [link for link in left if worst in link.ends]
        directions = {link.ends[0] == worst for link in own}
        found[worst] = Blamed(max(own, key=lambda link: link.busy_s), both_ways=len(directions) > 1)
        left = [link for link in left if worst not in link.ends]
    return found
