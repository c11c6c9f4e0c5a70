"""Endurance: one job whose ranks and whose own parts are killed again and again"""

import contextlib
import enum
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from midstep.protocol.incidents import JobStatus, Outcome

from ..chaos.comparing import assert_same_numbers, finish
from ..chaos.conftest import StartJob
from ..chaos.jobs import RANKS, ROOMY, STEPS, Job, Record
from ..chaos.node_processes import agents_of
from .attack import attack

SEED = 20_251
MANY = int(os.environ.get("MIDSTEP_ATTACK_KILLS", "1000"))
FEW = 8
FIRST_GATE = 6  # steps before the first kill
LAST_STEPS = 6
# Steps from kill to kill, and the time after the opening of its gate in which a kill comes. It is over before the ranks
# are at the next gate: one that waits there is in its own code, does not hear that it is to stop, and is replaced.
FEW_APART, FEW_WANDER_S = 6, 0.08
MANY_APART, MANY_WANDER_S = 8, 0.2
IMPATIENT = 0.2  # so many kills come before the recovery from the last one is over
MOST_IN_A_ROW = 3  # replacements that are lost again and again are a rung's failure, and the ladder has an end
NOTICED_S = 0.3  # from a kill until a status tells of it
RECOVERED_S = 180.0
A_KILL_TAKES_S = 20.0  # on a busy machine, for the limit of the whole test
CONTROLLERS, WITHIN_S = 4, 60.0  # the launcher waits longer and longer before it replaces one that dies more often
PAUSE_S = 1.0  # a stopped controller continues after this

UNLIMITED = {"per_job": 1_000_000}
POLICY: dict[str, Any] = {
    **ROOMY,
    "ladder": [
        *({"rung": rung, "attempts": 1000, "budget": UNLIMITED} for rung in ("retry_step", "recover_in_place")),
        *({"rung": rung, "attempts": 1000, "budget": UNLIMITED} for rung in ("recover", "reschedule_pod")),
        {"rung": "stop"},
    ],
    "stall": {"grace_s": 5.0, "suspended_s": 1.0},
    "incident": {"max_attempts": 1000},
}


class Strike(enum.Enum):
    """What is done to which process."""

    KILL_RANK = "rank killed"
    STOP_RANK = "rank stopped"
    KILL_CONTROLLER = "controller killed"
    STOP_CONTROLLER = "controller stopped"  # for PAUSE_S
    KILL_FORK_SERVER = "fork server killed"
    KILL_IDLE = "idle process killed"
    KILL_STORE = "store killed"
    STOP_STORE = "store stopped"
    KILL_AGENT = "agent killed"
    KILL_FORKER = "process of which agents were forked killed"


# How often each is drawn, in parts of a hundred.
OFTEN = {
    Strike.KILL_RANK: 57,
    Strike.STOP_RANK: 6,
    Strike.KILL_CONTROLLER: 8,
    Strike.STOP_CONTROLLER: 4,
    Strike.KILL_FORK_SERVER: 8,
    Strike.KILL_IDLE: 6,
    Strike.KILL_STORE: 4,
    Strike.STOP_STORE: 2,
    Strike.KILL_AGENT: 4,
    Strike.KILL_FORKER: 1,  # there is one, and no other comes
}
NAMES = {
    Strike.KILL_RANK: "midstep-r",
    Strike.STOP_RANK: "midstep-r",
    Strike.KILL_FORK_SERVER: "midstep-forksrv",
    Strike.KILL_IDLE: "midstep-idle",
    Strike.KILL_STORE: "midstep-store",
    Strike.STOP_STORE: "midstep-store",
}


