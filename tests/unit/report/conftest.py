"""A job that has lived through everything: six incidents on two nodes of two ranks and one spare, as records."""

import pytest

from midstep.protocol.incidents import (
    BudgetUse,
    Incident,
    JobStatus,
    NodeStatus,
    Outcome,
    PhaseRecord,
    RankPhase,
    RankStatus,
)
from midstep.protocol.types import Decision, FaultKind, FaultLevel, FaultReport, RestoreSource, Rung, SkippedRung

START_S = 1_770_000_000.0  # 2026-02-02 02:40:00 UTC
STEP_S = 0.12
SHARD_BYTES = 120_000_000
PIDS = {0: 4200, 1: 4201, 2: 4302, 3: 4303}


def echoes(at_s: float, ranks: tuple[int, ...], generation: int) -> tuple[FaultReport, ...]:
    """What the other ranks say when a peer is gone."""
    return tuple(
        FaultReport(
            FaultKind.COMMUNICATION,
            at_s + 0.0005 * rank,
            f"rank/{rank}",
            "all_reduce: connection closed by peer",
            rank=rank,
            node=f"node-{rank // 2}",
            generation=generation,
        )
        for rank in ranks
    )


def phases(began_s: float, generation: int, lengths: dict[str, float]) -> tuple[PhaseRecord, ...]:
    """Controller phases, one after the other."""
    records = []
    for name, length_s in lengths.items():
        records.append(PhaseRecord(generation, name, began_s, began_s + length_s))
        began_s += length_s
    return tuple(records)


def rank_phases(generation: int, replaced: tuple[int, ...], join_s: float, repair_s: float) -> tuple[RankPhase, ...]:
    """Four ranks through the lifecycle: survivors stop and clean, newcomers join."""
    records = []
    for rank in PIDS:
        if rank in replaced:
            records.append(RankPhase(generation, rank, "join", join_s + 0.003 * rank))
        else:
            records.append(RankPhase(generation, rank, "stop", 0.004 + 0.002 * rank))
            records.append(RankPhase(generation, rank, "clean", 0.002))
        records.append(RankPhase(generation, rank, "rebuild", 0.021 + 0.001 * rank))
        records.append(RankPhase(generation, rank, "repair", repair_s if rank in replaced else repair_s * 0.9))
        records.append(RankPhase(generation, rank, "rollback", 0.0004 if rank not in replaced else 0.003))
    return tuple(records)


def exception() -> Incident:
    """Rank 0 raised: its process is restarted, nothing is lost."""
    began_s = START_S + 60
    return Incident(
        number=1,
        began_s=began_s,
        reports=(
            FaultReport(
                FaultKind.EXCEPTION,
                began_s,
                "rank/0",
                'Traceback (most recent call last):\n  File "train.py", line 88\nValueError: loss is not finite',
                rank=0,
                node="node-0",
                generation=1,
            ),
            *echoes(began_s + 0.004, (1, 2, 3), 1),
        ),
        decisions=(
            Decision(
                Rung.RECOVER_IN_PLACE,
                "a software fault in rank 0, and node-0 is healthy",
                (SkippedRung(Rung.RETRY_STEP, "rank 0 is at fault: it raised"),),
            ),
        ),
        generations=(2,),
        phases=phases(began_s + 0.006, 2, {"quiescing": 0.041, "rejoining": 0.105, "resuming": 0.131}),
        rank_phases=rank_phases(2, (0,), 0.036, 0.058),
        replaced=(0,),
        pids_before=PIDS,
        pids_after={**PIDS, 0: 4410},
        restore=RestoreSource.REPLICA,
        repair_reasons=("rank 0 takes 40 MB each of shard model from ranks 1, 2 and 3, clean at step 412",),
        bytes_moved=SHARD_BYTES,
        committed_before=412,
        resumed_step=412,
        resumed_s=began_s + 0.283,
        median_step_s=STEP_S,
        outcome=Outcome.RESUMED,
        ended_reason="all ranks have committed the repeated step",
    )


