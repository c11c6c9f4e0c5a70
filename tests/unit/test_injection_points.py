"""Faults on purpose: each fires once, at its moment, in its life of its rank, and does what it says."""

import os
import signal
from collections.abc import Callable

import msgspec
import pytest

from midstep.processor.injection_points import InjectionPoints
from midstep.protocol.errors import InjectedFault
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

DEADLINE_S = 20
EXIT_SURVIVED = 77


def in_child(what: Callable[[], None], *, until: int = 0) -> int:
    """Run `what` in a forked child and return how waitpid saw it end (or stop, with `until`)."""
    child = os.fork()
    if child == 0:
        signal.alarm(DEADLINE_S)
        try:
            what()
        finally:
            os._exit(EXIT_SURVIVED)
    return os.waitpid(child, until)[1] if not until else _stopped(child, until)


def _stopped(child: int, until: int) -> int:
    status = os.waitpid(child, until)[1]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return status


def fire(action: FaultAction) -> Callable[[], None]:
    """Arm a fault for the update of step 2, and reach it."""

    def act() -> None:
        InjectionPoints(0, 1, [ArmedFault(0, action, InjectionPoint.UPDATE, step=2)]).reached(InjectionPoint.UPDATE, 2)

    return act


def test_a_kill_is_a_sigkill() -> None:
    """Nothing of the process can catch it."""
    assert os.WTERMSIG(in_child(fire(FaultAction.KILL))) == signal.SIGKILL


def test_an_exit_is_without_a_word() -> None:
    """Status 1, and no `finally` runs."""
    assert os.WEXITSTATUS(in_child(fire(FaultAction.EXIT))) == 1


