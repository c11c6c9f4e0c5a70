"""Where the store of a job of roles is: a file in the job's directory, readable by the job's user only.

Written by the launcher of the whole job each time that it starts, so that a rank finds the store of the next one.
"""

from pathlib import Path

import msgspec

from .errors import ConfigurationError
from .private_files import replace_file
from .types import Rendezvous

ROLE_STORE_NAME = "store.json"


def write_role_store(path: Path, place: Rendezvous) -> None:
    """Say where the store is, and the secret that signs what lies there. Raises OSError."""
    replace_file(path, msgspec.json.encode(place) + b"\n")


def read_role_store(path: Path) -> Rendezvous:
    """Return where the store is. Raises ConfigurationError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rendezvous)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}. `midstep run --roles` writes it.") from error
