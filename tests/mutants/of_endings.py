"""Emergency checkpoints, the end of a job, and worlds of another size, broken on purpose."""

from midstep.controller.recovery.state import Phase

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "give a checkpoint up when a writer dies",
        "midstep.controller.recovery.saving",
        'return _save_again(state, f"{ranks_text(lost)} died while the checkpoint was written: {rec.detail}")',
        'return _conclude(state, "")',
        focuses=(Phase.SAVING,),
    ),
    Mutant(
        "give a checkpoint up when a writer hangs",
        "midstep.controller.recovery.saving",
        'return _save_again(state, f"{ranks_text(late)} did not write the emergency checkpoint in time")',
        'return _conclude(state, "")',
        focuses=(Phase.SAVING,),
    ),
    Mutant(
        "forget what a lost rank needs",
        "midstep.controller.recovery.saving",
        "for need in holder.needs}",
        "if holder.report is not None for need in holder.needs}",
    ),
    Mutant(
        "make the world smaller before anything is saved",
        "midstep.controller.recovery.saving",
        "    state.saving.then = rec.goal\n",
        "    state.saving.then = rec.goal\n"
        '    if not isinstance(rec.goal, Result):\n        return _conclude(state, "")\n',
    ),
    Mutant(
        "restart all processes before anything is saved",
        "midstep.controller.recovery.decision",
        "[do.SaveFirst(goal)] if _saves_first(state) else",
        "[do.SaveFirst(goal)] if False else",
    ),
    Mutant(
        "leave a node before its ranks have saved",
        "midstep.controller.recovery.decision",
        "for name in leave if state.world.nodes[name].state is NodeState.LOST]",
        "for name in leave]",
    ),
    Mutant(
        "leave the processes of ranks that are no more",
        "midstep.controller.recovery.start",
        "    stop_all_processes(state)\n    kept =",
        "    kept =",
    ),
    Mutant(
        "make the world smaller than allowed",
        "midstep.controller.recovery.start",
        "if nodes < (state.policy.scale.min_nodes or state.nodes_needed):",
        "if nodes < 1:",
    ),
    Mutant(
        "leave nodes idle that the world could use",
        "midstep.controller.recovery.start",
        "nodes = min(len(have), state.nodes_asked)",
        "nodes = state.policy.scale.min_nodes or state.nodes_needed",
    ),
    Mutant(
        "let the world grow at once",
        "midstep.controller.recovery.start",
        "if state.now < state.planned.scaled_s + least_s:",
        "if False:",
    ),
)
