"""What a user of Ray writes: one call. `driver.py OPTIONS`: a JSON object, or a file with one."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import midstep


def read_options(argument: str) -> dict[str, Any]:
    """Return the options of a test."""
    text = argument if argument.startswith("{") else Path(argument).read_text()
    options: dict[str, Any] = json.loads(text)
    return options


def main(options: dict[str, Any]) -> int:
    """Run the job, and say how it ended."""
    logging.basicConfig(level=logging.INFO)
    script, *arguments = options.pop("command")
    ended = midstep.ray.run(script, *arguments, **options)
    print(ended.reason, flush=True)
    return ended.exit_code


if __name__ == "__main__":
    sys.exit(main(read_options(sys.argv[1])))
