"""A small platform, to start your own from: nodes are agents on this machine, a process each.

Yours asks an engine, a queue or a cloud for machines instead. Name its class in your package's entry points::

    [project.entry-points."midstep.platforms"]
    agents-here = "midstep.examples.agents_here:AgentsHere"

and host it beside the job's controller: `midstep platform agents-here --controller m0:29400 --token-file job.token`.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

from midstep.platforms.base import PlatformContext
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.messages import CreateNode, DeleteNode, EndJob, KillNode, NodeLost, NodeRefused, PlatformJoined
from midstep.protocol.token import TOKEN_VARIABLE, token_text

LOOK_S = 0.1
LEAVES_S = 20.0


class AgentsHere:
    """Starts up to `most` agents (an option; 4)."""

    def __init__(self, context: PlatformContext) -> None:
        if unknown := set(context.options) - {"most"}:
            raise ConfigurationError(f"agents-here has no option {', '.join(sorted(unknown))}; it has: most.")
        self._context, self._most = context, int(context.options.get("most", "4"))
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def describe(self) -> PlatformJoined:
        return PlatformJoined(can_create=True, can_kill=True, nodes=tuple(self._agents))

    def create_node(self, command: CreateNode) -> None:
        if command.node in self._agents:
            return
        if len(self._agents) >= self._most:
            self._context.post(NodeRefused(command.node, f"there are {self._most} agents, and may not be more"))
            return
        job, controllers = self._context.job, ",".join(self._context.controllers)
        arguments = ["--node", command.node, "--job", job, "--controller", controllers]
        self._agents[command.node] = subprocess.Popen(
            [sys.executable, "-m", "midstep.cli.agent", *arguments],
            env={**os.environ, TOKEN_VARIABLE: token_text(self._context.token.for_joining(job))},  # never an argument
            start_new_session=True,
        )

    def delete_node(self, command: DeleteNode) -> None:
        self._end(command.node)

    def kill_node(self, command: KillNode) -> None:
        if command.node in self._agents:
            self._agents[command.node].kill()

    def end_job(self, command: EndJob) -> None:
        for node in list(self._agents):
            self._end(node)

    async def close(self) -> None:
        self._watching.cancel()
        for agent in self._leaving:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(agent.wait, LEAVES_S)

    def _end(self, node: str) -> None:
        """End an agent; what it has started ends with it. It is forgotten first, and so not reported as lost."""
        if agent := self._agents.pop(node, None):
            agent.send_signal(signal.SIGTERM)
            self._leaving.append(agent)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for node, agent in list(self._agents.items()):
                if (status := agent.poll()) is not None:
                    del self._agents[node]
                    self._context.post(NodeLost(node, f"its agent ended with {status}", time.time()))
