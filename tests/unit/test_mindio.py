"""MindIO's names over midstep: what follows from replicas, from exceptions, and between the two threads."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from midstep.adapters.mindio import processor
from midstep.adapters.mindio.device import await_rank_before_groups
from midstep.adapters.mindio.driver import Ask, Conversation, Question
from midstep.adapters.mindio.handlers import HandlerKind, Handlers
from midstep.adapters.mindio.recovery import action_limit_s
from midstep.adapters.mindio.script_checkpoints import MOST_STEPS, TRACKER, newest_step
from midstep.adapters.mindio.state import (
    HandledState,
    Move,
    OptimizerReplicas,
    RankPart,
    dump_of,
    repair_of,
    replicas_of,
    settled,
    shards_of,
)
from midstep.adapters.mindio.values import ReportState, tft_can_do_uce_repair
from midstep.devices.kinds import EXTERNAL
from midstep.launch.job import Start, policy_of, spec_of, with_mindio
from midstep.policies.schema import default_policy
from midstep.protocol import environment as env
from midstep.protocol.errors import ConfigurationError, Interrupted, RecoveryError, StateUnreadable
from midstep.protocol.types import RestoreSource

SEND, UCE, RECV = 0, 1, 3


def standing(rank: int, *moves: Move, struck: bool = False, newcomer: bool = False) -> RankPart:
    """Return what a rank tells."""
    return RankPart(rank, newcomer, newcomer, struck, 0, moves)


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_ranks_that_are_apart_by_a_part_of_the_group_hold_the_same() -> None:
    """Two copies among four ranks: 4 and 8 hold one half, 6 and 10 the other; all four the experts."""
    replicas = replicas_of(
        [
            {"rank_list": [4, 6, 8, 10], "replica_cnt": 2, "replica_shift": 0},
            {"type": 1, "rank_list": [4, 6, 8, 10], "replica_cnt": 4, "replica_shift": 0},
        ]
    )

    held = {rank: shards_of(rank, replicas) for rank in (4, 6, 8, 10, 5)}

    assert held[4] == held[8] == ("0/4/0", "1/4/0")
    assert held[6] == held[10] == ("0/4/1", "1/4/0")
    assert held[5] == ()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"rank_list": (0, 1), "replica_cnt": 2}, "replica_shift"),
        ({"rank_list": ["a"], "replica_cnt": 1, "replica_shift": 0}, "list of ranks"),
        ({"rank_list": [0, 1, 2], "replica_cnt": 2, "replica_shift": 0}, "no multiple of"),
        ({"rank_list": [], "replica_cnt": 1, "replica_shift": 0}, "no multiple of"),
        ({"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 1}, "evenly spread"),
    ],
)
def test_replicas_that_cannot_be_are_refused_with_a_sentence(entry: dict[str, Any], why: str) -> None:
    """With the place of the entry, and what it has."""
    with pytest.raises(ConfigurationError, match=f"entry 0.*{why}"):
        replicas_of([entry])


def test_sources_send_and_newcomers_receive() -> None:
    """Each gets its own part, and all get the list of those that take part."""
    dense, experts = Move(0, 3, 1), Move(1, 3, 2)
    world = [standing(0), standing(1, dense), standing(2, experts), standing(3, dense, experts, newcomer=True)]

    assert repair_of(0, world) is None
    assert repair_of(1, world) == {"type": [0], "repair_type": SEND, "src": [1], "dst": [3], "rank_list": [1, 2, 3]}
    assert repair_of(2, world) == {"type": [1], "repair_type": SEND, "src": [2], "dst": [3], "rank_list": [1, 2, 3]}
    both = {"type": [0, 1], "repair_type": RECV, "src": [1, 2], "dst": [3, 3], "rank_list": [1, 2, 3]}
    assert repair_of(3, world) == both


STAGES = tuple(OptimizerReplicas(0, ranks, 2) for ranks in ((0, 1), (2, 3)))


def of_stages(*newcomers: int, moves: tuple[Move, ...] = ()) -> list[RankPart]:
    """Return what ranks of two stages tell, of which these have been replaced and do not know their stage."""
    parts = [RankPart(rank, False, False, False, 0, (), (STAGES[rank // 2],)) for rank in range(4)]
    return [standing(each.rank, *moves, newcomer=True) if each.rank in newcomers else each for each in parts]


def test_a_newcomer_that_cannot_know_its_stage_gets_it_from_a_rank_of_it() -> None:
    """The plan took it to hold everything, and would have it get another stage's parameters."""
    world = settled(of_stages(2, moves=(Move(0, 2, 0),)))

    assert repair_of(0, world) is None
    assert repair_of(2, world) == {"type": [0], "repair_type": RECV, "src": [3], "dst": [2], "rank_list": [2, 3]}
    assert repair_of(3, world) == {"type": [0], "repair_type": SEND, "src": [3], "dst": [2], "rank_list": [2, 3]}
    assert settled(of_stages(1, 2)) == settled(of_stages(1, 2, moves=(Move(0, 1, 0), Move(0, 2, 0))))


