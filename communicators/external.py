"""The communicator of a job whose process groups are the framework's own: only links between hosts are midstep's.

The framework stops and rebuilds its groups in its own handlers (`midstep run --mindio`). What a recovery of midstep's
needs itself, the commit barrier and the copies of rank-local states, travels between hosts.
"""

from .gloo.host_group import HostGroup


class ExternalCommunicator(HostGroup):
    """See Communicator: the group of all ranks' hosts, and nothing that torch.distributed knows of."""

    name = "external"