def killed() -> Incident:
    """Rank 1 was killed: the echoes of the others came before the news of the exit."""
    began_s = START_S + 120
    return Incident(
        number=2,
        began_s=began_s,
        reports=(
            *echoes(began_s + 0.001, (0, 2, 3), 2),
            FaultReport(
                FaultKind.EXIT,
                began_s,
                "node/node-0",
                "ended by signal 9 (SIGKILL)",
                rank=1,
                node="node-0",
                generation=2,
            ),
        ),
        decisions=(
            Decision(
                Rung.RECOVER_IN_PLACE,
                "the process of rank 1 ended, and node-0 is healthy",
                (SkippedRung(Rung.RETRY_STEP, "the process of rank 1 is gone"),),
            ),
        ),
        generations=(3,),
        phases=phases(
            began_s + 0.003, 3, {"suspecting": 0.004, "quiescing": 0.034, "rejoining": 0.098, "resuming": 0.128}
        ),
        rank_phases=rank_phases(3, (1,), 0.028, 0.055),
        replaced=(1,),
        pids_before={**PIDS, 0: 4410},
        pids_after={**PIDS, 0: 4410, 1: 4502},
        restore=RestoreSource.REPLICA,
        repair_reasons=("rank 1 takes 40 MB each of shard model from ranks 0, 2 and 3, clean at step 870",),
        bytes_moved=SHARD_BYTES,
        committed_before=870,
        resumed_step=870,
        resumed_s=began_s + 0.267,
        median_step_s=STEP_S,
        outcome=Outcome.RESUMED,
    )


def stalled() -> Incident:
    """Rank 3 was stopped by SIGSTOP: seeing it takes three steps and a second, mending it does not."""
    began_s = START_S + 180
    return Incident(
        number=3,
        began_s=began_s,
        reports=(
            FaultReport(
                FaultKind.STALL,
                began_s,
                "node/node-1",
                "no progress for 1.36 s in computing, median step 120 ms; the process is stopped",
                rank=3,
                node="node-1",
                generation=3,
            ),
        ),
        decisions=(
            Decision(
                Rung.RECOVER_IN_PLACE,
                "rank 3 stands still, and node-1 is healthy",
                (SkippedRung(Rung.RETRY_STEP, "rank 3 does not answer"),),
            ),
        ),
        generations=(4,),
        phases=phases(
            began_s + 1.362, 4, {"suspecting": 0.302, "quiescing": 0.039, "rejoining": 0.101, "resuming": 0.13}
        ),
        rank_phases=rank_phases(4, (3,), 0.03, 0.056),
        replaced=(3,),
        pids_before={0: 4410, 1: 4502, 2: 4302, 3: 4303},
        pids_after={0: 4410, 1: 4502, 2: 4302, 3: 4611},
        restore=RestoreSource.REPLICA,
        repair_reasons=("rank 3 takes 40 MB each of shard model from ranks 0, 1 and 2, clean at step 1301",),
        bytes_moved=SHARD_BYTES,
        committed_before=1301,
        resumed_step=1301,
        resumed_s=began_s + 1.934,
        median_step_s=STEP_S,
        outcome=Outcome.RESUMED,
    )


