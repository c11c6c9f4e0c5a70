"""The two ends of one of midstep's connections: `peer.py keys|route|deal|deal-without-pings DIRECTORY [ENDPOINT]`.

`route` says each number that it hears, and answers it; `deal` sends one after the other, with libzmq's pings or not.
"""

import itertools
import sys
import time

from midstep.protocol import transport
from midstep.protocol.keys import JobKeys
from midstep.protocol.transport import DealerSocket, RouterSocket, wait

NAME = "node/m1"
PAUSE_S = 0.1


def route(keys: str, endpoint: str) -> None:
    """Hear and answer, for ever."""
    router = RouterSocket(endpoint, curve=JobKeys.load_server(keys))
    while True:
        wait([router], (), PAUSE_S)
        for received in router.receive():
            print(received.data.decode(), flush=True)
        router.send(NAME, b"go on")


def deal(keys: str, endpoint: str) -> None:
    """Send numbers, for ever."""
    dealer = DealerSocket(endpoint, identity=NAME, curve=JobKeys.load_client(keys, NAME))
    for number in itertools.count():
        dealer.send(str(number).encode())
        time.sleep(PAUSE_S)
        dealer.receive()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["keys", directory]:
            JobKeys.create(directory, [NAME])
        case ["route", directory, where]:
            route(directory, where)
        case ["deal-without-pings", directory, where]:
            transport._HEARTBEAT_MS = 0
            deal(directory, where)
        case ["deal", directory, where]:
            deal(directory, where)
