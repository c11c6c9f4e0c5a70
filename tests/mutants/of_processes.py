"""The loop of a rank, its session, standing and step order (`processor/`), broken on purpose."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "resume without having been ready",
        "midstep.processor.session",
        "if self.stage is not fitting:",
        "if False:",
    ),
    Mutant(
        "drop the processor's generation check",
        "midstep.processor.session",
        "if command.generation < self.generation:",
        "if False:",
    ),
    Mutant(
        "take a torn update for a whole one",
        "midstep.processor.step_order",
        "self.updating = self.ready = self.clean = False",
        "self.count, self.updating, self.ready = self.count + 1, False, False",
    ),
    Mutant(
        "follow after a torn update what was ordered before",
        "midstep.processor.step_order",
        "        if self._step_state.updating:\n",
        "        if False:\n",
    ),
    Mutant(
        "enter the commit barrier without the peer copy",
        "midstep.processor.step_order",
        "(yield Act.SWAP) and (yield Act.MEET)",
        "(yield Act.MEET)",
    ),
    Mutant(
        "update without the commit barrier",
        "midstep.processor.step_order",
        "(yield Act.SWAP) and (yield Act.MEET)",
        "(yield Act.SWAP)",
    ),
    Mutant(
        "update at a broken barrier without being told to",
        "midstep.processor.step_order",
        "            if not finish:\n",
        "            if False:\n",
    ),
    Mutant(
        "never be ready",
        "midstep.processor.step_order",
        "        step_state.ready = True\n",
        "",
    ),
    Mutant(
        "be ready without the gradients",
        "midstep.processor.step_order",
        "        self.ready = False\n",
        "        pass\n",
    ),
    Mutant(
        "report a step too few",
        "midstep.processor.step_order",
        "committed=self.count,",
        "committed=max(0, self.count - 1),",
    ),
    Mutant(
        "stand at another step after the rollback",
        "midstep.processor.step_order",
        "= step, False, False",
        "= step + 1, False, False",
    ),
    Mutant(
        "hand out what is being overwritten",
        "midstep.processor.step_order",
        "            self.clean = False\n",
        "            pass\n",
    ),
    Mutant(
        "drop the gradients at the broken barrier",
        "midstep.processor.rank_loop",
        "(yield Inspect()))  # and nothing is dropped",
        "(yield Clean()))  # and nothing is dropped",
    ),
    Mutant(
        "be ready though the way back has failed",
        "midstep.processor.rank_loop",
        "        if failed:\n",
        "        if False:\n",
    ),
    Mutant(
        "join before the rank is handed over",
        "midstep.processor.rank_loop",
        "        if self._early:\n",
        "        if False:\n",
    ),
    Mutant(
        "clean nothing",
        "midstep.processor.rank_loop",
        "        self._step_state.mark_corrupted((yield Clean()))\n",
        "        yield Inspect()\n",
    ),
)
