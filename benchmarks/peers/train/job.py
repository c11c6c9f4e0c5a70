"""The workload in the hands of one peer: `job.py PEER DIRECTORY SCHEDULE SETTING`."""

import importlib
import sys
from pathlib import Path

import msgspec

from midstep.benchmarks.peers.kinds import Setting
from midstep.benchmarks.peers.schedule import Schedule
from midstep.benchmarks.peers.workload import Workload


def main() -> None:
    """Train as the peer's own file says."""
    peer, directory, schedule, setting = sys.argv[1:]
    workload = Workload(Path(directory), msgspec.json.decode(schedule, type=Schedule), Setting(setting))
    importlib.import_module(f"midstep.benchmarks.peers.{peer}").train(workload)


if __name__ == "__main__":
    main()
