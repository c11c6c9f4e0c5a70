"""Whose conventions hold: MindSpore's differ from those of others in when handlers run and what they get."""

import os

MINDSPORE_VARIABLE = "MINDIO_FOR_MINDSPORE"
_SWITCHES = "MS_ENABLE_TFT"


def is_mindspore() -> bool:
    """Return whether MindSpore's conventions hold, by MindIO's variable."""
    return os.environ.get(MINDSPORE_VARIABLE, "").lower() in {"true", "1"}


def pauses_after_update() -> bool:
    """Return whether MindSpore calls `tft_pause_train` after each update, by the variable that switches it on.

    It resets its optimizer's flag before that call, and the update is committed there. Without it the flag is reset
    after `tft_end_updating_os`, which commits then.
    """
    switched = os.environ.get(_SWITCHES, "")
    return any(each in switched for each in ("ARF:1", "TSP:1"))