def node_lost() -> Incident:
    """Node-1 went with ranks 2 and 3: the spare node takes them."""
    began_s = START_S + 240
    return Incident(
        number=4,
        began_s=began_s,
        reports=(
            *echoes(began_s + 0.002, (0, 1), 4),
            FaultReport(
                FaultKind.NODE_LOST,
                began_s + 0.009,
                "platform",
                "the agent of node-1 ended by signal 9 (SIGKILL)",
                node="node-1",
                level=FaultLevel.NODE,
            ),
        ),
        decisions=(
            Decision(
                Rung.RECOVER,
                "spare node node-2 takes ranks 2 and 3",
                (
                    SkippedRung(Rung.RETRY_STEP, "the processes of ranks 2 and 3 are gone"),
                    SkippedRung(Rung.RECOVER_IN_PLACE, "node-1 is lost: there is no place to recover in"),
                ),
            ),
        ),
        generations=(5,),
        phases=phases(began_s + 0.011, 5, {"quiescing": 0.062, "rejoining": 0.143, "resuming": 0.134}),
        rank_phases=rank_phases(5, (2, 3), 0.045, 0.095),
        replaced=(2, 3),
        pids_before={0: 4410, 1: 4502, 2: 4302, 3: 4611},
        pids_after={0: 4410, 1: 4502, 2: 4720, 3: 4721},
        restore=RestoreSource.REPLICA,
        repair_reasons=(
            "rank 2 takes 60 MB each of shard model from ranks 0 and 1, clean at step 1755",
            "rank 3 takes 60 MB each of shard model from ranks 0 and 1, clean at step 1755",
        ),
        bytes_moved=2 * SHARD_BYTES,
        committed_before=1755,
        resumed_step=1755,
        resumed_s=began_s + 0.35,
        median_step_s=STEP_S,
        outcome=Outcome.RESUMED,
    )


def failed_rung() -> Incident:
    """Recovering in place failed, no spare was left: all restart from the checkpoint, seven steps are lost."""
    began_s = START_S + 300
    everybody = {rank: 4900 + rank for rank in PIDS}
    return Incident(
        number=5,
        began_s=began_s,
        reports=(
            FaultReport(FaultKind.EXIT, began_s, "node/node-0", "exit status 1", rank=1, node="node-0", generation=5),
            FaultReport(
                FaultKind.START_FAILED,
                began_s + 60.05,
                "controller",
                "rank 1 did not join within 60 s",
                rank=1,
                node="node-0",
                generation=6,
                incarnation=2,
            ),
        ),
        decisions=(
            Decision(
                Rung.RECOVER_IN_PLACE,
                "the process of rank 1 ended, and node-0 is healthy",
                (SkippedRung(Rung.RETRY_STEP, "the process of rank 1 is gone"),),
            ),
            Decision(
                Rung.RESCHEDULE_POD,
                "the platform creates a node in place of node-0; all processes restart from the checkpoint",
                (
                    SkippedRung(Rung.RETRY_STEP, "the process of rank 1 is gone"),
                    SkippedRung(Rung.RECOVER_IN_PLACE, "it failed in this incident"),
                    SkippedRung(Rung.RECOVER, "no spare node is left"),
                ),
            ),
        ),
        generations=(6, 7),
        phases=(
            *phases(began_s + 0.004, 6, {"quiescing": 60.046}),
            *phases(began_s + 60.05, 7, {"quiescing": 2.9, "rejoining": 1.31, "resuming": 0.64}),
        ),
        rank_phases=(
            *(RankPhase(6, rank, name, 0.006) for rank in (0, 2, 3) for name in ("stop", "clean")),
            *rank_phases(7, (0, 1, 2, 3), 2.7, 1.1),
        ),
        replaced=(0, 1, 2, 3),
        pids_before={0: 4410, 1: 4502, 2: 4720, 3: 4721},
        pids_after=everybody,
        restore=RestoreSource.CHECKPOINT,
        repair_reasons=("no process that holds shard model is left; the checkpoint of step 2200 is complete",),
        committed_before=2207,
        resumed_step=2200,
        resumed_s=began_s + 64.9,
        median_step_s=STEP_S,
        outcome=Outcome.RESUMED,
    )