def test_where_no_rank_of_a_stage_is_left_nothing_is_sent() -> None:
    with pytest.raises(RecoveryError, match="knows what rank 2 held: all ranks have to start again"):
        settled(of_stages(2, 3))
    aware = [
        msgspec.structs.replace(each, replicas=(STAGES[1],)) if each.rank == 3 else each for each in of_stages(2, 3)
    ]
    with pytest.raises(RecoveryError, match=r"holds what rank 2 held \(of 2, 3\): all ranks have to start again"):
        settled(aware)


def test_moves_of_ranks_that_know_their_own_are_left_as_planned() -> None:
    """And so they are where no rank has named replicas."""
    known = [msgspec.structs.replace(each, moves=(Move(0, 2, 3),)) for each in of_stages()]
    assert settled(known) == known
    unnamed = [standing(0, Move(0, 1, 0)), standing(1, Move(0, 1, 0), newcomer=True)]
    assert settled(unnamed) == unnamed


def test_a_rank_whose_memory_was_damaged_knows_it() -> None:
    """Its handler has memory to make again."""
    move = Move(0, 1, 3)

    info = repair_of(1, [standing(1, move, struck=True), standing(3, move)])

    assert info is not None
    assert info["repair_type"] == UCE


def test_no_rank_has_to_send_and_receive_at_once() -> None:
    """MindIO gives a rank one part only, and its handlers know no other."""
    world = [standing(0, Move(0, 1, 0)), standing(1, Move(0, 1, 0), Move(1, 2, 1)), standing(2, Move(1, 2, 1))]

    with pytest.raises(RecoveryError, match="to send and to receive"):
        repair_of(1, world)


def test_of_the_holders_of_a_part_the_lowest_dumps_it() -> None:
    """A writer of a part gets the list of all that write parts of the same type: their handlers work together."""
    halves, experts = OptimizerReplicas(0, (0, 1, 2, 3), 2), OptimizerReplicas(1, (0, 1, 2, 3), 4)

    assert dump_of(("0/0/0", "1/0/0"), (halves, experts), (0, 1)) == [
        {"type": 0, "ranks": [0, 1]},
        {"type": 1, "ranks": [0]},
    ]
    assert dump_of(("0/0/1",), (halves, experts), (2, 3)) == [{"type": 0, "ranks": [2, 3]}]
    assert dump_of(("0/0/0",), (), (2, 3)) == [{"type": 0, "ranks": [2]}]


# --- exceptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("FORCE STOP\n[ERROR] ...", ReportState.RS_NORMAL),
        ("UCE ERROR", ReportState.RS_UCE),
        ("ARF FINISH", ReportState.RS_PREREPAIR_FINISH),
        ("STEP FINISH", ReportState.RS_STEP_FINISH),
        ("HCCL OP RETRY FAILED", ReportState.RS_HCCL_FAILED),
        ("SUSPECT REMOTE ERROR", ReportState.RS_HCCL_FAILED),
        ("UB LINK ERROR", ReportState.RS_HCCL_FAILED),
        ("HCCS LINK ERROR", ReportState.RS_HCCL_FAILED),
        ("a mistake", ReportState.RS_UNKNOWN),
    ],
)
def test_an_exception_is_read_as_mindio_reads_it(text: str, state: ReportState) -> None:
    """By what is in its text, if it is a RuntimeError."""
    assert processor.reading_of(RuntimeError(text))[1] is state
    assert processor.reading_of(ValueError(text))[1] is ReportState.RS_UNKNOWN


