"""The way between the hosts of the ranks, beside the devices' own links.

Own states, the commit barrier and the repair of shards travel between hosts: they must work while the devices' links
are down or not yet up, and HCCL carries no memory of the host. It is the gloo communicator without torch's default
group.
"""

from datetime import timedelta
from types import SimpleNamespace

from .gloo import GlooCommunicator


class HostGroup(GlooCommunicator):
    """One gloo group of all ranks, unknown to torch.distributed."""

    name = "host"

    def _make_world(self, timeout: timedelta) -> None:
        """Make the group of all ranks."""
        self.make_group(
            SimpleNamespace(global_ranks_in_group=list(self._members), group_rank=self._rank, timeout=timeout)
        )
