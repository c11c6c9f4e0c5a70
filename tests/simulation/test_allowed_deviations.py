"""Why a healthy process may be replaced is judged as of when it was decided, and only then."""

import random
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import pytest

from midstep.controller.recovery.events import DeadlinePassed, Send
from midstep.controller.recovery.state import Phase
from midstep.policies.schema import Budget, RungPolicy, default_policy
from midstep.protocol.messages import (
    Envelope,
    NodeLost,
    ProbeProgress,
    ProgressReported,
    RankQuiesced,
    RanksReported,
    Rejoin,
    StartProcess,
)
from midstep.protocol.types import RepairPart, RestoreSource, Rung, node_address
from midstep.testing.invariants import InvariantBroken
from midstep.testing.simulation import faults
from midstep.testing.simulation import world as simulated
from midstep.testing.simulation.node import SimulatedAgent
from midstep.testing.simulation.process_faults import cut_link
from midstep.testing.simulation.setting import draw_setting
from midstep.testing.simulation.world import SimulatedWorld

from ..mutants.mutant import Mutant, applied

BLAME_THE_NEIGHBOUR = Mutant(
    "",
    "midstep.controller.recovery.lifecycle",
    "_blame_all(state, state.world.ranks(*NOT_STOPPED),",
    "_blame_all(state, {0, 1},",
)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> SimulatedWorld:
    """Four ranks that train on two nodes, with nothing planned against them."""
    monkeypatch.setattr(faults, "plan", lambda *args: None)
    world = SimulatedWorld(next(_fitting_seeds()))
    world.network.worsen(0.0, loss=0.0, delay_s=0.0)
    _play_until(world, Phase.RUNNING)
    return world


def _fitting_seeds() -> Iterator[int]:
    for seed in count():
        setting = draw_setting(random.Random(seed))
        if (setting.nodes, setting.ranks_per_node, setting.loss) != (2, 2, 0.0) or setting.plain:
            continue
        if setting.policy == default_policy() and setting.total_steps == 60 and setting.replicas == setting.size:
            yield seed


def _play_until(world: SimulatedWorld, phase: Phase) -> None:
    while world.machine.phase is not phase:
        assert world.timeline.step()


def _pass_the_quiesce_deadline(world: SimulatedWorld) -> None:
    """The controller dies over the deadline, recorded; the next ones over their first record, for half a minute."""
    deadline_s = world.machine.next_deadline()
    assert deadline_s is not None
    while world.timeline.now < deadline_s - 5.0:
        assert world.timeline.step()
    while world.timeline.now < deadline_s + 30.0:
        world.controller.crash_next = 0
        assert world.timeline.step()
    world.controller.crash_next = None
    assert DeadlinePassed in [type(event) for event, at_s, *_ in world.controller.journal if at_s == deadline_s]


def _the_first_two_nodes(world: SimulatedWorld) -> list[SimulatedAgent]:
    """Return the agents of two nodes; all others are gone, and that is known."""
    agents = [world.agents["node0"], world.agents["node1"]]
    for agent in world.agents.values():
        if agent not in agents:
            agent.die()
            world.controller.tell(NodeLost(agent.name, "gone", 0.0))
    return agents


def test_a_rank_that_missed_a_deadline_unheard_may_be_replaced_when_it_hears_again(
    world: SimulatedWorld,
) -> None:
    """The decision was right when it was recorded; the controller after the next one acts on it."""
    cut_link(world, world.chance)
    _play_until(world, Phase.SUSPECTING)
    world.agents["node1"].deaf_until_s = world.timeline.now + 12.0
    _play_until(world, Phase.QUIESCING)
    _pass_the_quiesce_deadline(world)
    world.run()
    replaced = world.machine.incidents[0]
    assert replaced.rung is Rung.RECOVER_IN_PLACE
    assert set(replaced.replaced) == {2, 3}


