"""What the tests of the network send: `probe.py answer` on one machine, `ask`, `talk` or `pour ADDRESS ...` on another.

`answer` says a line for each datagram that it hears. `ask` sends datagrams and says how many were answered, and the
quickest answer. `talk` sends numbers over one connection, and says each as it comes back. `pour` sends bytes over one
connection, and says how long it took until they were all there.
"""

import json
import socket
import sys
import threading
import time

PORT = 7000
_ANSWER_S = 0.3
_CONNECT_S = 10.0


def answer() -> None:
    """Answer whatever comes, for ever."""
    listener = socket.create_server(("", PORT))
    threading.Thread(target=_answer_connections, args=(listener,), daemon=True).start()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("", PORT))
    print("ready", flush=True)
    while True:
        data, sender = datagrams.recvfrom(1024)
        print("heard", flush=True)
        datagrams.sendto(data, sender)


def _answer_connections(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer_connection, args=(connection,), daemon=True).start()


def _answer_connection(connection: socket.socket) -> None:
    while data := connection.recv(1 << 20):
        connection.sendall(data if len(data) < 1024 else data[-1:])


def ask(address: str, count: int) -> None:
    """Send datagrams, each after the answer to the one before or the time for it."""
    fastest_s, answers = float("inf"), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.settimeout(_ANSWER_S)
        for number in range(count):
            began_s = time.monotonic()
            datagrams.sendto(str(number).encode(), (address, PORT))
            try:
                while datagrams.recv(1024) != str(number).encode():
                    pass  # an answer that came too late
            except TimeoutError:
                continue
            answers += 1
            fastest_s = min(fastest_s, time.monotonic() - began_s)
    print(json.dumps({"answers": answers, "fastest_s": fastest_s}))


def talk(address: str, count: int, pause_s: float) -> None:
    """Send numbers over one connection."""
    with socket.create_connection((address, PORT), timeout=_CONNECT_S) as connection:
        for number in range(count):
            connection.sendall(str(number).encode())
            print(connection.recv(1024).decode(), flush=True)
            time.sleep(pause_s)


def pour(address: str, size_bytes: int) -> None:
    """Send many bytes over one connection; the last one comes back in the end."""
    with socket.create_connection((address, PORT), timeout=_CONNECT_S) as connection:
        began_s = time.monotonic()
        connection.sendall(bytes(size_bytes) + b"end")
        tail = b""
        while not tail.endswith(b"d"):
            tail = connection.recv(1024)
        print(json.dumps({"took_s": time.monotonic() - began_s}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["answer"]:
            answer()
        case ["ask", to, times]:
            ask(to, int(times))
        case ["talk", to, times, between_s]:
            talk(to, int(times), float(between_s))
        case ["pour", to, size]:
            pour(to, int(size))