class Striker:
    """Strikes processes of a job, in an order and at moments from a seed."""

    def __init__(self, job: Job, seed: int, apart: int, wander_s: float) -> None:
        self._job = job
        self._apart = apart
        self._wander_s = wander_s
        self._chance = random.Random(seed)
        self._launcher = psutil.Process(job.launcher.pid)
        self._controllers: deque[float] = deque(maxlen=CONTROLLERS)  # when they were killed
        self._in_a_row = 0  # strikes since the job was last well
        self.done: Counter[Strike] = Counter()

    def strike(self, number: int) -> None:
        """Let the ranks go on to the next gate, and hit something on the way; mostly wait until all is well again."""
        gate = FIRST_GATE + number * self._apart
        self._job.close_gate(gate + self._apart)
        self._job.open_gate(gate)
        time.sleep(self._chance.uniform(0, self._wander_s))
        while not self._hit(self._drawn()):
            time.sleep(0.05)
        self._in_a_row += 1
        if self._chance.random() >= IMPATIENT or self._in_a_row == MOST_IN_A_ROW:
            self._in_a_row = 0
            time.sleep(NOTICED_S)
            self._job.until(is_well, f"the job to be well again after {self.told()}", RECOVERED_S)

    def told(self) -> str:
        """Say what has been done so far."""
        return ", ".join(f"{strike.value} {self.done[strike]}x" for strike in Strike if self.done[strike])

    def _drawn(self) -> Strike:
        return self._chance.choices(list(OFTEN), list(OFTEN.values()))[0]

    def _hit(self, strike: Strike) -> bool:
        """Do it; False where there is no such process now."""
        now = time.monotonic()
        if strike is Strike.KILL_CONTROLLER:
            if len(self._controllers) == CONTROLLERS and now - self._controllers[0] < WITHIN_S:
                return False
            self._controllers.append(now)
        found = [process for process in self._targets(strike) if process.status() != psutil.STATUS_ZOMBIE]
        if not found:
            return False
        process = self._chance.choice(sorted(found, key=lambda each: each.pid))
        with contextlib.suppress(psutil.NoSuchProcess):
            if strike in {Strike.STOP_RANK, Strike.STOP_CONTROLLER, Strike.STOP_STORE}:
                process.send_signal(signal.SIGSTOP)
            else:
                process.kill()
            if strike is Strike.STOP_CONTROLLER:
                time.sleep(PAUSE_S)
                process.send_signal(signal.SIGCONT)
        self.done[strike] += 1
        return True

    def _targets(self, strike: Strike) -> Iterator[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ValueError):
            if strike in {Strike.KILL_CONTROLLER, Strike.STOP_CONTROLLER}:
                yield psutil.Process(self._job.controller_pid())
                return
            if strike is Strike.KILL_FORKER:
                yield from (child for child in self._launcher.children() if child.name() == "midstep-nodes")
                return
            for agent in (*agents_of(self._launcher.pid).values(), *self._orphans()):
                if strike is Strike.KILL_AGENT:
                    yield agent
                    continue
                yield from (child for child in agent.children() if child.name().startswith(NAMES[strike]))

    def _orphans(self) -> Iterator[psutil.Process]:
        """Yield the agents that live on where the process of which they were forked is gone."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                forked = process.name() == "midstep-agent" and process.ppid() == 1
                if forked and str(self._launcher.pid) in process.cmdline():
                    yield process


def is_well(status: JobStatus) -> bool:
    """Whether the job trains, and no incident is open."""
    closed = not status.incidents or status.incidents[-1].outcome is not Outcome.OPEN
    return status.phase == "running" and closed


def steps_for(kills: int, apart: int) -> int:
    """Return how many steps a job with so many kills does."""
    return FIRST_GATE + kills * apart + LAST_STEPS


def struck_again_and_again(start_job: StartJob, kills: int, apart: int, wander_s: float) -> tuple[Job, Striker]:
    """Run a job to its end with so many kills on the way."""
    began_s = time.monotonic()
    steps = steps_for(kills, apart)
    job = start_job(steps=steps, policy=POLICY, options=["--quiet"], fixed_nodes=False)
    job.close_gate(FIRST_GATE)
    job.until(lambda status: is_well(status) and status.committed >= 1, "the first steps", RECOVERED_S)
    started_s = time.monotonic()
    striker = Striker(job, SEED, apart, wander_s)
    for number in range(kills):
        striker.strike(number)
        if (number + 1) % 50 == 0:
            print(f"{number + 1} in {time.monotonic() - started_s:.0f} s: {striker.told()}", flush=True)
    struck_s = time.monotonic() - started_s
    job.open_gate(FIRST_GATE + kills * apart)
    incidents = finish(job)["incidents"]
    rungs = Counter(incident["rung"] for incident in incidents)
    recovering_s = sum(incident["recovery_s"] or 0.0 for incident in incidents)
    print(f"{kills} strikes in {struck_s:.0f} s, {60 * kills / struck_s:.0f} a minute: {striker.told()}")
    print(f"{len(incidents)} incidents, {dict(rungs)}, {recovering_s:.0f} s of recovery")
    print(f"{time.monotonic() - began_s:.0f} s in all, {steps} steps")
    assert sum(striker.done.values()) == kills
    assert all(incident["outcome"] in {"resumed", "dismissed"} for incident in incidents), rungs
    return job, striker


@attack(
    "ranks, controller, rendezvous store, fork server, idle processes and agents are killed (SIGKILL) or stopped "
    "(SIGSTOP), eight times at random moments of one job",
    holds="losses, parameters and optimizer state are those of an undisturbed run, bit for bit; nothing is left behind",
    reads="an incident for each that hurt a rank, all resumed",
)
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_few_kills_change_no_bit(start_job: StartJob, undisturbed: Record) -> None:
    """The short form of the thousand."""
    assert steps_for(FEW, FEW_APART) == STEPS
    job, striker = struck_again_and_again(start_job, FEW, FEW_APART, FEW_WANDER_S)
    assert len(striker.done) > 2
    assert_same_numbers(job.record(), undisturbed, ranks=RANKS)


@attack(
    "the same, 1,000 times",
    holds="the same",
    reads="1,000 strikes, and how many of each",
)
@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(int(600 + MANY * A_KILL_TAKES_S))
def test_a_thousand_kills_change_no_bit(start_job: StartJob) -> None:
    """MIDSTEP_ATTACK_KILLS of them."""
    steps = steps_for(MANY, MANY_APART)
    quiet = start_job(steps=steps, step_s=0.0, options=["--quiet"])  # no bit depends on how long a step takes
    assert quiet.wait(120 + steps) == 0, quiet.said()
    job, _ = struck_again_and_again(start_job, MANY, MANY_APART, MANY_WANDER_S)
    assert_same_numbers(job.record(), quiet.record(), ranks=RANKS)
