"""Threads of one process may decode the same type for the first time together."""

import subprocess
import sys

SCRIPT = """
import sys, threading, msgspec
from midstep.protocol.decoders import json_decoder, msgpack_decoder
sys.setswitchinterval(1e-6)
data = {"b": {"a": {"x": [1]}, "c": {}}, "d": {"x": [2]}, "e": []}
ways = ((json_decoder, msgspec.json.encode(data)), (msgpack_decoder, msgspec.msgpack.encode(data)))
for number in range(200):
    A = msgspec.defstruct("A", [("x", tuple[int, ...])])
    B = msgspec.defstruct("B", [("a", A), ("c", dict[str, list[A]])])
    C = msgspec.defstruct("C", [("b", B), ("d", A), ("e", tuple[B, ...])])
    together = threading.Barrier(3)
    decoder_of, encoded = ways[number % 2]
    def decode():
        together.wait()
        decoder_of(C).decode(encoded)
    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_a_type_that_threads_decode_at_the_same_time_ends_no_process() -> None:
    """With `msgspec.json.decode(data, type=C)` instead, the same script ends by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
