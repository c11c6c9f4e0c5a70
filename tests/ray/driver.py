"""What a user of Ray writes: one call, here with the options of a test. `driver.py OPTIONS`, a JSON object."""

import json
import logging
import sys
from typing import Any

import midstep


def main(options: dict[str, Any]) -> int:
    """Run the job, and say how it ended."""
    logging.basicConfig(level=logging.INFO)
    script, *arguments = options.pop("command")
    ended = midstep.ray.run(script, *arguments, **options)
    print(ended.reason, flush=True)
    return ended.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
