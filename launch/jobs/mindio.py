"""`--mindio`: what a job is like whose scripts bring MindIO's handlers."""

import msgspec

from ...adapters.mindio.package import refuse_installed
from ...devices.kinds import EXTERNAL
from ...policies.schema import Policy
from ...protocol import environment as env
from ...protocol.types import RestoreSource


def with_mindio(policy: Policy) -> Policy:
    """Return the policy of such a job. Its groups and its checkpoints are the framework's own.

    Raises ConfigurationError if the real mindio_ttp is installed here.
    """
    refuse_installed()
    return msgspec.structs.replace(
        policy,
        communicator=msgspec.structs.replace(policy.communicator, name=EXTERNAL),
        checkpoint=msgspec.structs.replace(policy.checkpoint, every_steps=0),
        restore=(RestoreSource.REPLICA,),
    )


def mindio_environment(wanted: bool) -> dict[str, str]:
    """Return the variables by which the ranks find the package."""
    return {env.MINDIO: "1"} if wanted else {}
