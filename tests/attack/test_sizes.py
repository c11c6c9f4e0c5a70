"""What grows without bound in the controller when somebody sends and reports without end"""

import contextlib
import json
import time
from pathlib import Path

import zmq

from midstep.protocol.keys import JobKeys

from .attack import attack
from .served import REFUSED, A, B, served

MIB = 1024 * 1024
MOST_GROWTH_BYTES = 200 * MIB
PARTS = 400  # of 1 MiB
LOOKING_S = 5.0


@attack(
    "somebody with a detector's key sends a message of 400 parts of 1 MiB each, each of them within the limit",
    holds="a connection is closed after 32 MiB, which frees what was collected, and 8 MiB a second are read of one key",
    reads="refused: connection has carried its share, to be made again",
)
def test_a_message_of_many_parts_takes_little_memory(tmp_path: Path) -> None:
    """Memory grows by a fraction of what was sent, and another agent is answered all the while."""
    with served(tmp_path) as router, contextlib.ExitStack() as cleanup:
        other = router.client(B)
        assert other.ask()
        before = router.memory_bytes
        context = cleanup.enter_context(zmq.Context())
        endless = cleanup.enter_context(context.socket(zmq.DEALER))
        keys = JobKeys.load_client(router.keys, A)
        endless.linger, endless.sndhwm = 0, 0
        endless.curve_serverkey, endless.curve_secretkey, endless.curve_publickey = (
            keys.server_public.encode(),
            keys.secret.encode(),
            keys.public.encode(),
        )
        endless.routing_id = A.encode() + b"\0nonce"
        endless.connect(router.endpoint)
        part = bytes(MIB)
        for _ in range(PARTS):
            endless.send(part, zmq.SNDMORE)
        endless.send(b"")
        most, until_s = before, time.monotonic() + LOOKING_S
        while time.monotonic() < until_s and most - before < MOST_GROWTH_BYTES:
            most = max(most, router.memory_bytes)
            assert other.ask()
        assert most - before < MOST_GROWTH_BYTES, f"{(most - before) // MIB} MiB more"
        counted = json.loads(other.ask(REFUSED) or b"{}")
        assert counted["connection has carried its share, to be made again"] >= 1
