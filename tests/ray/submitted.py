"""Jobs whose driver Ray runs: what `ray job submit` brings, and a worker of Ray Train."""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..chaos.jobs import TRAINING
from ..machines.job import PATIENCE_S
from .cluster import UP_S
from .job import DRIVER, RayJob

_RAY = str(Path(sys.executable).with_name("ray"))
_JOBS = "--address=http://127.0.0.1:8265"
_OPTIONS = "options.json"


class SubmittedJob(RayJob):
    """A job that `ray job submit` brings, with a folder of code that Ray copies to the machines."""

    main = DRIVER  # given the options of `midstep.ray.run`

    def driver(self, options: dict[str, Any]) -> Sequence[str]:
        """Return a command that submits the job to Ray and follows it to its end."""
        folder = self.root / "code"
        folder.mkdir()
        for file in (DRIVER, self.main, TRAINING):
            shutil.copy(file, folder)
        _, *arguments = options["command"]
        options["command"] = [TRAINING.name, *arguments]  # in the folder
        (folder / _OPTIONS).write_text(json.dumps(options))
        submit = (_RAY, "job", "submit", _JOBS, "--submission-id", self.name, "--working-dir", str(folder))
        return *submit, "--", sys.executable, self.main.name, _OPTIONS

    def until_taken_away(self) -> None:
        """Wait until nothing of the job is left in Ray: for one whose driver was ended."""
        self.controller.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while self.left_in_ray():
            assert time.monotonic() < deadline, self.said()
        self.assert_nothing_left()

    def jobs(self, *words: str) -> str:
        """Run `ray job`, and return what it says."""
        return self.machines[0].run(_RAY, "job", *words, _JOBS, self.name, limit_s=UP_S)


class JobInRayTrain(SubmittedJob):
    """The same, started by the one worker of a run of Ray Train."""

    main = Path(__file__).with_name("train_driver.py")
