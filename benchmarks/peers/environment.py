"""The environment of the peers: torch, midstep, and each peer that can be installed. Nothing of it is in midstep's own.

It is made once, in `.versions/peers`; `make clean` removes it. A peer that cannot be installed keeps none of the others
away.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from .plan import Peer

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".versions" / "peers"
INSTALL_S = 1800.0
OURS = ("--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[torch]")
WITHOUT = "--no-deps"


class NotMade(Exception):
    """There is no environment for any peer. The text says why."""


def make(peers: Mapping[str, Peer], place: Path = PLACE) -> dict[str, str]:
    """Make what is missing; return why each peer is not there that could not be installed. Raises NotMade."""
    record = place / "installed.json"
    known: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    if (ours := " ".join(OURS)) not in known:
        for command in ([sys.executable, "-m", "venv", str(place)], _pip(place, OURS)):
            if why := _failure(command):
                raise NotMade(f"{place}: {why}")
        known[ours] = ""
    reasons = {}
    for name, peer in peers.items():
        for wishes in peer.requirements:
            key = " ".join(wishes)
            if known.get(key, "not tried"):
                limits = () if WITHOUT in wishes else OURS[:2]
                known[key] = _failure(_pip(place, (*limits, *wishes)))
            if known[key]:
                reasons[name] = known[key]
    record.write_text(json.dumps(known, indent=2))
    return reasons


def programs(place: Path = PLACE) -> Path:
    """Return the folder of its programs."""
    return place / "bin"


def _pip(place: Path, wishes: Iterable[str]) -> list[str]:
    return [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *wishes]


def _failure(command: list[str]) -> str:
    """Run it; return why it failed, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not installed in {INSTALL_S:g} s"
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"status {done.returncode}"]
    return "" if done.returncode == 0 else f"cannot be installed here: {said[-1][:200]}"
