"""Emergency checkpoints, the end of a job, and worlds of another size, broken on purpose."""

from midstep.controller.recovery.state import Phase

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "give a checkpoint up when a writer dies",
        "midstep.controller.changes.shutdown",
        '_save_again(state, f"{ranks_text(lost)} died while the checkpoint was written: {detail}", now)',
        'conclude(state, "", now)',
        focuses=(Phase.SAVING,),
    ),
    Mutant(
        "give a checkpoint up when a writer hangs",
        "midstep.controller.changes.shutdown",
        '_save_again(state, f"{ranks_text(late)} did not write the emergency checkpoint in time", now)',
        'conclude(state, "", now)',
        focuses=(Phase.SAVING,),
    ),
    Mutant(
        "forget what a lost rank needs",
        "midstep.controller.changes.shutdown",
        "for need in holder.needs}",
        "if holder.report is not None for need in holder.needs}",
    ),
    Mutant(
        "make the world smaller before anything is saved",
        "midstep.controller.changes.shutdown",
        "    state.saving.then = goal\n    _save(state, now)\n",
        '    state.saving.then = goal\n    conclude(state, "", now)\n',
    ),
    Mutant(
        "restart all processes before anything is saved",
        "midstep.controller.recovery.decision",
        "    if saves_first(state):\n",
        "    if False:\n",
    ),
    Mutant(
        "leave a node before its ranks have saved",
        "midstep.controller.recovery.decision",
        "for name in leave if state.world.nodes[name].state is NodeState.LOST]",
        "for name in leave]",
    ),
    Mutant(
        "leave the processes of ranks that are no more",
        "midstep.controller.changes.scaling",
        "    stop_all_processes(state)\n    kept =",
        "    kept =",
    ),
    Mutant(
        "make the world smaller than allowed",
        "midstep.controller.changes.scaling",
        "if nodes < (least_nodes(state) or nodes_needed(state)):",
        "if nodes < 1:",
    ),
    Mutant(
        "leave nodes idle that the world could use",
        "midstep.controller.changes.scaling",
        "nodes = min(len(have), nodes_asked(state))",
        "nodes = least_nodes(state) or nodes_needed(state)",
    ),
    Mutant(
        "let the world grow whatever its budget",
        "midstep.controller.changes.scaling",
        "if state.ladder.refusals(question, Rung.RESCHEDULE_POD):",
        "if False:",
        focuses=(None,),
    ),
    Mutant("let the world grow at once", "midstep.controller.changes.scaling", "if now < earliest_s:", "if False:"),
)
