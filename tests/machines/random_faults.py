"""Random faults of a job on several machines, drawn from a seed, and how each is caused and mended."""

import random
import time
from collections.abc import Iterator

import msgspec

from midstep.protocol.compat import StrEnum
from midstep.protocol.types import ArmedFault, FaultAction, InjectionPoint

from .job import Job
from .machines import Machine
from .network import Quality

CONTROLLER = 0
SHORTEST_CUT_S, LONGEST_CUT_S = 1.0, 20.0
DEAF_S, BAD_S = 6.0, 5.0
LOSS, RATE_BITS = 0.2, 10e6
PAIRS = 0.3  # share of the rounds in which a second fault comes within the first
LATEST_SECOND_S = 4.0  # after the first: while that is noticed, and while it is repaired
NOBODY = -1


class Kind(StrEnum):
    """What happens."""

    KILL = "kill -9 of a rank"
    STOP = "SIGSTOP of a rank"
    RAISE = "exception in a rank"
    KILL_AGENT = "kill -9 of an agent"
    POWER = "machine off, and on again"
    CUT = "cable cut"
    DEAF = "controller does not hear a machine"
    UNHEARD = "machine does not hear the controller"
    LOSS = "20 % loss on a cable"
    SLOW = "10 Mbit/s on a cable"
    KILL_CONTROLLER = "kill -9 of the controller"


OF_A_RANK = frozenset({Kind.KILL, Kind.STOP, Kind.RAISE})
# With 20 % loss three seconds may well pass without a heartbeat.
LOSES_THE_MACHINE = frozenset({Kind.KILL_AGENT, Kind.POWER, Kind.CUT, Kind.DEAF, Kind.UNHEARD, Kind.LOSS})


class Fault(msgspec.Struct, frozen=True):
    """One fault. `place`: which of the ranks it hits, or whose machine; NOBODY for the controller."""

    kind: Kind
    place: int
    lasts_s: float
    after_s: float  # the first of its round

    def __str__(self) -> str:
        """Say it in a line."""
        where = "" if self.place == NOBODY else f" (rank {self.place})"
        return f"{self.kind}{where}, {self.lasts_s:.1f} s, after {self.after_s:.1f} s"


def draw(seed: int, count: int, ranks: int, ranks_per_node: int) -> Iterator[tuple[Fault, ...]]:
    """Yield the faults of each round, `count` in all; those of one round are on different machines.

    So at most two machines are away at a time. The job has two spares and four machines with a copy each: two copies
    are alive at any moment. What is a rank's own has one copy, on the next machine, so two that are lost in a round are
    no neighbours: nothing may be lost.
    """
    dice = random.Random(seed)
    bag: list[Kind] = []
    while count:
        places: list[int] = []
        lost: list[int] = []
        faults = []
        for number in range(min(count, 2 if dice.random() < PAIRS else 1)):
            if not bag:  # each kind as often as any other
                bag = dice.sample(list(Kind), len(Kind))
            kind = bag.pop()
            taken = {*places, *(_neighbours(lost, ranks // ranks_per_node) if kind in LOSES_THE_MACHINE else ())}
            free = [rank for rank in range(ranks) if rank // ranks_per_node not in taken]
            place = NOBODY if kind is Kind.KILL_CONTROLLER else dice.choice(free)
            places.append(place // ranks_per_node)
            lost += places[-1:] if kind in LOSES_THE_MACHINE else []
            lasts_s = {Kind.CUT: dice.uniform(SHORTEST_CUT_S, LONGEST_CUT_S), Kind.LOSS: BAD_S, Kind.SLOW: BAD_S}
            faults.append(
                Fault(
                    kind,
                    place,
                    lasts_s.get(kind, DEAF_S if kind in {Kind.DEAF, Kind.UNHEARD} else 0.0),
                    dice.uniform(0.0, LATEST_SECOND_S) if number else 0.0,
                )
            )
        count -= len(faults)
        yield tuple(faults)


def _neighbours(machines: list[int], count: int) -> set[int]:
    """Return the machines before and behind these; they stand in a circle."""
    return {(machine + step) % count for machine in machines for step in (-1, 1)}


class Round:
    """Faults in a job. `where`: the machine of each rank, before the faults of the round."""

    def __init__(self, job: Job, faults: tuple[Fault, ...], seed: int) -> None:
        self._job = job
        self._faults = faults
        self._seed = seed
        status = job.until(lambda now: all(rank.pid > 0 for rank in now.ranks), "a process of each rank")
        self._pids = {rank.rank: rank.pid for rank in status.ranks}
        self._where = {rank.rank: job.machine_named(rank.node) for rank in status.ranks}
        self._began_s = time.monotonic()
        self._heal: list[tuple[float, Fault]] = []

    @property
    def hit(self) -> set[str]:
        """The machines on which processes may have been replaced."""
        return {self._where[fault.place].name for fault in self._faults if fault.place != NOBODY}

    def run(self) -> None:
        """Cause every fault at its time, and end those that last."""
        for fault in self._faults:
            self._until(fault.after_s)
            self._cause(fault)
            if fault.lasts_s:
                self._heal.append((self._now_s() + fault.lasts_s, fault))
        for at_s, fault in sorted(self._heal, key=lambda entry: entry[0]):
            self._until(at_s)
            self._mend(fault)

    def clear_up(self) -> None:
        """Start again what ended with a machine or an agent, as its launcher does."""
        for fault in self._faults:
            machine = self._where.get(fault.place)
            if fault.kind is Kind.POWER and machine is not None:
                self._job.power_on(machine)
            if fault.kind is Kind.KILL_AGENT and machine is not None:
                self._job.join_again(machine)

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self._now_s()))

    def _cause(self, fault: Fault) -> None:
        if fault.kind is Kind.KILL_CONTROLLER:
            self._job.kill_controller()
            return
        machine = self._where[fault.place]
        network = self._job.machines.network
        if fault.kind in OF_A_RANK:
            self._hurt(machine, fault)
        elif fault.kind is Kind.KILL_AGENT:
            self._job.kill_agent(machine)
        elif fault.kind is Kind.POWER:
            machine.power_off()
        elif fault.kind is Kind.CUT:
            machine.cut()
        elif fault.kind is Kind.DEAF:
            network.deafen(CONTROLLER, machine.number)
        elif fault.kind is Kind.UNHEARD:
            network.deafen(machine.number, CONTROLLER)
        elif fault.kind is Kind.LOSS:
            network.worsen(machine.number, Quality(loss=LOSS, seed=self._seed))
        else:
            network.worsen(machine.number, Quality(rate_bits=RATE_BITS))

    def _hurt(self, machine: Machine, fault: Fault) -> None:
        pid = self._pids[fault.place]
        if fault.kind is Kind.RAISE:
            self._job.inject(ArmedFault(fault.place, FaultAction.RAISE, InjectionPoint.FORWARD))
        else:
            # The process may have ended with what came before.
            machine.run("kill", "-9" if fault.kind is Kind.KILL else "-STOP", str(pid), check=False)

    def _mend(self, fault: Fault) -> None:
        machine = self._where[fault.place]
        network = self._job.machines.network
        if fault.kind is Kind.CUT:
            machine.heal()
        elif fault.kind is Kind.DEAF:
            network.undeafen(CONTROLLER, machine.number)
        elif fault.kind is Kind.UNHEARD:
            network.undeafen(machine.number, CONTROLLER)
        else:
            network.clear(machine.number)
