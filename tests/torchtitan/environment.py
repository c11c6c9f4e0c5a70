"""The environment of the torchtitan tests: midstep[torch] and one torchtitan. Prints where its programs are.

python -m tests.torchtitan.environment [VERSION]
"""

import sys

from ..versions.environments import Suite

SUITE = Suite(
    name="torchtitan",
    module="torchtitan",
    pythons=("3.11", "3.12", "3.13"),
    library="torchtitan=={}",
    extras="torch,test",
    release="0.3.0",
)

if __name__ == "__main__":
    print(SUITE.make(*sys.argv[1:2]))
