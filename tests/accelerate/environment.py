"""The environment of the Accelerate tests: midstep[torch] and one Accelerate. Prints where its programs are.

python -m tests.accelerate.environment [VERSION]
"""

import sys

from ..versions.environments import Suite

SUITE = Suite(
    name="accelerate",
    module="accelerate",
    pythons=("3.11", "3.12", "3.13"),
    library="accelerate=={}",
    extras="torch,test",
    release="1.15.0",
)

if __name__ == "__main__":
    print(SUITE.make(*sys.argv[1:2]))