def test_a_stop_is_a_sigstop() -> None:
    """The process is there, and does nothing."""
    status = in_child(fire(FaultAction.STOP), until=os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP


def test_a_killed_node_takes_the_agent_and_the_rank() -> None:
    """The parent dies first, then the process itself."""
    reader, writer = os.pipe()

    def agent() -> None:
        if os.fork() == 0:
            os.close(reader)
            signal.alarm(DEADLINE_S)
            fire(FaultAction.KILL_NODE)()
        os.close(writer)
        signal.pause()

    status = in_child(agent)
    os.close(writer)
    with os.fdopen(reader, "rb") as held_by_the_rank:
        assert held_by_the_rank.read() == b""  # the rank is gone too
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_hang_never_comes_back() -> None:
    """The thread sleeps in Python; the process lives, and has taken the fault."""
    reader, writer = os.pipe()

    def hang() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # while it hangs
        injection_points = InjectionPoints(0, 1, [ArmedFault(0, FaultAction.HANG)])
        signal.signal(signal.SIGALRM, lambda *_: os.write(writer, f"{len(injection_points.armed)} left".encode()))
        injection_points.reached(InjectionPoint.FORWARD, 0)

    child = os.fork()
    if child == 0:
        hang()
        os._exit(EXIT_SURVIVED)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        assert pipe.read(6) == b"0 left"
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_a_raise_names_injection_point_step_and_rank() -> None:
    """The text is what an operator sees in the report."""
    injection_points = InjectionPoints(4, 1, [ArmedFault(4, FaultAction.RAISE, InjectionPoint.BACKWARD, step=7)])
    with pytest.raises(InjectedFault, match="injected at backward of step 7 in rank 4"):
        injection_points.reached(InjectionPoint.BACKWARD, 7)


def test_a_fault_fires_once() -> None:
    """The repeated step passes."""
    injection_points = InjectionPoints(0, 1, [ArmedFault(0, FaultAction.RAISE, InjectionPoint.FORWARD)])
    with pytest.raises(InjectedFault):
        injection_points.reached(InjectionPoint.FORWARD, 0)
    injection_points.reached(InjectionPoint.FORWARD, 0)
    assert injection_points.armed == ()


@pytest.mark.parametrize(
    ("fault", "point", "step", "fires"),
    [
        (ArmedFault(0, FaultAction.RAISE, InjectionPoint.FORWARD, step=3), InjectionPoint.FORWARD, 3, True),
        (ArmedFault(0, FaultAction.RAISE, InjectionPoint.FORWARD, step=3), InjectionPoint.FORWARD, 4, False),
        (ArmedFault(0, FaultAction.RAISE, InjectionPoint.FORWARD, step=3), InjectionPoint.BACKWARD, 3, False),
        (ArmedFault(0, FaultAction.RAISE, InjectionPoint.FORWARD), InjectionPoint.FORWARD, 9, True),
        (ArmedFault(0, FaultAction.RAISE, step=2), InjectionPoint.BARRIER, 2, True),
        (ArmedFault(0, FaultAction.RAISE), InjectionPoint.ROLLBACK, 0, True),
    ],
)
def test_a_fault_waits_for_its_injection_point_and_step(
    fault: ArmedFault, point: InjectionPoint, step: int, fires: bool
) -> None:
    """None stands for any."""
    injection_points = InjectionPoints(0, 1, [fault])
    assert injection_points.waits_for(point, step) is fires
    if fires:
        with pytest.raises(InjectedFault):
            injection_points.reached(point, step)
    else:
        injection_points.reached(point, step)
        assert injection_points.armed == (fault,)


@pytest.mark.parametrize(
    "fault",
    [
        ArmedFault(1, FaultAction.KILL),
        ArmedFault(0, FaultAction.KILL, incarnation=1),
        ArmedFault(0, FaultAction.RAISE, InjectionPoint.JOIN, incarnation=3),
    ],
)
def test_a_fault_for_another_rank_or_life_is_ignored(fault: ArmedFault) -> None:
    """A replacement does not inherit what killed its predecessor."""
    assert InjectionPoints(0, 2, [fault]).armed == ()


def test_a_kill_without_an_injection_point_happens_at_once() -> None:
    """It does not wait for the train thread."""
    assert os.WTERMSIG(in_child(lambda: InjectionPoints(0, 1).arm(ArmedFault(0, FaultAction.KILL)))) == signal.SIGKILL


# --- faults of a device ----------------------------------------------------------------------------------------------


def harmed(*armed: ArmedFault) -> tuple[InjectionPoints, list[FaultAction]]:
    """Return moments whose device writes down what is done to it."""
    done: list[FaultAction] = []
    return InjectionPoints(0, 1, armed, done.append), done


def test_a_fault_of_the_device_is_the_devices_to_cause() -> None:
    injection_points, done = harmed(ArmedFault(0, FaultAction.LINK_DOWN, InjectionPoint.BACKWARD, 3))
    injection_points.reached(InjectionPoint.BACKWARD, 2)
    assert done == []
    injection_points.reached(InjectionPoint.BACKWARD, 3)
    injection_points.reached(InjectionPoint.BACKWARD, 3)
    assert done == [FaultAction.LINK_DOWN]


def test_a_fault_of_the_device_without_an_injection_point_fires_at_the_next_one() -> None:
    """It comes in the control thread, where nothing could be raised."""
    injection_points, done = harmed()
    injection_points.arm(ArmedFault(0, FaultAction.MEMORY_TEMPORARY))
    assert done == []
    injection_points.reached(InjectionPoint.UPDATE, 7)
    assert done == [FaultAction.MEMORY_TEMPORARY]


def test_a_fault_can_wait_for_a_certain_collective_of_a_certain_group() -> None:
    fault = ArmedFault(0, FaultAction.LINK_DOWN, InjectionPoint.COLLECTIVE, operation="allgather", group=(0, 2))
    injection_points, done = harmed(fault)
    injection_points.reached(InjectionPoint.COLLECTIVE, 0, "allreduce", (0, 2))
    injection_points.reached(InjectionPoint.COLLECTIVE, 0, "allgather", (0, 1))
    assert done == []
    injection_points.reached(InjectionPoint.COLLECTIVE, 0, "allgather", (0, 2))
    assert done == [FaultAction.LINK_DOWN]


def test_a_fault_with_a_rate_comes_again_and_again_and_alike_in_every_run() -> None:
    """About as often as it says; the same rank and life throw the same dice."""
    fault = ArmedFault(0, FaultAction.LINK_DOWN, InjectionPoint.FORWARD, rate=0.25)
    counts = []
    for _ in range(2):
        injection_points, done = harmed(fault)
        for step in range(400):
            injection_points.reached(InjectionPoint.FORWARD, step)
        counts.append(len(done))
    assert counts[0] == counts[1]
    assert 60 < counts[0] < 140


def test_an_armed_fault_is_written_with_the_names_that_journals_have() -> None:
    armed = ArmedFault(1, FaultAction.KILL, InjectionPoint.UPDATE, step=3)
    written = b'{"rank":1,"injury":"kill","moment":"update","step":3}'

    assert msgspec.json.decode(written, type=ArmedFault) == armed
    assert {"injury", "moment"} <= msgspec.json.decode(msgspec.json.encode(armed)).keys()


def test_in_a_replay_only_what_is_meant_for_one_strikes_and_what_does_so_each_time() -> None:
    """A step of another rank is none of the steps for which faults are armed here."""
    fired: list[FaultAction] = []
    own = ArmedFault(0, FaultAction.FLIP_MOMENT, InjectionPoint.FORWARD)
    replay = ArmedFault(0, FaultAction.FLIP_GRADIENT, InjectionPoint.REPLAY)
    always = ArmedFault(0, FaultAction.FLIP_PARAMETER, InjectionPoint.BACKWARD, rate=1.0)
    points = InjectionPoints(0, 1, [own, replay, always])
    points.flip = lambda fault: fired.append(fault.action)
    points.replaying = True
    for point in (InjectionPoint.FORWARD, InjectionPoint.REPLAY, InjectionPoint.BACKWARD):
        points.reached(point, 4)
    assert fired == [FaultAction.FLIP_GRADIENT, FaultAction.FLIP_PARAMETER]
    points.replaying = False
    assert not points.waits_for(InjectionPoint.REPLAY, 4)
    points.reached(InjectionPoint.FORWARD, 4)
    assert fired[2:] == [FaultAction.FLIP_MOMENT]
