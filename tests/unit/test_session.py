"""The processor's session: which command is taken in which stage, and when the communicators must be aborted."""

import pytest

from midstep.processor.session import Order, Session, SessionStage
from midstep.protocol.messages import Quiesce, Rejoin, Release, Resume, SaveCheckpoint
from midstep.protocol.types import Rendezvous, RepairPart, RestoreSource

RANK = 3
PART = RepairPart(target_step=5, restore=RestoreSource.REPLICA)
ABORTABLE = {
    SessionStage.BOOTING,
    SessionStage.TRAINING,
    SessionStage.REJOINING,
    SessionStage.READY,
    SessionStage.FINISHED,
}
FITTING: dict[type, SessionStage] = {
    Rejoin: SessionStage.PARKED,
    SaveCheckpoint: SessionStage.PARKED,
    Resume: SessionStage.READY,
    Release: SessionStage.FINISHED,
}


def command(kind: type, generation: int) -> Order:
    """A command of a kind."""
    made: dict[type, Order] = {
        Quiesce: Quiesce(RANK, generation),
        Rejoin: Rejoin(RANK, generation, Rendezvous("h", 1, "s"), connected=False, part=PART),
        Resume: Resume(RANK, generation, 5),
        Release: Release(RANK, generation),
        SaveCheckpoint: SaveCheckpoint(RANK, generation, 5, publish=True),
    }
    return made[kind]


def session(stage: SessionStage, generation: int = 2) -> Session:
    """A session in a stage."""
    made = Session(RANK, incarnation=1, generation=generation)
    made.reach(stage)
    return made


@pytest.mark.parametrize("stage", [stage for stage in SessionStage if stage is not SessionStage.RELEASED])
def test_a_quiesce_is_taken_in_every_stage_until_the_release(stage: SessionStage) -> None:
    """It opens the new generation, and aborts wherever the train thread may be inside a collective."""
    here = session(stage)
    heard = here.hear(command(Quiesce, 3))
    assert heard.taken
    assert heard.abort is (stage in ABORTABLE)
    assert here.quiescing
    assert here.generation == 3


def test_a_process_that_was_started_ahead_takes_no_late_order_of_the_one_before_it() -> None:
    """They have one address, and messages are late."""
    here = session(SessionStage.WAITING, generation=2)
    for late in (command(Quiesce, 2), Quiesce(RANK, 2, after_step=7), command(Rejoin, 2)):
        assert not here.hear(late).taken
    assert here.take_order() is None
    assert here.hear(command(Quiesce, 3)).taken


def test_a_quiesce_after_the_release_is_refused() -> None:
    """The train function has been left for good: nothing is aborted any more."""
    heard = session(SessionStage.RELEASED).hear(command(Quiesce, 3))
    assert not heard.taken
    assert not heard.abort
    assert "left for good" in heard.why_not


@pytest.mark.parametrize("kind", FITTING)
@pytest.mark.parametrize("stage", SessionStage)
def test_every_other_command_fits_one_stage(kind: type, stage: SessionStage) -> None:
    """In any other stage it is refused with the stage's name, and changes nothing."""
    here = session(stage)
    heard = here.hear(command(kind, 2))
    assert heard.taken is (stage is FITTING[kind])
    assert not heard.abort
    assert (here.take_order() is not None) is heard.taken
    if not heard.taken:
        assert heard.why_not == f"{kind.__name__} while {stage}"


@pytest.mark.parametrize("kind", [Quiesce, *FITTING])
def test_a_command_of_an_older_generation_is_refused_in_its_own_stage(kind: type) -> None:
    """Both generations are named."""
    here = session(FITTING.get(kind, SessionStage.TRAINING), generation=4)
    heard = here.hear(command(kind, 3))
    assert not heard.taken
    assert not heard.abort
    assert heard.why_not == "generation 3 is over, this is 4"
    assert here.take_order() is None


@pytest.mark.parametrize("kind", [Resume, Release])
def test_nobody_resumes_or_leaves_in_a_generation_that_it_has_not_joined(kind: type) -> None:
    """A newer generation must begin with a rejoin."""
    heard = session(FITTING[kind]).hear(command(kind, 3))
    assert not heard.taken
    assert "was not joined" in heard.why_not


@pytest.mark.parametrize("kind", [Rejoin, SaveCheckpoint])
def test_a_parked_rank_follows_a_newer_generation(kind: type) -> None:
    """Parked ranks are not quiesced again, so the generation comes with the next command."""
    here = session(SessionStage.PARKED)
    assert here.hear(command(kind, 7)).taken
    assert here.generation == 7


def test_nothing_overtakes_a_quiesce() -> None:
    """While it waits for the train thread, a rejoin of the same generation is refused."""
    here = session(SessionStage.PARKED)
    here.hear(command(Quiesce, 3))
    heard = here.hear(command(Rejoin, 3))
    assert not heard.taken
    assert "while a quiesce is under way" in heard.why_not
    assert isinstance(here.take_order(), Quiesce)