def test_flipped_bits_are_repaired_if_no_update_has_used_them() -> None:
    """The error is younger than the last update, or came while it ran."""
    assert tft_can_do_uce_repair(30, 10, 20)
    assert tft_can_do_uce_repair(15, 10, 20)
    assert not tft_can_do_uce_repair(5, 10, 20)
    assert not tft_can_do_uce_repair(0, 10, 20)
    assert not tft_can_do_uce_repair(30)
    assert processor.reading_of(RuntimeError("HBM MULTI BIT ECC ERROR time us=5"))[1] is ReportState.RS_UCE_CORRUPTED


def test_a_script_adds_patterns_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MindSpeed-LLM does for numbers that are wrong."""
    monkeypatch.setattr(processor, "_readings", dict(processor._readings))
    monkeypatch.setattr(processor, "_states", dict(processor._states))

    processor.tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", lambda text: "PRECISION ERROR")

    assert processor.reading_of(RuntimeError("PRECISION ERROR at 7")) == ("PRECISION ERROR", ReportState.RS_RETRY)


class Tracker:
    """Megatron-LM's, with a region of its own for what parts of a model draw."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {
            "model-parallel-rng": torch.Generator().manual_seed(5).get_state(),
            "graphed": object(),
        }

    def get_states(self) -> dict[str, Any]:
        """Return them."""
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        """Take them."""
        self.states = dict(states)


def test_random_numbers_of_megatrons_regions_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws from them; generators that are no states stay as they are."""
    tracker = Tracker()
    home = SimpleNamespace(_CUDA_RNG_STATE_TRACKER=tracker)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", home)
    before = tracker.get_states()
    blob = HandledState(0).capture_local()
    tracker.states["model-parallel-rng"] = torch.Generator().manual_seed(6).get_state()
    HandledState(0).restore_local(blob)
    assert torch.equal(tracker.states["model-parallel-rng"], before["model-parallel-rng"])
    assert tracker.states["graphed"] is before["graphed"]
    home._CUDA_RNG_STATE_TRACKER = None
    with pytest.raises(StateUnreadable, match="random numbers of model-parallel-rng, and Megatron-LM has none"):
        HandledState(0).restore_local(blob)


@pytest.mark.parametrize("option", ["use_ascend_mc2", "use_ascend_coc"])
def test_operators_that_keep_names_of_communicators_are_warned_of(
    option: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MindSpeed has two; a script that uses neither hears nothing."""
    given = SimpleNamespace(use_ascend_mc2=False, use_ascend_coc=False)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=given))
    processor._warn_of_kept_names()
    assert not caplog.records
    setattr(given, option, True)
    processor._warn_of_kept_names()
    assert [record.args for record in caplog.records] == [(option.replace("_", "-"),)]


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_handlers_get_their_arguments_in_mindio_s_order() -> None:
    """The context comes last; rename gets the arguments, or for MindSpore its context; a stream's gets nothing."""
    heard: list[Any] = []
    handlers = Handlers()
    handlers.arguments = "args"
    for kind in (HandlerKind.STOP, HandlerKind.STREAM_SYNC, HandlerKind.RENAME):
        handlers.register(kind, lambda *given: heard.append(given), "context")

    handlers.call(HandlerKind.STOP, "args")
    handlers.call(HandlerKind.STREAM_SYNC)
    handlers.rename(7, mindspore=False)
    handlers.rename(7, mindspore=True)

    assert heard == [("args", "context"), (), (7, "args"), (7, "context")]
    assert handlers.call(HandlerKind.CLEAN, True) is None
    with pytest.raises(TypeError, match="must be callable"):
        handlers.register(HandlerKind.EXIT, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "limit_s"), [("", 180), ("600", 600), ("1", 30), ("99999", 1800), ("soon", 180)])
