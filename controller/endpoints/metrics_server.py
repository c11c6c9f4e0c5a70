"""Serve a job's numbers to Prometheus, from a thread of the controller's process that reads what the loop published.

A scraper that is slow, many, or silent costs the loop nothing: each connection has a deadline, a few are served at a
time, and the others are closed. The format is prometheus_client's, of the extra `midstep[operator]`.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.private_files import read_secret, replace_file
from ..metrics import METRICS, MetricKind, MetricsBook, MetricsSnapshot, Observation, publish_every_s

PATH = "/metrics"
MOST_AT_ONCE = 8
CONNECTION_S = 10.0  # from the first byte of a request to the last one of the answer
RETRY_S = 5.0  # where another process, a frozen leader perhaps, still has the port
ENDPOINT_NAME = "metrics.endpoint"

_log = logging.getLogger(__name__)


class MetricsPlace(msgspec.Struct, frozen=True):
    """Where numbers are served. `token`: what a scraper has to bring; empty: on this machine, nothing."""

    host: str
    port: int
    token: str = ""


def metrics_place(listen: str, token_file: Path | None) -> MetricsPlace:
    """Return where HOST:PORT is, or :PORT on this machine. Raises ConfigurationError."""
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not colon or not port.isdecimal() or not int(port) < 65536:
        raise ConfigurationError(f"--metrics-listen {listen}: write HOST:PORT, as 127.0.0.1:9400, or :9400.")
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"--metrics-listen needs prometheus_client ({error}): pip install 'midstep[operator]'."
        ) from error
    token = "" if token_file is None else read_secret(token_file)
    if not token and not is_loopback(host):
        raise ConfigurationError(
            f"--metrics-listen {listen}: others than this machine would read the job's numbers. Listen at 127.0.0.1, "
            "or give --metrics-token-file, whose content a scraper has to bring."
        )
    return MetricsPlace(host, int(port), token)


def is_loopback(host: str) -> bool:
    """Tell whether a name or an address leads nowhere but to this machine."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)


class PublishedMetrics:
    """The numbers that were published last: the loop writes, scrapes read. An assignment is all that they share."""

    def __init__(self) -> None:
        self.latest: MetricsSnapshot | None = None

    def describe(self) -> tuple[()]:
        """Describe nothing when it is registered: then nothing has been published yet."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield what was published last, for the registry of prometheus_client."""
        snapshot = self.latest
        return iter(()) if snapshot is None else families(snapshot)


def families(snapshot: MetricsSnapshot) -> Iterator[Any]:
    """Yield a snapshot as the metric families of prometheus_client."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for name, metric in METRICS.items():
        if metric.kind is MetricKind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, metric.says, labels=metric.labels)
            for labels, each in snapshot.distributions.get(name, {}).items():
                count, buckets = 0.0, []
                for bound, many in zip((*map(str, each.bounds), "+Inf"), each.counts, strict=True):
                    count += many
                    buckets.append((bound, count))
                histogram.add_metric(labels, buckets, each.total)
            yield histogram
            continue
        kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = kind(name, metric.says, labels=metric.labels)
        for labels, value in snapshot.values.get(name, {}).items():
            family.add_metric(labels, value)
        yield family


class MetricsServer:
    """Owns the listening socket and the threads that serve it."""

    def __init__(self, place: MetricsPlace, published: PublishedMetrics, told: Callable[[str], None]) -> None:
        """Serve nothing before `start`. `told` gets the address once it is known."""
        from prometheus_client import CollectorRegistry

        self._place, self._told = place, told
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(published)
        self._closed = threading.Event()
        self._server: _BoundedServer | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin to serve, as soon as the port is free."""
        self._thread.start()

    def close(self) -> None:
        """Serve no more. Idempotent."""
        self._closed.set()
        with self._lock:
            server = self._server
        if server is not None:
            server.shutdown()
        self._thread.join(CONNECTION_S)

    def _serve(self) -> None:
        told = False
        while not self._closed.is_set():
            try:
                server = _BoundedServer(self._place, self._registry)
            except OSError as error:
                if not told:
                    told = True
                    _log.warning("metrics cannot be served at %s:%d yet: %s", *self._at, error)
                self._closed.wait(RETRY_S)
                continue
            with server:
                with self._lock:
                    self._server = server
                if not self._closed.is_set():
                    self._told(f"http://{_shown(self._place.host)}:{server.server_port}{PATH}")
                    server.serve_forever(poll_interval=0.2)
            return

    @property
    def _at(self) -> tuple[str, int]:
        return self._place.host, self._place.port


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class MetricsFeed:
    """Publishes the job's numbers at a bounded rate, in the loop of the driver."""

    def __init__(self, observe: Callable[[], Observation], published: PublishedMetrics, every_s: float) -> None:
        self._observe, self._published, self._every_s = observe, published, every_s
        self._book = MetricsBook(version("midstep"))

    async def run(self) -> None:
        """Take and publish numbers until cancelled."""
        while True:
            self._published.latest = self._book.snapshot(self._observe())
            await asyncio.sleep(self._every_s)


def open_metrics(
    stack: contextlib.ExitStack,
    place: MetricsPlace,
    observe: Callable[[], Observation],
    ranks: int,
    run_directory: Path,
) -> MetricsFeed:
    """Serve numbers until the stack closes, and return what publishes them."""
    published = PublishedMetrics()

    def told(address: str) -> None:
        _log.info("the job's numbers are at %s", address)
        replace_file(run_directory / ENDPOINT_NAME, f"{address}\n".encode())

    server = MetricsServer(place, published, told)
    server.start()
    stack.callback(server.close)
    return MetricsFeed(observe, published, publish_every_s(ranks))


class _BoundedServer(HTTPServer):
    """Serves up to MOST_AT_ONCE connections, each in a thread with a deadline, and closes those beyond."""

    request_queue_size = 64

    def __init__(self, place: MetricsPlace, registry: Any) -> None:
        self.token, self.registry = place.token, registry
        self._room = threading.BoundedSemaphore(MOST_AT_ONCE)
        if ":" in place.host:
            self.address_family = socket.AF_INET6
        super().__init__((place.host, place.port), _Scrape)

    def server_bind(self) -> None:
        """Bind without asking a name server what the host is called."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "metrics", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, if there is room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._answer, args=(request, client_address), name="scrape", daemon=True).start()

    def _answer(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(CONNECTION_S, _cut, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # it has gone, or its time was over
        except Exception:
            _log.exception("a scrape was not answered")
        finally:
            deadline.cancel()
            self.shutdown_request(request)
            self._room.release()


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Scrape(BaseHTTPRequestHandler):
    """Answers GET /metrics, in the format that the scraper asks for."""

    server: _BoundedServer
    server_version, sys_version = "midstep", ""
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        from prometheus_client.exposition import choose_encoder

        if not self._may():
            self._say(401, b"a token is needed: Authorization: Bearer ...\n", "text/plain")
        elif self.path.partition("?")[0] != PATH:
            self._say(404, f"the job's numbers are at {PATH}\n".encode(), "text/plain")
        else:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._say(200, encode(self.server.registry), content_type)

    def _may(self) -> bool:
        brought = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        token = self.server.token
        return not token or hmac.compare_digest(brought.encode("latin-1", "replace"), token.encode())

    def _say(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes come every few seconds: they are not logged."""