def test_a_rank_that_could_hear_all_the_time_may_not_be_replaced(world: SimulatedWorld) -> None:
    """Rank 0 hangs, and rank 1 is blamed with it."""
    hanging = world.agents["node0"].hosts(0)
    assert hanging is not None
    hanging.hung = hanging.faulty = True
    cut_link(world, world.chance)
    _play_until(world, Phase.QUIESCING)
    with applied(BLAME_THE_NEIGHBOUR):
        _pass_the_quiesce_deadline(world)
        with pytest.raises(InvariantBroken, match=r"rank 1 pid \d+ is healthy and is replaced"):
            world.run()


@pytest.mark.parametrize("loss", [0.05, 0.0])
def test_whose_word_is_lost_once_more_after_the_controller_was_cut_off_may_be_replaced(
    world: SimulatedWorld, monkeypatch: pytest.MonkeyPatch, loss: float
) -> None:
    """The deadline is put off for one resend; where the network loses nothing, that one arrives.

    The ranks of a node speak together, so both of them are not heard.
    """
    cut_link(world, world.chance)
    _play_until(world, Phase.QUIESCING)
    for agent in world.agents.values():
        agent.isolated_until_s = world.timeline.now + 5.0
    carry = world.network.carry

    def lose(envelope: Envelope, deliver: Callable[[Envelope], None]) -> None:
        body = envelope.body
        said = [each.word for each in body.reports] if isinstance(body, RanksReported) else []
        if not any(isinstance(word, RankQuiesced) and (word.rank, word.generation) == (1, 2) for word in said):
            carry(envelope, deliver)

    monkeypatch.setattr(world.network, "carry", lose)
    monkeypatch.setattr(world, "setting", msgspec.structs.replace(world.setting, loss=loss))
    if loss:
        world.run()
        assert set(world.machine.incidents[0].replaced) == {0, 1}
        return
    with pytest.raises(InvariantBroken, match=r"rank [01] pid \d+ is healthy and is replaced"):
        world.run()


@pytest.mark.parametrize("cut_off", [1, 2])
def test_what_is_given_up_with_a_few_silent_nodes_is_not_asked_for_its_state(
    world: SimulatedWorld, cut_off: int
) -> None:
    """More than that are held, so a job must not give them up."""
    agents = _the_first_two_nodes(world)
    for agent in agents[:cut_off]:
        agent.isolated_until_s = world.timeline.now + 5.0
    (gone, *_), (stays, *_) = (agent.processes() for agent in agents)
    world.allowed.recorded(NodeLost("node0", "no word for 3.2 s", world.timeline.now))
    assert world.allowed.given_up(gone) is (cut_off == 1)
    assert not world.allowed.given_up(stays)


@pytest.mark.parametrize(("ago_s", "is_missed"), [(0.3, False), (3.0, True)])
def test_a_node_that_died_just_now_is_not_missed_with_the_one_that_is_given_up(
    world: SimulatedWorld, ago_s: float, is_missed: bool
) -> None:
    """Two of two silent nodes are held; one whose death cannot have been noticed yet is no reason to."""
    given_up, dies = _the_first_two_nodes(world)
    given_up.isolated_until_s = world.timeline.now + 10.0
    process, *_ = given_up.processes()
    dies.die()
    world.timeline.now += ago_s
    world.allowed.recorded(NodeLost("node0", "no word for 3.1 s", world.timeline.now))
    assert world.allowed.given_up(process) is not is_missed


