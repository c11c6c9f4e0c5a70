"""A Lease of Kubernetes, by which the controllers of a job are elected: read, and changed only as it was read.

One thread at a time calls it, beside a controller's loop that does not wait for it.
"""

import contextlib
import logging
from collections.abc import Iterator
from datetime import datetime, timezone

import msgspec

from ...protocol.errors import ConfigurationError, JournalError, StoreUnreachable
from ...protocol.types import HeldLease

try:
    import httpx2
    from lightkube import Client
    from lightkube.core.exceptions import ApiError, ConfigError
    from lightkube.models.coordination_v1 import LeaseSpec
    from lightkube.resources.coordination_v1 import Lease
except ImportError as _error:
    raise ConfigurationError(
        f"an election by a Lease needs lightkube ({_error}): pip install 'midstep[kubernetes]'."
    ) from _error

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of each request

REQUEST_S = 1.0
_DURATION_S = 2  # of a Lease that nothing has held yet
_NOT_FOUND, _CONFLICT, _TIMED_OUT, _BUSY, _SERVER = 404, 409, 408, 429, 500
_FAILURES = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, msgspec.MsgspecError, ConfigError)


class KubernetesLease:
    """One Lease. `namespace` "": that of the pod, or of the user's context."""

    def __init__(self, namespace: str, name: str) -> None:
        """Read the configuration; nothing is asked yet. Raises ConfigurationError."""
        try:
            self._client = Client(
                namespace=namespace or None, timeout=httpx2.Timeout(REQUEST_S), field_manager="midstep"
            )
        except (ConfigError, OSError, KeyError, AttributeError, msgspec.MsgspecError) as error:
            raise ConfigurationError(
                f"there is no cluster to ask ({error}): set KUBECONFIG, or give the pod a service account."
            ) from error
        self._name = name
        self._known: Lease | None = None

    def __str__(self) -> str:
        return f"the Lease {self._name} in the namespace {self._client.namespace}"

    def read(self) -> HeldLease:
        """Return it. Raises StoreUnreachable; JournalError: there is none, or it may not be read."""
        with self._explained("read"):
            self._known = self._client.get(Lease, self._name)
        return _held(self._known)

    def write(self, holder: str, duration_s: int, before: HeldLease) -> HeldLease | None:
        """Name a holder, if it is as it was `before`; None: it was changed meanwhile. Raises as `read` does.

        After StoreUnreachable it may have been done or not.
        """
        known = self._known
        if known is None or _held(known) != before:
            return None
        spec = known.spec or LeaseSpec()
        now = _now()
        taken = holder not in {"", spec.holderIdentity or ""}
        changed = msgspec.structs.replace(
            spec,
            holderIdentity=holder,
            leaseDurationSeconds=duration_s,
            renewTime=now,
            acquireTime=now if taken else spec.acquireTime,
            leaseTransitions=(spec.leaseTransitions or 0) + taken,
        )
        with self._explained("change"):
            try:
                self._known = self._client.replace(msgspec.structs.replace(known, spec=changed))
            except ApiError as error:
                if error.status.code != _CONFLICT:
                    raise
                return None
        return _held(self._known)

    def close(self) -> None:
        """Close its connections. Idempotent."""
        self._client.close()

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            code = error.status.code if isinstance(error, ApiError) else None
            if code is None or code >= _SERVER or code in {_BUSY, _TIMED_OUT}:
                raise StoreUnreachable(
                    f"{self}: the API does not let it {doing} now: {error or type(error)}."
                ) from error
            advice = "Make it, with an empty spec" if code == _NOT_FOUND else "Its Role needs get and update of it"
            raise JournalError(
                f"{self} cannot be {doing}{'d' if doing == 'change' else ''}: {error}. {advice}."
            ) from error


def _now() -> datetime:
    """Return the time with a fraction of a second: Kubernetes asks for one, and the client leaves out a zero."""
    now = datetime.now(timezone.utc)
    return now.replace(microsecond=now.microsecond or 1)


def _held(lease: Lease) -> HeldLease:
    spec = lease.spec or LeaseSpec()
    version = (lease.metadata.resourceVersion if lease.metadata is not None else None) or ""
    return HeldLease(spec.holderIdentity or "", spec.leaseDurationSeconds or _DURATION_S, version)
