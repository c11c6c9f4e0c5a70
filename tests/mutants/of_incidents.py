"""Decisions about faults, the barriers and the deadlines, broken on purpose."""

from .mutant import Mutant

_EARLY = """                early = rule.then.__name__ == "{rule}" and {holds}
                if rule.holds(state) or early:"""

MUTANTS = (
    Mutant(
        "skip barrier one",
        "midstep.controller.recovery.machine",
        "                if rule.holds(state):",
        _EARLY.format(rule="_plan_repair", holds='not state.world.has("starting")'),
    ),
    Mutant(
        "skip barrier two",
        "midstep.controller.recovery.machine",
        "                if rule.holds(state):",
        _EARLY.format(rule="_resume", holds='state.world.has("ready")'),
    ),
    Mutant(
        "resume one rank a step later",
        "midstep.controller.recovery.lifecycle",
        "Resume(each.rank, state.generation, step)",
        "Resume(each.rank, state.generation, step + (each.rank == 1))",
    ),
    Mutant(
        "go back one step more than needed",
        "midstep.controller.recovery.repair",
        "target = max(report.committed for report in clean.values())",
        "target = max(0, max(report.committed for report in clean.values()) - 1)",
    ),
    Mutant(
        "begin again whatever was complete",
        "midstep.controller.recovery.lifecycle",
        "if plan.target_step == 0 and (refused := _why_not_begin(state, reports)):",
        'if plan.target_step < 0 and (refused := ""):',
    ),
    Mutant(
        "forget a budget",
        "midstep.controller.recovery.decision",
        "take(choice.decision.rung, choice.course.cost)",
        "take(choice.decision.rung, ())",
    ),
    Mutant(
        "replace everybody",
        "midstep.controller.recovery.decision",
        "OpenGeneration(course.replace,",
        "OpenGeneration(tuple(range(state.world.size)),",
    ),
    Mutant(
        "wait for a promised node for ever",
        "midstep.controller.recovery.orders",
        "        due.incident.setdefault(NODES, state.now + limits.nodes_s)  # however often they are put off\n",
        "",
    ),
    Mutant(
        "never time out",
        "midstep.controller.recovery.machine",
        "if state.due.phase_s is not None and state.due.phase_s <= state.now:",
        "if False:",
    ),
    Mutant(
        "wait without a deadline",
        "midstep.controller.recovery.state",
        "self.due.phase_s = None if limit_s is None else self.now + limit_s",
        "self.due.phase_s = None",
    ),
    Mutant(
        "treat what is only to be noted",
        "midstep.controller.recovery.hardware",
        "if treatment in {Treatment.NOTE, Treatment.CLOSE}:",
        "if treatment is Treatment.CLOSE:",
    ),
    Mutant(
        "forget what breaks while there is no world",
        "midstep.controller.recovery.blame",
        "if asks_to_leave(report) and (",
        "if False and (",
    ),
    Mutant(
        "stay on a device that broke under an earlier process",
        "midstep.controller.recovery.blame",
        "if earlier and not asks_to_leave(report):",
        "if earlier:",
    ),
    Mutant(
        "let a process live that starts after its end was ordered",
        "midstep.controller.recovery.lifecycle",
        "        state.send(node_address(event.node), StopProcess(process.rank, process.incarnation, grace_s=0.0))\n",
        "",
    ),
    Mutant(
        "decide without a reason",
        "midstep.policies.ladder",
        "Decision(taken, whose + RULES[taken].why(case), case.skipped, names)",
        'Decision(taken, "", case.skipped, names)',
    ),
    Mutant(
        "open no new generation",
        "midstep.controller.recovery.state",
        "        self.generation += 1\n",
        "        pass\n",
    ),
    Mutant(
        "drop the generation check of the barriers",
        "midstep.controller.recovery.lifecycle",
        "event.generation != state.generation or holder.state",
        "False or holder.state",
    ),
)
