"""The switch between the machines, and what can go wrong with the cables that are plugged into it.

Faults are made with what every kernel has. A cable that is cut ends in no switch: this works at once, and so does
its mending, while an interface that is set down and up takes up to a second. A machine that no longer
hears another one is a wrong hardware address at that other one, so that what it sends reaches nobody. Delay, loss and a
low rate are made by a program that carries the frames of one cable (`wire`), since not every kernel has netem.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from .namespaces import OF_SWITCH, Namespaces, system_path

PREFIX = "198.18"  # RFC 2544: for tests of networks, never routed
_FIRST = 10
_NOBODY = "02:00:00:00:ff:ff"
_BRIDGE = "switch"
_WIRE = Path(__file__).with_name("wire.py")
_WIRE_ENDS_S = 5.0


class Quality(msgspec.Struct, frozen=True):
    """How a cable carries frames, in each of its two directions."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of the frames
    rate_bits: float = 0.0  # per second; 0: as fast as it goes
    seed: int = 0


GOOD = Quality()
BAD = Quality(delay_s=0.025, loss=0.01)  # two cables are on each way: 50 ms, and 2 % of the frames


def address(number: int) -> str:
    """Return the address of a machine."""
    return f"{PREFIX}.0.{_FIRST + number}"


class Network:
    """A switch with one port per machine. Machines are known by their numbers."""

    def __init__(self, *, user: bool, cables: Quality = GOOD) -> None:
        """`user`: in a user namespace. `cables`: what all of them are like at first. Raises CannotMakeMachines."""
        self.switch = Namespaces(OF_SWITCH, user=user)
        self._cables = cables
        self._hosts: dict[int, Namespaces] = {}
        self._cut: set[int] = set()
        self._wires: dict[int, subprocess.Popen[bytes]] = {}
        try:
            self.switch.network("link set lo up", f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up")
        except BaseException:
            self.switch.end()
            raise

    def plug_in(self, number: int, host: Namespaces) -> None:
        """Give a machine a cable, an interface `eth0` and its address."""
        hardware = f"address 02:00:00:00:00:{number:02x}"
        self.switch.network(
            f"link add p{number} type veth peer name eth0 {hardware} netns {host.pid}",
            f"link set p{number} master {_BRIDGE} up",
        )
        host.network("link set lo up", f"addr add {address(number)}/16 dev eth0", "link set eth0 up")
        self._hosts[number] = host
        if self._cables != GOOD:
            self.worsen(number, msgspec.structs.replace(self._cables, seed=number))

    def unplug(self, number: int) -> None:
        """Take the cable away, with what was wrong with it. Its machine may have ended, and the kernel been faster."""
        self._cut.discard(number)
        del self._hosts[number]
        wire = self._wires.pop(number, None)
        if wire is not None:
            _end(wire)
            self.switch.network(f"link del w{number}")
        port = f"p{number}"
        self.switch.run(["sh", "-c", f"ip link del {port} 2>&1; ! ip link show {port} 2>/dev/null"], kinds=("net",))

    def cut(self, number: int) -> None:
        """Cut the cable of a machine: nothing gets in or out, and no connection is told."""
        self._cut.add(number)
        self.switch.network(f"link set {self._port(number)} nomaster")

    def heal(self, number: int) -> None:
        """Mend the cable of a machine. Idempotent."""
        self._cut.discard(number)
        self.switch.network(f"link set {self._port(number)} master {_BRIDGE}")

    def deafen(self, hearer: int, speaker: int) -> None:
        """Let nothing that `speaker` sends reach `hearer`; the other direction stays."""
        self._hosts[speaker].network(f"neigh replace {address(hearer)} lladdr {_NOBODY} dev eth0 nud permanent")

    def undeafen(self, hearer: int, speaker: int) -> None:
        """Let `hearer` hear `speaker` again."""
        self._hosts[speaker].network(f"neigh del {address(hearer)} dev eth0")

    def worsen(self, number: int, quality: Quality) -> None:
        """Have the cable of a machine carry frames like this from now on."""
        self._unwire(number)
        port, near, far = f"p{number}", f"w{number}", f"b{number}"
        self.switch.network(
            f"link add {near} type veth peer name {far}",
            f"link set {near} up",
            f"link set {port} nomaster",
            f"link set {far} master {_BRIDGE} up",
        )
        options = (quality.delay_s, quality.loss, quality.rate_bits, quality.seed)
        wire = subprocess.Popen(
            [*self.switch.enter(*OF_SWITCH), sys.executable, "-IS", str(_WIRE), port, near, *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": system_path()},
        )
        self._wires[number] = wire
        assert wire.stdout is not None
        assert wire.stdout.read(1), f"the wire of machine {number} cannot be made: see above"
        self._stay_cut(number)

    def clear(self, number: int) -> None:
        """Have the cable of a machine carry frames as at first. Idempotent."""
        if self._cables != GOOD:
            self.worsen(number, msgspec.structs.replace(self._cables, seed=number))
        else:
            self._unwire(number)

    def _unwire(self, number: int) -> None:
        wire = self._wires.pop(number, None)
        if wire is not None:
            _end(wire)
            self.switch.network(f"link del w{number}", f"link set p{number} master {_BRIDGE}")
            self._stay_cut(number)

    def close(self) -> None:
        """Take everything away. Idempotent."""
        self.switch.end()
        while self._wires:
            _end(self._wires.popitem()[1])

    def _port(self, number: int) -> str:
        """Return the port of the switch in which a machine's cable ends."""
        return f"b{number}" if number in self._wires else f"p{number}"

    def _stay_cut(self, number: int) -> None:
        if number in self._cut:
            self.cut(number)


def _end(wire: subprocess.Popen[bytes]) -> None:
    wire.communicate(timeout=_WIRE_ENDS_S)  # it ends when its input does
