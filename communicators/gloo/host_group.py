"""The gloo group between the hosts of all ranks, for communicators whose groups are a device's or a framework's own."""

from datetime import timedelta
from types import SimpleNamespace

from .communicator import GlooCommunicator


class HostGroup(GlooCommunicator):
    """The gloo group of all ranks' hosts, beside a device's own links, unknown to torch.distributed.

    Rank-local state, the commit barrier and the repair of shards travel between hosts: they must work while the
    devices' links are down or not yet up, and HCCL carries no host memory.
    """

    name = "host"

    def _make_world(self, timeout: timedelta) -> None:
        """Make the group of all ranks."""
        self.make_group(
            SimpleNamespace(global_ranks_in_group=list(self._members), group_rank=self._rank, timeout=timeout)
        )
