"""Agents, controllers and jobs to attack: those of the chaos tests."""

from ..chaos.agent.conftest import play, root
from ..chaos.conftest import device, own_home, start_job, undisturbed
from ..chaos.controller.conftest import cluster

__all__ = ["cluster", "device", "own_home", "play", "root", "start_job", "undisturbed"]
