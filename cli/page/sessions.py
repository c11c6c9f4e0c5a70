"""Says who may see the page and press its buttons: by tokens of roles, and sessions in cookies.

A browser sends a cookie by itself, also with what another site has it send. So a press takes more: the page's own
origin, and a proof that only a script of the page can have read.
"""

import hmac
import secrets
from collections.abc import Iterable, Mapping

import msgspec

from ...protocol.identities import Role

SESSION_S = 12 * 3600.0
MOST_SESSIONS = 64
MOST_TRIES, TRIES_S = 5, 60.0  # wrong tokens, from all places together
MOST_PRESSES, PRESSES_S = 20, 10.0  # of all sessions together
COOKIE = "midstep_page"
PROOF = "x-midstep-proof"


class PageSession(msgspec.Struct, frozen=True):
    """One browser that has brought a token. `proof`: what its script sends with each press."""

    role: Role
    proof: str
    until_s: float


class Sessions:
    """Browsers that have brought a token, by what their cookie says."""

    def __init__(self, tokens: Iterable[tuple[Role, str]], *, is_open: bool) -> None:
        """`is_open`: to see takes no token."""
        self._tokens = tuple(tokens)
        self._is_open = is_open
        self._sessions: dict[str, PageSession] = {}
        self._tries_s: list[float] = []
        self._presses_s: list[float] = []

    @property
    def asks(self) -> bool:
        """Tell whether there is a token to bring."""
        return bool(self._tokens)

    def open(self, token: str, now: float) -> str | None:
        """Return the cookie of a new session, or None for a wrong token."""
        roles = [role for role, known in self._tokens if _same(token, known)]
        if not roles:
            self._tries_s.append(now)
            return None
        cookie = secrets.token_urlsafe(32)
        while len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[cookie] = PageSession(roles[-1], secrets.token_urlsafe(32), now + SESSION_S)
        return cookie

    def may_try(self, now: float) -> bool:
        """Tell whether a token is looked at now."""
        self._tries_s = [each for each in self._tries_s if now - each < TRIES_S]
        return len(self._tries_s) < MOST_TRIES

    def may_press(self, now: float) -> bool:
        """Tell whether a press is looked at now, and count it."""
        self._presses_s = [each for each in self._presses_s if now - each < PRESSES_S]
        self._presses_s.append(now)
        return len(self._presses_s) <= MOST_PRESSES

    def session(self, cookie: str, now: float) -> PageSession | None:
        """Return the session of a cookie, if it lasts."""
        found = self._sessions.get(cookie)
        return found if found is not None and found.until_s > now else None

    def holds(self, cookie: str, now: float) -> bool:
        """Tell whether who comes with this cookie may see the page."""
        return self._is_open or self.session(cookie, now) is not None


def is_own(headers: Mapping[str, str], scheme: str, session: PageSession) -> bool:
    """Tell whether a press comes from a script of the page itself, and not from another site in the same browser."""
    own = f"{scheme}://{headers.get('host', '')}"
    from_page = headers.get("origin") == own and headers.get("sec-fetch-site", "same-origin") == "same-origin"
    return from_page and _same(headers.get(PROOF, ""), session.proof)


def _same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), known.encode())
