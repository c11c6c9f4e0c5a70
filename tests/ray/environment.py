"""The environment of the Ray tests: midstep[torch,ray]. Prints where its programs are.

python -m tests.ray.environment [VERSION]
"""

import sys

from ..versions.environments import Suite

SUITE = Suite(
    name="ray",
    module="ray",
    pythons=("3.11", "3.12", "3.13", "3.10"),
    library="ray[default,train]=={}",  # default: `ray job submit`
    extras="torch,test,ray",
    release="2.60.0",
)

if __name__ == "__main__":
    print(SUITE.make(*sys.argv[1:2]))