def stopped() -> Incident:
    """The budgets are spent: the job ends with its reason."""
    began_s = START_S + 420
    return Incident(
        number=6,
        began_s=began_s,
        reports=(
            FaultReport(
                FaultKind.EXIT,
                began_s,
                "node/node-2",
                "ended by signal 11 (SIGSEGV)",
                rank=2,
                node="node-2",
                generation=7,
            ),
        ),
        decisions=(
            Decision(
                Rung.STOP,
                "no other rung is left",
                (
                    SkippedRung(Rung.RETRY_STEP, "the process of rank 2 is gone"),
                    SkippedRung(Rung.RECOVER_IN_PLACE, "budget spent: recover_in_place per job, 4 of 4"),
                    SkippedRung(Rung.RECOVER, "no spare node is left"),
                    SkippedRung(Rung.RESCHEDULE_POD, "budget spent: reschedule_pod per job, 1 of 1"),
                    SkippedRung(Rung.RESCHEDULE_JOB, "budget spent: reschedule_job per job, 0 of 0"),
                ),
            ),
        ),
        generations=(8,),
        phases=phases(began_s + 0.004, 8, {"quiescing": 0.018, "stopping": 0.41}),
        rank_phases=tuple(RankPhase(8, rank, "stop", 0.012) for rank in (0, 1, 3)),
        pids_before={rank: 4900 + rank for rank in PIDS},
        committed_before=3001,
        median_step_s=STEP_S,
        outcome=Outcome.STOPPED,
        ended_reason="budget recover_in_place per job is spent (4 of 4); emergency checkpoint of step 3001 written",
    )


def under_way() -> Incident:
    """A kill that is being recovered from right now."""
    began_s = START_S + 500
    return Incident(
        number=7,
        began_s=began_s,
        reports=(
            FaultReport(FaultKind.EXIT, began_s, "node/node-0", "ended by signal 9 (SIGKILL)", rank=0, node="node-0"),
        ),
        decisions=(Decision(Rung.RECOVER_IN_PLACE, "the process of rank 0 ended, and node-0 is healthy"),),
        generations=(9,),
        phases=(
            PhaseRecord(9, "quiescing", began_s + 0.005, began_s + 0.04),
            PhaseRecord(9, "rejoining", began_s + 0.04),
        ),
        replaced=(0,),
        pids_before=PIDS,
        median_step_s=STEP_S,
    )


@pytest.fixture
def status() -> JobStatus:
    """The job after its six incidents, stopped."""
    return JobStatus(
        job="gpt-stdlib",
        at_s=START_S + 420.5,
        phase="stopped",
        generation=8,
        term=1,
        committed=3001,
        median_step_s=STEP_S,
        ranks=tuple(
            RankStatus(rank, ("node-0", "node-0", "node-2", "node-2")[rank], pid + 700, 2, "ended", 3001, "finished")
            for rank, pid in PIDS.items()
        ),
        nodes=(
            NodeStatus("node-0", "local/0", "active", (0, 1)),
            NodeStatus("node-1", "local/1", "lost", ()),
            NodeStatus("node-2", "local/2", "active", (2, 3)),
        ),
        budgets=(
            BudgetUse("recover_in_place per job", 4, 4),
            BudgetUse("recover per job", 1, 3),
            BudgetUse("reschedule_pod per job", 1, 1),
            BudgetUse("reschedule_job per job", 0, 0),
        ),
        incidents=(exception(), killed(), stalled(), node_lost(), failed_rung(), stopped()),
        refused={"old generation": 3},
        exit_code=1,
        reason="budget recover_in_place per job is spent (4 of 4)",
    )


@pytest.fixture
def running() -> JobStatus:
    """A job with a recovery under way, 0.25 s after the kill."""
    began = under_way()
    return JobStatus(
        job="gpt-stdlib",
        at_s=began.began_s + 0.25,
        phase="rejoining",
        generation=9,
        term=2,
        committed=3100,
        median_step_s=STEP_S,
        ranks=tuple(
            RankStatus(rank, f"node-{rank // 2}", pid, 0, "joining" if rank == 0 else "ready", 3100, "recovering")
            for rank, pid in PIDS.items()
        ),
        nodes=(NodeStatus("node-0", "local/0", "active", (0, 1)), NodeStatus("node-1", "local/1", "active", (2, 3))),
        budgets=(BudgetUse("recover_in_place per job", 1, 8),),
        incidents=(began,),
    )