def test_the_time_for_an_action_is_mindio_s(given: str, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its variable, within its bounds."""
    monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", given)
    assert action_limit_s() == limit_s


# --- the two threads --------------------------------------------------------------------------------------------------


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    """Start what would wait, and return where its result will be."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def test_a_question_is_answered_by_the_driver() -> None:
    """And waits until it is."""
    conversation = Conversation()
    conversation.go()
    thread, results = in_thread(lambda: conversation.ask(Question(Ask.UPDATE)))

    assert conversation.next() == Question(Ask.UPDATE)
    conversation.answer(allowed=True)

    thread.join(10)
    assert results == [True]


def test_after_a_stop_every_question_is_answered_with_it() -> None:
    """One that waits as well as one that comes."""
    conversation = Conversation()
    conversation.go()
    thread, results = in_thread(lambda: conversation.ask(Question(Ask.UPDATE)))
    assert conversation.next().ask is Ask.UPDATE

    conversation.leave()

    thread.join(10)
    assert results == [False]
    assert not conversation.ask(Question(Ask.COMMIT))


def test_an_interrupt_wakes_the_driver_but_loses_no_question() -> None:
    """An update that has begun is committed first."""
    conversation = Conversation()
    conversation.go()
    conversation.interrupt()
    with pytest.raises(Interrupted):
        conversation.next()
    thread, _ = in_thread(lambda: conversation.ask(Question(Ask.COMMIT, step=3)))

    conversation.await_question()

    assert conversation.next() == Question(Ask.COMMIT, step=3)
    conversation.answer(allowed=True)
    thread.join(10)
    assert not thread.is_alive()


def test_a_driver_that_ends_releases_who_waits() -> None:
    """The training thread learns that it has to end."""
    conversation = Conversation()
    thread, results = in_thread(conversation.await_go)

    conversation.end("it broke")

    thread.join(10)
    assert results == [False]
    assert conversation.over == "it broke"


def test_a_training_thread_that_does_not_return_ends_the_recovery() -> None:
    """Its stop handler has not made it raise."""
    with pytest.raises(RecoveryError, match="did not return after the stop handler"):
        Conversation().await_parked(0.01)


# --- the job ----------------------------------------------------------------------------------------------------------


def test_a_job_with_mindio_leaves_groups_and_checkpoints_to_the_script(tmp_path: Path) -> None:
    """midstep links hosts only, writes no checkpoint, and restores from replicas."""
    policy = policy_of(Start(command=("train.py",), mindio=True))

    assert policy == with_mindio(default_policy(), tmp_path)
    assert policy.communicator.name == EXTERNAL
    assert policy.checkpoint.every_steps == 0
    assert policy.restore == (RestoreSource.REPLICA,)
    assert policy_of(Start(command=("train.py",))) == default_policy()


def test_no_process_of_mindspore_is_built_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would meet the ranks that train in MindSpore's scheduler."""
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    with pytest.raises(ConfigurationError, match=r"set standby\.depth to imported"):
        await_rank_before_groups()


def environment_of(
    tmp_path: Path, *command: str, mindio: bool = True, variables: dict[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that midstep sets for the ranks of a job with this command."""
    start = Start(
        command=("train.py", *command), mindio=mindio, environment=variables or {}, working_directory=tmp_path
    )
    wanted = (env.MINDIO, env.SCRIPT_CHECKPOINTS, env.SCRIPT_STEP)
    return {
        name: value
        for name, value in spec_of(start, "job", default_policy(), tmp_path).environment.items()
        if name in wanted
    }


def test_the_ranks_are_told_by_a_variable(tmp_path: Path) -> None:
    """The package's place is another one on each machine."""
    assert environment_of(tmp_path) == {env.MINDIO: "1"}
    assert environment_of(tmp_path, mindio=False) == {}


def test_the_folder_that_the_script_loads_from_is_known_by_its_option_or_a_variable(tmp_path: Path) -> None:
    """As Megatron reads it; the step with which the job begins is that of the newest checkpoint there."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / TRACKER).write_text("100\n")
    place = {env.SCRIPT_CHECKPOINTS: str(tmp_path / "saved"), env.SCRIPT_STEP: "100"}
    assert environment_of(tmp_path, "--lr", "1", "--load", "saved") == {env.MINDIO: "1", **place}
    assert environment_of(tmp_path, "--load", "other", "--load=saved") == {env.MINDIO: "1", **place}
    assert environment_of(tmp_path, "--load", mindio=False) == {}
    named = environment_of(tmp_path, variables={env.SCRIPT_CHECKPOINTS: str(tmp_path / "empty")})
    assert named == {env.MINDIO: "1", env.SCRIPT_CHECKPOINTS: str(tmp_path / "empty"), env.SCRIPT_STEP: "0"}
    loads = policy_of(Start(("train.py", "--load", "saved"), mindio=True))
    assert loads.restore == (RestoreSource.REPLICA, RestoreSource.CHECKPOINT)
    only = msgspec.structs.replace(default_policy(), restore=(RestoreSource.REPLICA,))
    assert policy_of(Start(("train.py", "--load", "saved"), mindio=True, policy=only)).restore == only.restore
    local = msgspec.structs.replace(default_policy(), restore=(RestoreSource.HOST_COPY, RestoreSource.CHECKPOINT))
    local = policy_of(Start(("train.py", "--load", "saved"), mindio=True, policy=local))
    assert local.restore == (RestoreSource.CHECKPOINT,)


@pytest.mark.parametrize("text", ["", "release", "-3", "9" * 20, "1" + " " * 40])
def test_a_file_without_a_number_names_no_checkpoint(text: str, tmp_path: Path) -> None:
    """Megatron writes "release" for weights that were converted."""
    (tmp_path / TRACKER).write_text(text)
    assert newest_step(tmp_path) == 0


def test_a_rank_reports_the_scripts_checkpoint_by_midsteps_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process counts as the local states on its node do, else as the job began."""
    (tmp_path / TRACKER).write_text("110")
    state = HandledState(0)
    assert state.loadable() == ()
    monkeypatch.setenv(env.SCRIPT_CHECKPOINTS, str(tmp_path))
    monkeypatch.setenv(env.SCRIPT_STEP, "80")
    assert state.loadable() == (30,)
    state.noted_offset = lambda: 90
    assert state.loadable() == (20,)
    state.agreed(100)
    assert state.loadable() == (10,)
    state.agreed(110)
    assert state.loadable() == ()  # nothing was saved since the job began
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    assert HandledState(0).loadable() == ()


def test_a_rank_reports_older_checkpoints_of_the_script_too_from_which_it_may_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one is there by whatever name; not what is being written, nor what an earlier job has left."""
    (tmp_path / TRACKER).write_text("110")
    for name in ("iter_0000105", "iter_0000111", "iter_0000080", "iter_0000100_tmp", "iter_", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(env.SCRIPT_CHECKPOINTS, str(tmp_path))
    state = HandledState(0)
    state.agreed(90)
    assert state.loadable() == (20, 15)
    for step in range(91, 91 + 2 * MOST_STEPS):
        (tmp_path / f"iter_{step:07d}").mkdir(exist_ok=True)
    (tmp_path / TRACKER).write_text(str(step))
    assert state.loadable() == tuple(range(step - 90, step - 90 - MOST_STEPS, -1))


def test_a_rank_that_was_stopped_before_it_found_its_numbers_wrong_hears_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the function that the script has registered for that; others hear nothing."""
    heard: list[str] = []
    monkeypatch.setattr(processor, "_readings", dict(processor._readings))
    monkeypatch.setattr(processor, "_states", dict(processor._states))

    def hear(text: str) -> str:
        heard.append(text)
        return "PRECISION ERROR"

    processor.tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", hear)
    processor.tft_register_exception_handler("ANOTHER", "RS_UNKNOWN", hear)
    processor._choose(115)
    assert heard == ["PRECISION ERROR, load ckpt step=115"]
