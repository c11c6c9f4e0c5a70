"""A cluster by hand: see the docstring of this package."""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from ...machines.namespaces import OF_MACHINE
from .cluster import Cluster
from .programs import CACHE, NoKubernetes, build, require_programs, why_not

STATE = Path("/tmp/midstep-kubernetes")
_SOCKET = STATE / "socket"
_HELD_S = 0.5
_ORDER_S = 60.0
_LONGEST = 1000


def up(nodes: int, shared: list[Path]) -> None:
    """Bring a cluster up, hold it, and do what others ask for, until it is to go down."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Cluster(nodes, shared, state=STATE) as cluster, socket.socket(socket.AF_UNIX) as orders:
        for machine in map(cluster.machines.__getitem__, range(len(cluster.machines))):
            (STATE / f"{machine.name}.pid").write_text(str(machine.space.pid))
        orders.bind(str(_SOCKET))
        orders.listen()
        orders.settimeout(_HELD_S)
        print(cluster.kubectl("get", "nodes"), f"up: KUBECONFIG={cluster.kubeconfig}", sep="", flush=True)
        while not ended.is_set():
            _obey_one(cluster, orders, ended)


def _obey_one(cluster: Cluster, orders: socket.socket, ended: threading.Event) -> None:
    try:
        asker, _ = orders.accept()
    except TimeoutError:
        return
    with asker:
        what, _, name = asker.recv(_LONGEST).decode().partition(" ")
        number = int(name.removeprefix("m") or 0)
        match what:
            case "down":
                ended.set()
            case "off":
                cluster.power_off(number)
            case "on":
                cluster.power_on(number)
                (STATE / f"m{number}.pid").write_text(str(cluster.machines[number].space.pid))
            case "cut":
                cluster.machines[number].cut()
            case "heal":
                cluster.machines[number].heal()
            case _:
                asker.sendall(f"there is no {what}".encode())
                return
        asker.sendall(b"done")


def order(words: list[str]) -> None:
    """Ask the process that holds the cluster."""
    with socket.socket(socket.AF_UNIX) as holder:
        holder.settimeout(_ORDER_S)
        holder.connect(str(_SOCKET))
        holder.sendall(" ".join(words).encode())
        print(holder.recv(_LONGEST).decode())


def run(machine: str, words: list[str]) -> None:
    """Become a program on a machine."""
    pid = (STATE / f"{machine}.pid").read_text()
    path = f"{require_programs().path}:{os.environ['PATH']}:/usr/sbin:/sbin"
    environment = {**os.environ, "KUBECONFIG": str(STATE / "kubeconfig"), "PATH": path}
    kinds = (f"--{kind}" for kind in OF_MACHINE)
    enter = ["nsenter", "--target", pid, *kinds, f"--wdns={Path.cwd()}", "--"]
    os.execvpe(enter[0], [*enter, *words], environment)


def main(words: list[str]) -> int:
    """Do one of them."""
    match words:
        case ["build"]:
            try:
                reason = why_not()
                if not reason:
                    build()
            except NoKubernetes as error:
                reason = str(error)
            print(f"no Kubernetes: {reason}" if reason else f"built in {CACHE}")
        case ["up", nodes, *options]:
            up(int(nodes), [Path(path).resolve() for path in options if path != "--share"])
        case ["run", machine, "--", *command]:
            run(machine, command)
        case ["down" | "off" | "on" | "cut" | "heal", *_]:
            order(words)
        case _:
            print(sys.modules["tests.kubernetes.cluster"].__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
