"""What is decided about faults, the barriers and the deadlines, broken on purpose."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "skip barrier one",
        "midstep.controller.handlers.barriers",
        "and each.holds(state)), None)",
        "and (each.holds(state) or (each.then is _plan_repair and not state.world.count(RankState.STARTING)))), None)",
    ),
    Mutant(
        "skip barrier two",
        "midstep.controller.handlers.barriers",
        "and each.holds(state)), None)",
        "and (each.holds(state) or (each.then is _resume and state.world.count(RankState.READY)))), None)",
    ),
    Mutant(
        "resume one rank a step later",
        "midstep.controller.handlers.barriers",
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
        "midstep.controller.handlers.barriers",
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
        "open_or_widen(state, course.replace, now)",
        "open_or_widen(state, tuple(range(state.world.size)), now)",
    ),
    Mutant(
        "wait for a promised node for ever",
        "midstep.controller.changes.generation",
        "due.nodes_s = now + limits.nodes_s if due.nodes_s is None else due.nodes_s",
        "due.nodes_s = None",
    ),
    Mutant(
        "never time out",
        "midstep.controller.handlers.deadlines",
        "    elif state.due.phase_s is not None and state.due.phase_s <= now:",
        "    elif False:",
    ),
    Mutant(
        "wait without a deadline",
        "midstep.controller.recovery.state",
        "self.due.phase_s = None if limit_s is None else now + limit_s",
        "self.due.phase_s = None",
    ),
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
        "midstep.controller.handlers.reports",
        "if earlier and not asks_to_leave(report):",
        "if earlier:",
    ),
    Mutant(
        "let a process live that starts after its end was ordered",
        "midstep.controller.handlers.reports",
        "        state.send(node_address(event.node), StopProcess(process.rank, process.incarnation, grace_s=0.0))\n",
        "",
    ),
    Mutant(
        "decide without a reason",
        "midstep.policies.ladder",
        "Decision(rung, _of_roles(names) + RULES[rung].why(case), case.skipped, names)",
        'Decision(rung, "", case.skipped, names)',
    ),
    Mutant(
        "open no new generation",
        "midstep.controller.recovery.state",
        "        self.generation += 1\n",
        "        pass\n",
    ),
    Mutant(
        "drop the generation check of the barriers",
        "midstep.controller.handlers.answers",
        "event.generation != state.generation",
        "False",
    ),
)
