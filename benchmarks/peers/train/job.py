"""The workload in the hands of one peer: `job.py PEER DIRECTORY FAULT SETTING`."""

import importlib
import sys
from pathlib import Path

from midstep.benchmarks.peers.kinds import Fault, Setting
from midstep.benchmarks.peers.workload import Workload


def main() -> None:
    """Train as the peer's own file says."""
    peer, directory, fault, setting = sys.argv[1:]
    workload = Workload(Path(directory), Fault(fault), Setting(setting))
    importlib.import_module(f"midstep.benchmarks.peers.{peer}").train(workload)


if __name__ == "__main__":
    main()
