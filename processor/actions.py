"""Actions that a rank performs while an operator's pause holds it between two steps (docs/controls.md).

Some work on the hardware of a job needs its processes and may not meet a step: another network card for the
communicators, a stress test of the devices. All ranks stand still at a step boundary then, and the ranks that are named
call an action by its name: one of their device's, or one that the script has registered. It runs in a thread of its
own, so that the train thread hears of a fault meanwhile, as ever.
"""

import logging
import threading
from collections.abc import Callable, Mapping

from ..protocol.bounds import LONGEST_NAME, LONGEST_TEXT
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.messages import ActionEnded, CallAction

RankAction = Callable[[Mapping[str, str]], object]
"""Takes the operator's arguments, and returns what is to be told of it in words; an exception says that it failed."""

_log = logging.getLogger("midstep")
_registered: dict[str, RankAction] = {}


def register_action(name: str, action: RankAction) -> None:
    """Let operators have this rank call `action`, while it is held between two steps: `midstep perform NAME`.

    Call it in every rank, before or in the train function. It comes before an action of the device of the same name,
    and before one that was registered earlier. Collectives are not possible in an action: not all ranks need be in it.

    Args:
        name: How operators call it.
        action: Takes the operator's arguments, texts by name. Its answer, as text, is shown to the operator. An
            exception fails the action on this rank, with its text, and nothing else: no fault is reported.

    Raises ConfigurationError if the name is empty or too long.
    """
    if not 0 < len(name) <= LONGEST_NAME:
        raise ConfigurationError(f"register_action: the name has {len(name)} characters; allowed: 1 to {LONGEST_NAME}")
    _registered[name] = action


class ActionCalls:
    """Calls actions for one process, one at a time, each in a thread of its own."""

    def __init__(
        self, rank: int, of_device: Callable[[], Mapping[str, RankAction]], post: Callable[[ActionEnded], None]
    ) -> None:
        """`post` sends the answer, from any thread."""
        self._rank = rank
        self._of_device = of_device
        self._post = post
        self._latest = 0  # number of the last command
        self._thread: threading.Thread | None = None
        self._answer: ActionEnded | None = None  # to that command

    def call(self, command: CallAction, *, held: bool) -> None:
        """Begin an action, or say why not (control thread). A command that comes again is answered, not repeated."""
        if command.number <= self._latest:
            if self._answer is not None and self._answer.number == command.number:
                self._post(self._answer)
            return
        self._latest = command.number
        known = {**self._of_device(), **_registered}
        if not held:
            self._end(command, False, "the rank is not held between two steps any more")
        elif self._thread is not None and self._thread.is_alive():
            self._end(command, False, f"the rank still performs {self._thread.name}")
        elif command.action not in known:
            there = ", ".join(sorted(known)) or "none"
            self._end(command, False, f"there is no action {command.action!r}; this rank has: {there}")
        else:
            action = known[command.action]
            self._thread = threading.Thread(
                target=self._perform, args=(command, action), name=command.action, daemon=True
            )
            self._thread.start()

    def _perform(self, command: CallAction, action: RankAction) -> None:
        try:
            told = action(command.arguments)
        except BaseException as error:  # of a script's own, SystemExit too: the operator waits for an answer
            _log.exception("the action %s has failed", command.action)
            self._end(
                command, False, str(error) if isinstance(error, MidstepError) else f"{type(error).__name__}: {error}"
            )
        else:
            self._end(command, True, "" if told is None else str(told))

    def _end(self, command: CallAction, succeeded: bool, text: str) -> None:
        answer = ActionEnded(self._rank, command.number, succeeded, text[:LONGEST_TEXT])
        if command.number == self._latest:
            self._answer = answer
        self._post(answer)
