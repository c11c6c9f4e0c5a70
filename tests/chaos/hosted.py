"""A job whose nodes a platform of another package makes, each of its parts started by hand."""

import os
import subprocess
from pathlib import Path

from .jobs import MARK, STEP_S, STEPS, TRAINING
from .joined import MIDSTEP, JoinedJob

PLATFORM = """
import asyncio, pathlib
from midstep.examples.agents_here import LOOK_S, AgentsHere
from midstep.protocol.messages import NodeGoing

class TakesAway(AgentsHere):
    '''Says that a node will go when a file names it.'''

    def __init__(self, context):
        super().__init__(context)
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self):
        going = pathlib.Path(__file__).with_name("going")
        while not going.exists():
            await asyncio.sleep(LOOK_S)
        self._context.post(NodeGoing(going.read_text(), "the rack is serviced", 600.0))
"""


class HostedJob(JoinedJob):
    """A controller, a platform, and the nodes that it makes: two, and a spare."""

    def begin(self, step_s: float = STEP_S) -> None:
        """Submit the job, and start what makes it run."""
        module, metadata = self.root / "other_package.py", self.root / "other_package-1.0.dist-info"
        module.write_text(PLATFORM)
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[midstep.platforms]\ntakes-away = other_package:TakesAway\n")
        training = (str(TRAINING), str(self.records), str(STEPS), str(step_s))
        submit = ("--platform", "takes-away", "--spares", "1", "--policy", str(self.root / "policy.yaml"))
        self._midstep("submit", "--job", self.name, "--job-dir", str(self.directory), *submit, *self._shape, *training)
        assert self.wait(0) == 0, self.said()
        token = ("--token-file", str(self.token))
        self._midstep("controller", "--job-dir", str(self.directory), "--listen", f"tcp://{self.endpoint}", *token)
        self._midstep("platform", "takes-away", "--job", self.name, "--controller", self.endpoint, *token)

    def take_away(self, node: str) -> None:
        """Have the platform say that a node will go."""
        draft = self.root / "going.draft"
        draft.write_text(node)
        draft.replace(self.root / "going")

    @property
    def directory(self) -> Path:
        """Return the job directory."""
        return self.root / "job"

    def _midstep(self, *arguments: str) -> None:
        number = len(self.machines)
        environment = {**os.environ, "PYTHONPATH": str(self.root), "MIDSTEP_HOME": str(self.home(number))}
        with self.output(number).open("wb") as output:
            self.machines.append(
                subprocess.Popen(
                    (*MIDSTEP, *arguments),
                    env={**environment, MARK: self.name},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
