"""Mutants: the machine with one thing broken on purpose. The simulation has to catch every one.

    python tests/simulation/mutants.py          all of them, as a table with what caught each (`make mutants`)
    python tests/simulation/mutants.py NAME...  some

A mutant is a piece of a module's text and what stands in its place. It is applied in memory: the module is compiled
again, and its functions get the new code for a while. Nothing is written to any file.
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

from midstep.controller.recovery.state import Phase
from midstep.simulation.invariants import InvariantBroken
from midstep.simulation.world import simulate

MOST_SEEDS = 12_000
CODE_PARTS = ("co_code", "co_consts", "co_names")  # in which a function that was broken differs
FOCUSES = (None, Phase.RESUMING, Phase.SAVING, Phase.REJOINING)  # in turn: where faults wait in a job


class Mutant(NamedTuple):
    """One break: wherever `old` stands in `module`, `new` takes its place."""

    name: str
    module: str
    old: str
    new: str
    focuses: tuple[Phase | None, ...] = FOCUSES


class Caught(NamedTuple):
    """What the simulation said: the seed, what it complained of, and how many seeds it took."""

    seed: int
    by: str
    what: str


class TextGone(Exception):
    """The text of a mutant is no longer in its module: write the mutant again."""


MUTANTS = (
    Mutant(
        "give a checkpoint up when a writer dies",
        "midstep.controller.recovery.shutdown",
        '_save_again(state, f"rank {rank} was lost while it saved: {detail}", now)',
        'conclude(state, "", now)',
        focuses=(Phase.SAVING,),
    ),
    Mutant(
        "give a checkpoint up when a writer hangs",
        "midstep.controller.recovery.shutdown",
        '_save_again(state, f"rank {ranks} did not write the emergency checkpoint in time", now)',
        'conclude(state, "", now)',
        focuses=(Phase.SAVING,),
    ),
    Mutant(
        "forget what a lost rank needs",
        "midstep.controller.recovery.shutdown",
        "for need in holder.needs}",
        "if holder.report is not None for need in holder.needs}",
    ),
    Mutant(
        "believe any agent about any rank",
        "midstep.controller.node_admission",
        "placement.node_of(rank, ",
        "(lambda _: identity)(",
    ),
    Mutant(
        "skip barrier one",
        "midstep.controller.recovery.barriers",
        "if world.count(RankState.STARTING, RankState.QUIESCING):",
        "if world.count(RankState.STARTING) and False:",
    ),
    Mutant(
        "skip barrier two",
        "midstep.controller.recovery.barriers",
        "    if state.world.count(RankState.REJOINING):\n",
        "    if False:\n",
    ),
    Mutant(
        "resume one rank a step later",
        "midstep.controller.recovery.barriers",
        "Resume(each.rank, state.generation, event.step)",
        "Resume(each.rank, state.generation, event.step + (each.rank == 1))",
    ),
    Mutant(
        "go back one step more than needed",
        "midstep.controller.repair",
        "target = max(report.committed for report in clean.values())",
        "target = max(0, max(report.committed for report in clean.values()) - 1)",
    ),
    Mutant(
        "begin again whatever was complete",
        "midstep.controller.recovery.barriers",
        "if plan.target_step == 0 and (refused := _why_not_begin(state, reports)):",
        'if plan.target_step < 0 and (refused := ""):',
    ),
    Mutant(
        "forget a budget",
        "midstep.controller.recovery.decision",
        "_widened(state.incident.attempt.cost, choice.course.cost)",
        "()",
    ),
    Mutant(
        "replace everybody",
        "midstep.controller.recovery.decision",
        "open_generation(state, course.replace, now)",
        "open_generation(state, tuple(range(state.world.size)), now)",
    ),
    Mutant(
        "never time out",
        "midstep.controller.recovery.deadlines",
        "    elif state.due.phase_s is not None and state.due.phase_s <= now:",
        "    elif False:",
    ),
    Mutant(
        "wait without a deadline",
        "midstep.controller.recovery.state",
        "self.due_s = None if limit_s is None else now + limit_s",
        "self.due_s = None",
    ),
    Mutant(
        "ask for nothing after a restart",
        "midstep.controller.recovery.reconcile",
        "        yield from _to_a_rank(state, holder)\n",
        "        pass\n",
    ),
    Mutant(
        "make the world smaller before anything is saved",
        "midstep.controller.recovery.shutdown",
        "    state.saving.then = Resize(leaving)\n    _save(state, now)\n",
        '    state.saving.then = Resize(leaving)\n    conclude(state, "", now)\n',
    ),
    Mutant(
        "leave a node before its ranks have saved",
        "midstep.controller.recovery.decision",
        "for name in leave if state.world.nodes[name].state is NodeState.LOST]",
        "for name in leave]",
    ),
    Mutant(
        "leave the processes of ranks that are no more",
        "midstep.controller.recovery.scaling",
        "    stop_all_processes(state)\n    kept =",
        "    kept =",
    ),
    Mutant(
        "make the world smaller than allowed",
        "midstep.controller.recovery.scaling",
        "if nodes < (least_nodes(state) or nodes_needed(state)):",
        "if nodes < 1:",
    ),
    Mutant(
        "leave nodes idle that the world could use",
        "midstep.controller.recovery.scaling",
        "nodes = min(len(have), nodes_asked(state))",
        "nodes = least_nodes(state) or nodes_needed(state)",
    ),
    Mutant(
        "let the world grow whatever its budget",
        "midstep.controller.recovery.scaling",
        "if state.ladder.refusals(question, Rung.RESCHEDULE_POD):",
        "if False:",
        focuses=(None,),
    ),
    Mutant("let the world grow at once", "midstep.controller.recovery.scaling", "if now < earliest_s:", "if False:"),
    Mutant(
        "treat what is only to be noted",
        "midstep.controller.recovery.hardware_faults",
        "if treatment in {Treatment.NOTE, Treatment.CLOSE}:",
        "if treatment is Treatment.CLOSE:",
    ),
    Mutant(
        "forget what breaks while there is no world",
        "midstep.controller.recovery.hardware_faults",
        "if asks_to_leave(report) and (",
        "if False and (",
    ),
    Mutant(
        "stay on a device that broke under an earlier process",
        "midstep.controller.recovery.reports",
        "if earlier and not asks_to_leave(report):",
        "if earlier:",
    ),
    Mutant(
        "let a process live that starts after its end was ordered",
        "midstep.controller.recovery.reports",
        "        state.send(node_address(event.node), StopProcess(process.rank, process.incarnation, grace_s=0.0))\n",
        "",
    ),
    Mutant(
        "give nodes back once only",
        "midstep.controller.recovery.reconcile",
        "for name in given_back(state):",
        "for name in ():",
    ),
    Mutant(
        "decide without a reason",
        "midstep.policies.ladder",
        "Decision(rung, _of_roles(names) + RULES[rung].why(case), case.skipped, names)",
        'Decision(rung, "", case.skipped, names)',
    ),
    Mutant(
        "fence neither terms nor sessions of earlier controllers",
        "midstep.protocol.mailbox",
        "        refusal = self._fault_of(envelope, now)\n",
        "        refusal = None\n",
    ),
    Mutant(
        "open no new generation",
        "midstep.controller.recovery.generation",
        "    state.generation += 1\n",
        "",
    ),
    Mutant(
        "take messages twice",
        "midstep.protocol.mailbox",
        "if envelope.number and not sender.mark_taken(envelope.number):",
        "if False:",
    ),
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
        "drop the generation check of the barriers",
        "midstep.controller.recovery.barriers",
        "event.generation != state.generation",
        "False",
    ),
    Mutant(
        "take a torn update for a whole one",
        "midstep.processor.step_state",
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
        "midstep.processor.step_state",
        "        self.ready = False\n",
        "        pass\n",
    ),
    Mutant(
        "report a step too few",
        "midstep.processor.step_state",
        "committed=self.count,",
        "committed=max(0, self.count - 1),",
    ),
    Mutant(
        "stand at another step after the rollback",
        "midstep.processor.step_state",
        "= step, False, False",
        "= step + 1, False, False",
    ),
    Mutant(
        "hand out what is being overwritten",
        "midstep.processor.step_state",
        "            self.clean = False\n",
        "            pass\n",
    ),
    Mutant(
        "drop the gradients at the broken barrier",
        "midstep.processor.rank_loop",
        "(yield act.Inspect()))  # and nothing is dropped",
        "(yield act.Clean()))  # and nothing is dropped",
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
        "        while self._early:\n",
        "        while False:\n",
    ),
    Mutant(
        "clean nothing",
        "midstep.processor.rank_loop",
        "        self._step_state.mark_corrupted((yield act.Clean()))\n",
        "        yield act.Inspect()\n",
    ),
    Mutant(
        "act before it is recorded",
        "midstep.simulation.controller",
        "        self.journal.append((event, now, sender, session, number))\n",
        "        if self.crash_next is None:\n            self.journal.append((event, now, sender, session, number))\n",
    ),
    Mutant(
        "forget after a restart what was received",
        "midstep.simulation.controller",
        "            self._endpoint.mailbox.remember(sender, session, number)\n",
        "",
    ),
)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Break the module. Raises TextGone when its text has changed."""
    module = importlib.import_module(mutant.module)
    source = inspect.getsource(module)
    if mutant.old not in source:
        raise TextGone(f"{mutant.name}: this stands no longer in {mutant.module}: {mutant.old}")
    namespace: dict[str, object] = {
        "__name__": mutant.module,
        "__package__": module.__package__,
        "__file__": module.__file__,
    }
    exec(compile(source.replace(mutant.old, mutant.new), str(module.__file__), "exec"), namespace)
    changed = {}
    for function, broken in _pairs(vars(module), namespace):
        if any(getattr(function.__code__, part) != getattr(broken.__code__, part) for part in CODE_PARTS):
            changed[function] = function.__code__
            function.__code__ = broken.__code__
    try:
        yield
    finally:
        for function, code in changed.items():
            function.__code__ = code


