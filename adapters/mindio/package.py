"""Where the package mindio_ttp lies, and how a rank comes to it. Nothing but a rank of `--mindio` ever finds it."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ...protocol.errors import ConfigurationError

NAME = "mindio_ttp"
PATH = Path(__file__).parent / "path"


def refuse_installed() -> None:
    """Raise ConfigurationError if another package of the name can be imported here."""
    place = _installed()
    if place is not None:
        raise ConfigurationError(
            f"--mindio: a package {NAME} is installed in {place}. Both would decide what a recovery does. Remove it "
            f"(`pip uninstall {NAME}`), or leave --mindio out."
        )


def refuse_beside(folder: Path) -> None:
    """Raise ConfigurationError if a script in this folder would import another package of the name from there."""
    for place in (folder / NAME, folder / f"{NAME}.py"):
        if place.exists():
            raise ConfigurationError(
                f"--mindio: {place} would be imported in the place of midstep's {NAME}, and nothing would recover. "
                "Rename it, or leave --mindio out."
            )


def put_on_path(folder: Path) -> None:
    """Let this process import the package, for a script in `folder`. Raises ConfigurationError if there is another."""
    refuse_installed()
    refuse_beside(folder)
    sys.path.insert(0, str(PATH))
    importlib.invalidate_caches()


def path_with_package(path: str) -> str:
    """Return a PYTHONPATH with which a program that is not Python, a shell script say, lets Python find the package."""
    return os.pathsep.join(filter(None, (str(PATH), path)))


def mindspore_numbers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which MindSpore looks for a rank's number and the world's size, where they are not set.

    Its own launcher sets them, and midstep is in that launcher's place.
    """
    numbers = {"MS_NODE_ID": "RANK", "MS_WORKER_NUM": "WORLD_SIZE"}
    return {name: environment[source] for name, source in numbers.items() if name not in environment}


def _installed() -> str | None:
    loaded = sys.modules.get(NAME)
    spec = importlib.util.find_spec(NAME) if loaded is None else loaded.__spec__
    if spec is None:
        return None
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    place = next(each for each in places if each)
    return None if str(PATH) in place else place
