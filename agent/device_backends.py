"""Device backends of torch, such as torch-npu: kept out of the fork server, imported by the processes that it forks.

`import torch` loads every backend that is installed, and torch-npu's start threads of CANN. A process with threads must
not be forked: a fork has none of them, and their locks as they were. So the fork server imports torch alone, and a
process that was forked ahead imports the backends before it says that it is idle.
"""

import os
import sys
from importlib.metadata import entry_points

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's: "1" or unset loads them
GROUP = "torch.backends"


class HeldBackBackends:
    """The backends that torch would have loaded in this environment. `load` makes up for it, in a fork."""

    def __init__(self) -> None:
        """Have torch load none when it is imported."""
        self._given = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "0"
        self._wanted = self._given in {None, "1"} and bool(entry_points(group=GROUP))

    def load(self) -> None:
        """Load them as torch does, where torch is imported. What fails is printed, and left to the script."""
        if self._given is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._given
        if not self._wanted or "torch" not in sys.modules:
            return
        for backend in entry_points(group=GROUP):
            try:
                backend.load()()
            except Exception as error:  # of a library without its driver, in its own ways
                text = f"midstep: the device backend {backend.name} cannot be loaded ahead: {error}"
                print(text, file=sys.stderr, flush=True)  # noqa: T201 - its only voice