def test_a_quiesce_takes_the_place_of_an_order_that_was_not_taken() -> None:
    """The train thread sees only the newer one."""
    here = session(SessionStage.READY)
    here.hear(command(Resume, 2))
    here.hear(command(Quiesce, 3))
    assert here.take_order() == Quiesce(RANK, 3)
    assert here.take_order() is None


def test_a_repeated_quiesce_is_one_order() -> None:
    """The controller asks twice when it has been restarted; the answer is given once."""
    here = session(SessionStage.TRAINING)
    assert here.hear(command(Quiesce, 3)).taken
    assert here.hear(command(Quiesce, 3)).taken
    assert isinstance(here.take_order(), Quiesce)
    assert here.take_order() is None
    assert not here.quiescing


def test_a_repeated_quiesce_keeps_no_rejoin_out() -> None:
    """It comes when the answer is already on its way, and so may be the rejoin that follows from the answer."""
    here = session(SessionStage.TRAINING)
    here.hear(command(Quiesce, 3))
    here.take_order()
    assert not here.hear(command(Quiesce, 3)).taken
    here.reach(SessionStage.PARKED)
    assert not here.hear(command(Quiesce, 3)).taken
    assert here.hear(command(Rejoin, 3)).taken


def test_a_repeated_resume_is_refused_once_training_goes_on() -> None:
    """The step is not begun a second time."""
    here = session(SessionStage.READY)
    assert here.hear(command(Resume, 2)).taken
    here.take_order()
    here.reach(SessionStage.TRAINING)
    assert not here.hear(command(Resume, 2)).taken


def test_the_quiesce_is_over_when_the_train_thread_has_taken_it() -> None:
    """From then on nothing interrupts."""
    here = session(SessionStage.TRAINING)
    here.hear(command(Quiesce, 3))
    assert here.quiescing
    here.take_order()
    assert not here.quiescing


def test_a_repeated_quiesce_does_not_take_out_whoever_has_been_let_in_since() -> None:
    """It was answered at barrier one; the repetition, from an earlier controller perhaps, has been long on its way."""
    here = session(SessionStage.PARKED)
    assert here.hear(command(Rejoin, 3)).taken
    here.take_order()
    here.reach(SessionStage.READY)
    assert not here.hear(command(Quiesce, 3)).taken
    assert here.hear(command(Resume, 3)).taken
    assert here.hear(command(Quiesce, 4)).taken


def test_a_repeated_rejoin_is_refused() -> None:
    """A rank that takes it at the broken commit barrier stays parked; when its update fails, it has to report again."""
    here = session(SessionStage.PARKED)
    assert here.hear(command(Rejoin, 3)).taken
    here.take_order()
    heard = here.hear(command(Rejoin, 3))
    assert not heard.taken
    assert here.take_order() is None
    assert here.hear(command(Quiesce, 4)).taken
    here.take_order()
    assert here.hear(command(Rejoin, 4)).taken


def test_a_boundary_stops_the_train_thread_where_it_lies_and_aborts_nothing() -> None:
    """Steps before it begin in the present generation; then the Quiesce is the next order."""
    here = session(SessionStage.TRAINING)
    boundary = Quiesce(RANK, 2, after_step=7)
    heard = here.hear(boundary)
    assert heard.taken
    assert not heard.abort
    assert not here.quiescing
    assert here.begins(6)
    assert not here.begins(7)
    assert here.take_order() == boundary
    assert here.generation == 2


def test_a_boundary_that_is_heard_too_late_stops_before_the_next_step() -> None:
    """Where all heard it late, all stop at the next one, and nothing is lost by it."""
    here = session(SessionStage.TRAINING)
    here.hear(Quiesce(RANK, 2, after_step=7))
    assert not here.begins(8)


def test_an_ordinary_quiesce_takes_the_place_of_a_boundary() -> None:
    """A fault does not wait for a step to end."""
    here = session(SessionStage.TRAINING)
    here.hear(Quiesce(RANK, 2, after_step=7))
    heard = here.hear(Quiesce(RANK, 3))
    assert heard.abort
    assert here.take_order() == Quiesce(RANK, 3)
    assert here.begins(7)


def test_training_that_ends_before_a_boundary_forgets_it() -> None:
    """The release is taken as usual."""
    here = session(SessionStage.TRAINING)
    here.hear(Quiesce(RANK, 2, after_step=7))
    here.reach(SessionStage.FINISHED)
    assert here.hear(Release(RANK, 2)).taken


@pytest.mark.parametrize("stage", [stage for stage in SessionStage if stage is not SessionStage.TRAINING])
def test_a_boundary_has_a_meaning_in_training_only(stage: SessionStage) -> None:
    """Also not for another generation."""
    assert not session(stage).hear(Quiesce(RANK, 2, after_step=7)).taken
    assert not session(SessionStage.TRAINING).hear(Quiesce(RANK, 3, after_step=7)).taken
