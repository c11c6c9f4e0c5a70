"""Whose conventions hold: MindSpore's differ from those of others in when handlers run and what they get."""

import os

MINDSPORE_VARIABLE = "MINDIO_FOR_MINDSPORE"


def is_mindspore() -> bool:
    """Return whether MindSpore's conventions hold, by MindIO's variable."""
    return os.environ.get(MINDSPORE_VARIABLE, "").lower() in {"true", "1"}
