"""The names by their other address."""

# ruff: noqa: F401, F403 - the same names
from midstep.adapters.mindio.processor import (
    get_device,
    get_mindio_export_version,
    set_mindio_export_version,
    tft_destroy_processor,
    tft_wait_repair_action,
)

from . import *
