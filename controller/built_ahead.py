"""For which nodes in use each spare builds processes ahead.

Pure, from who is there. The ranks of a node move together, so a spare builds for whole nodes. It keeps those it has,
since what it has built is of no use to others. A node whose processes have failed more often than others' comes first,
and each node is covered by one spare.
"""

from collections.abc import Mapping, Sequence


def cover(
    in_use: Sequence[str], spares: Mapping[str, Sequence[str]], failures: Mapping[str, int], most: int
) -> dict[str, tuple[str, ...]]:
    """Return the nodes that each spare builds for, at most so many; a spare that builds for none is left out.

    `spares`: each with the nodes that it builds for now, in the order in which spares are taken.
    """
    uncovered = dict.fromkeys(in_use)
    covers: dict[str, list[str]] = {}
    for spare, before in spares.items() if most else ():
        covers[spare] = [name for name in before if name in uncovered][:most]
        for name in covers[spare]:
            del uncovered[name]
    for name in sorted(uncovered, key=lambda name: -failures.get(name, 0)):
        least = min(covers.values(), key=len, default=None)
        if least is None or len(least) >= most:
            break
        least.append(name)
    return {spare: tuple(names) for spare, names in covers.items() if names}
