"""The marker that makes a test one row of the table in `docs/security.md`."""

import pytest


def attack(what: str, *, holds: str, reads: str = "nothing") -> pytest.MarkDecorator:
    """Mark a test as an attack: `what` is done, what `holds` all the same, and what the user `reads` of it.

    The arguments are literal strings, because `make docs` reads them from the source.
    """
    return pytest.mark.attack(what, holds=holds, reads=reads)
