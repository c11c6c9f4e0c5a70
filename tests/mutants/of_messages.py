"""Rules for what is believed, taken twice, or said again after a restart of the controller, broken on purpose."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "believe any agent about any rank",
        "midstep.controller.admission",
        "placement.node_of(rank, ",
        "(lambda _, here=locals(): here.get('identity', here.get('address')))(",
    ),
    Mutant(
        "ask for nothing after a restart",
        "midstep.controller.recovery.machine",
        "                yield from owes(state, holder)\n",
        "                pass\n",
    ),
    Mutant(
        "give nodes back once only",
        "midstep.controller.recovery.world",
        "return [node.name for node in self.nodes.values() if node.given_back]",
        "return []",
    ),
    Mutant(
        "fence neither terms nor sessions of earlier controllers",
        "midstep.protocol.mailbox",
        "if (refusal := self._fault_of(envelope, sender, now)) is not None:",
        "if (refusal := None) is not None:",
    ),
    Mutant(
        "take messages twice",
        "midstep.protocol.mailbox",
        "if envelope.number and not sender.mark_taken(envelope.number):",
        "if False:",
    ),
    Mutant(
        "act before it is recorded",
        "midstep.testing.simulation.controller",
        "            self.journal.append((event, self._timeline.now, sender, session, number))\n",
        "            if len(self.journal) not in self._crash_over:\n"
        "                self.journal.append((event, self._timeline.now, sender, session, number))\n",
    ),
    Mutant(
        "forget after a restart what was received",
        "midstep.testing.simulation.controller",
        "            self._endpoint.mailbox.remember(sender, session, number)\n",
        "",
    ),
)
