"""The environment of the MindSpore tests: midstep[mindspore] without torch. Prints where its programs are.

python -m tests.mindspore.environment [VERSION]
"""

import sys

from ..versions.environments import Suite

SUITE = Suite(
    name="mindspore",
    module="mindspore",
    pythons=("3.11", "3.10", "3.12"),
    library="mindspore=={}",
    extras="test,mindspore",
    release="2.10.0",
    constrained=False,
)

if __name__ == "__main__":
    print(SUITE.make(*sys.argv[1:2]))