def test_a_world_starts_anew_without_what_the_controller_cannot_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes are lost, one after the other; the processes of the last one live, and have not saved."""
    SimulatedWorld(2473, focus=Phase.SAVING).run()
    strict = SimulatedWorld(2473, focus=Phase.SAVING)
    monkeypatch.setattr(strict.allowed, "given_up", lambda process: False)
    with pytest.raises(InvariantBroken, match=r"step 3 is whole on ranks .* not on disk"):
        strict.run()


@pytest.mark.parametrize("asked_again", [True, False])
def test_what_a_world_that_was_given_up_still_writes_is_not_asked_of_the_next_one(
    world: SimulatedWorld, asked_again: bool
) -> None:
    """Its checkpoint came after the first of the next world had said what it can read; then all were asked again."""
    event, watch = DeadlinePassed(), world.controller_watch.scaling
    state = world.machine.state
    store = state.meeting.rendezvous(state.world, state.job.job, state.generation)
    first = StartProcess(0, 0, 0, 9, 9, 1, True, store, world_size=world.setting.size)
    again = first if asked_again else msgspec.structs.replace(first, generation=10)
    watch.handled(event, Phase.STARTING, [Send("node/node0", first, 9)])
    world.disk.complete(15)
    watch.handled(event, Phase.STARTING, [Send("node/node0", again, 9)])
    loads = Rejoin(0, again.generation, store, True, RepairPart(10, RestoreSource.CHECKPOINT))
    if asked_again:
        watch.handled(event, Phase.STARTING, [Send("rank/0", loads, again.generation)])
        return
    with pytest.raises(InvariantBroken, match="starts from step 10, and a checkpoint of step 15 was there"):
        watch.handled(event, Phase.STARTING, [Send("rank/0", loads, again.generation)])


def test_a_world_starts_anew_without_what_an_agent_has_not_said_in_time(world: SimulatedWorld) -> None:
    """It is cut off while the clocks are read, so its ranks count as stalled."""
    said, silent = _the_first_two_nodes(world)
    world.allowed.handled([Send(node_address(agent.name), ProbeProgress(7), 1) for agent in (said, silent)])
    world.allowed.recorded(ProgressReported(said.name, 7, 0.0, ()))
    assert not any(world.allowed.given_up(process) for process in silent.processes())
    world.allowed.recorded(DeadlinePassed())
    assert all(world.allowed.given_up(process) for process in silent.processes())
    assert not any(world.allowed.given_up(process) for process in said.processes())


@pytest.mark.parametrize("counted_anew", [True, False])
def test_a_rung_counts_from_when_it_was_decided_although_the_next_controller_takes_it(
    monkeypatch: pytest.MonkeyPatch, counted_anew: bool
) -> None:
    """Of a budget of three in ten seconds: the controller dies over the first, and is away for 40 seconds."""
    rungs = (RungPolicy(Rung.RECOVER_IN_PLACE, budget=Budget(per_job=3, window_s=10.0)), RungPolicy(Rung.STOP))
    setting = draw_setting(random.Random(next(_fitting_seeds())))
    setting = msgspec.structs.replace(
        setting, policy=msgspec.structs.replace(setting.policy, ladder=rungs), total_steps=1000
    )
    monkeypatch.setattr(simulated, "draw_setting", lambda *args: setting)
    monkeypatch.setattr(faults, "plan", lambda *args: None)
    world = SimulatedWorld(next(_fitting_seeds()))
    world.network.worsen(0.0, loss=0.0, delay_s=0.0)
    if counted_anew:
        monkeypatch.setattr(world.controller_watch, "recorded", lambda now: None)

    def lose_rank(number: int) -> None:
        _play_until(world, Phase.RUNNING)
        process = next(each for each in world.living() if each.rank == number)
        process.faulty = True
        process.end(-9)

    lose_rank(0)
    monkeypatch.setattr(world.chance, "choice", lambda choices: choices[-1])  # the longest that it may be away
    while world.controller.up:
        world.controller.crash_next = 0
        assert world.timeline.step()
    monkeypatch.undo()
    while not world.controller.up:
        assert world.timeline.step()

    def lose_three_more() -> None:
        for number in (1, 2, 3):
            while world.machine.phase is Phase.RUNNING:
                assert world.timeline.step()
            lose_rank(number)
        while world.machine.phase is Phase.RUNNING:
            assert world.timeline.step()
        _play_until(world, Phase.RUNNING)

    if not counted_anew:
        lose_three_more()
        return
    with pytest.raises(InvariantBroken, match="recover_in_place was taken 4 times, 3 are allowed"):
        lose_three_more()