def _pairs(ours: dict[str, object], theirs: dict[str, object]) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Yield the functions and methods that two versions of a module have in common."""
    for name, value in list(ours.items()):
        mine, other = (each.fget if isinstance(each, property) else each for each in (value, theirs.get(name)))
        if getattr(mine, "__module__", None) != theirs["__name__"]:
            continue
        if isinstance(mine, FunctionType) and isinstance(other, FunctionType):
            yield mine, other
        elif isinstance(mine, type) and isinstance(other, type):
            yield from _pairs(dict(vars(mine)), {**vars(other), "__name__": theirs["__name__"]})


def hunt(mutant: Mutant, most_seeds: int = MOST_SEEDS) -> Caught | None:
    """Return what the simulation says of the mutant; None when it lives."""
    with applied(mutant):
        for seed in range(most_seeds):
            try:
                simulate(seed, focus=mutant.focuses[seed % len(mutant.focuses)])
            except InvariantBroken as broken:
                return Caught(seed, str(broken.invariant), broken.what)
            except Exception as error:  # the simulated world has come apart over it
                return Caught(seed, type(error).__name__, str(error))
    return None


def main() -> int:
    """Hunt them; 1 when one lives."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a mutant's name")
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS, help="how many seeds each may take")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if not options.names or any(name in each.name for name in options.names)]
    table = Table("mutant", "in", "seeds", "caught by", "what was seen")
    lived = 0
    for mutant in chosen:
        caught = hunt(mutant, options.seeds)
        lived += caught is None
        row = ("-", "lives", "") if caught is None else (str(caught.seed + 1), caught.by, caught.what[:70])
        table.add_row(mutant.name, mutant.module.removeprefix("midstep."), *row)
        print(f"{mutant.name}: {row[1]}, {row[0]} seeds", file=sys.stderr, flush=True)
    Console(width=160).print(table)
    return 1 if lived else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    raise SystemExit(main())
