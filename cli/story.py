"""The program with which a controller has its job's story read: `python -m midstep.cli.story`, an order on its input.

A process of its own, of low priority, so that a recovery gets the processor first.
"""

import logging
import os
import resource
import sys

import msgspec

from ..controller.endpoints.control_requests import Refused, Reply
from ..controller.endpoints.story import StoryOrder, excerpt, story_of
from ..controller.story import StoryEntry
from ..protocol.errors import MidstepError
from ..protocol.own_programs import own_program
from .display.plain import log_to_stderr
from .views.story_text import story_lines

STORY_PROGRAM = own_program("midstep.cli.story")
NICENESS = 10
CPU_S = 60  # also when nobody is left who would end it


def main() -> None:
    """Print the answer to the order on standard input, or why there is none."""
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S if hard == resource.RLIM_INFINITY else min(CPU_S, hard), hard))
    log_to_stderr(logging.WARNING, "%(asctime)s story %(levelname)s %(message)s")
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=StoryOrder)
    try:
        reply: Reply = excerpt(story_of(order), order.incident, told)
    except MidstepError as error:
        reply = Refused(str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(reply))


def told(entry: StoryEntry) -> str:
    """Return an event and what followed from it in words."""
    return "\n".join(story_lines(entry))


if __name__ == "__main__":
    main()
