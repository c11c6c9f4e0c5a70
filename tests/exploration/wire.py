"""The real mailbox, asked at every arrival: it has to refuse what comes twice, and what an earlier controller has sent.

So duplicates need no states of their own: wherever a copy came, it would be refused, and nothing would follow from it.
"""

from midstep.protocol.codec import PROTOCOL_VERSION
from midstep.protocol.mailbox import Mailbox
from midstep.protocol.messages import Envelope, WelcomeNode
from midstep.protocol.types import CONTROLLER, JobSpec


class Wire:
    """What a mailbox takes, found out once."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self.takes_twice = self._takes(first=(1, 1), second=(1, 1))
        self.takes_earlier_terms = self._takes(first=(2, 1), second=(1, 2))

    def _takes(self, first: tuple[int, int], second: tuple[int, int]) -> bool:
        """Whether a mailbox that has taken one (term, number) of the controller takes the other."""
        mailbox = Mailbox(job=self._job.job, address="node/node0", session=1)
        assert mailbox.take(self._envelope(*first), 0.0).deliver
        return mailbox.take(self._envelope(*second), 0.0).deliver

    def _envelope(self, term: int, number: int) -> Envelope:
        return Envelope(
            version=PROTOCOL_VERSION,
            job=self._job.job,
            sender=CONTROLLER,
            receiver="node/node0",
            term=term,
            generation=1,
            session=term,
            number=number,
            body=WelcomeNode(self._job),
        )
