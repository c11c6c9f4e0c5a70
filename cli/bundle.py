"""`midstep bundle`: what another person needs to look into a job, in one file, without its secrets.

It is as good as what can be reached: of a job that runs its controller says how it stands, of one whose controller is
gone, or that has ended, its journal, and of one whose journal cannot be read the directory has the logs.
"""

import contextlib
import datetime
import io
import itertools
import os
import platform
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import msgspec

from .. import __version__
from ..controller.endpoints.control_requests import StoryReply, StoryRequest
from ..controller.endpoints.story import excerpt
from ..controller.journal.records import Founding
from ..launch.directories import ROLES_NAME, run_directory_of
from ..launch.reached_job import HereJob, JobElsewhere, ReachedJob, founding_of, look, reached, read_story
from ..policies.schema import Policy
from ..protocol.discovery import ROLE_STORE_NAME
from ..protocol.errors import ConfigurationError, MidstepError
from ..protocol.plain_yaml import write_yaml
from ..protocol.private_files import open_new_file, read_secret
from ..protocol.rank_logs import end_of_log
from ..protocol.token import TOKEN_FILE_VARIABLE
from .display.plain import echo
from .ended_incidents import asked, incidents_after
from .frame import Command, operator_options
from .story import told
from .views.incident_data import report_json
from .what_if import policy_of

ASK_S = 10.0
STORY_S = 60.0
MOST_OF_A_LOG = 64 * 1024
MOST_OF_LOGS = 8 * 1024 * 1024
MOST_LOGS = 400
MOST_OF_A_PART = 8 * 1024 * 1024
_SEAM = 4096  # read before the part of a log that is kept: a secret that is cut in two would not be known as one
_MOST_SECRETS_BYTES = 65_536  # of a file of keys
_MOST_KEY_FILES = 2000
_PACKAGES = ("torch", "torch_npu", "mindspore", "megatron-core", "torchtitan", "pyzmq", "msgspec", "numpy", "ray")
_OF_RANKS = "rank-"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_SHORT_VARIABLE = 8  # values of the job's own environment that are shorter are a part of too many words
_ABOUT = """\
A job of midstep, put together by `midstep bundle`.

about.json       versions, the machine, what is in here, and what could not be had
status.json      how the job stands, as of `midstep status --json`
incidents.json   its incidents, as of `midstep report --json`
story.txt        the latest events of its journal, and what followed from each
policy.yaml      the policy in force
logs/            the last {kept:,} bytes of each log on the machine where this was made, the newest {logs:,} of them

Left out on purpose: tokens, keys, the addresses and headers of webhooks, the environment of the job and its command
line. Where a text has one of them, or something that looks like one, there is [removed]. What a script prints is its
own: look through logs/ before you send this on.
"""


# Out of texts is taken what is known to be a secret, wherever it stands; beside it, whatever follows a name like
# `password`, and the forms of keys that have a form of their own. One that looks like any other word stays.

REMOVED = "[removed]"
LEAST_CHARACTERS = 6  # of what is taken out wherever it stands: a shorter one is a part of too many words
_SECRET = r"token|secret|passw(?:or)?d|passphrase|api_?key|access_?key|private_?key|credential|authorization|cookie"
_NAMES = re.compile(_SECRET.replace("_?", "[_-]?"), re.IGNORECASE)
_NAMED = re.compile(
    rf"""(?P<name>[\w.-]*(?:{_SECRET.replace("_?", "[_-]?")})[\w.-]*["']?\s*[=:]\s*["']?)"""
    r"""(?P<value>(?:(?:bearer|basic)\s+)?[^\s"',;)\]}]+)""",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"[\d.+-]+(?:e[+-]?\d+)?|true|false|none|null|nan|\[removed\]?", re.IGNORECASE)
_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\bmidstep1\.[\w.+/=-]+"
    r"|\b(?:hf|ghp|gho|ghs|glpat|sk|pk|xox[abprs])[_-][\w-]{16,}"
    r"|\bA[KS]IA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*"
    r"|\b(?:bearer|basic)\s+[\w.+/=-]{8,}"
    r"|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
    r"|https://hooks\.[\w.-]+/\S+",
    re.IGNORECASE | re.DOTALL,
)
# A key of the control channel (CURVE) is 40 characters of Z85; a random one has capitals, small letters and signs. The
# files of keys, which would name it, are cleared away with the run directory of a job that is gone.
_CURVE_KEYS = re.compile(
    r"""(?<![^\s"'=:,(])(?=\S{0,39}[A-Z])(?=\S{0,39}[a-z])(?=\S{0,39}[][{}()?*!^$#<>&%@+=])"""
    r"""[][\w.:+=^!/*?&<>(){}@%$#-]{40}(?=[\s"',;)]|\Z)""",
    re.ASCII,
)


class Redactor:
    """Removes secrets from texts. `known`: each of them, as it would stand there."""

    def __init__(self, known: Iterable[str]) -> None:
        found = sorted({each.strip() for each in known if len(each.strip()) >= LEAST_CHARACTERS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, found))) if found else None

    def text(self, text: str) -> str:
        """Return a text without them."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        return _NAMED.sub(_without_value, _CURVE_KEYS.sub(REMOVED, _FORMS.sub(REMOVED, text)))

    def tree(self, tree: Any, name: str = "") -> Any:
        """Return plain data without them: of a key that is called as a secret, no text is left."""
        if isinstance(tree, str):
            return REMOVED if is_called_secret(name) and tree else self.text(tree)
        if isinstance(tree, Mapping):
            return {key: self.tree(value, str(key)) for key, value in tree.items()}
        return [self.tree(each, name) for each in tree] if isinstance(tree, list | tuple) else tree


def is_called_secret(name: str) -> bool:
    """Tell whether what has such a name is most likely a secret. A file's name is none."""
    return _NAMES.search(name) is not None and not name.lower().endswith("_file")


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    return match[0] if _HARMLESS.fullmatch(value) else f"{match['name']}{REMOVED}"


# --- what is put together -------------------------------------------------------------------------------------------


class SupportBundle(msgspec.Struct, frozen=True):
    """A job in one file. `data`: a gzipped tar. `missing`: what could not be had, and why."""

    name: str
    data: bytes
    missing: tuple[str, ...]


@click.command("bundle", cls=Command)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file to write; one that is there is not replaced.  [default: midstep-JOB-TIME.tar.gz here]",
)
@operator_options
def command(*, job: str | None, output: Path | None, controller: str | None, token_file: Path | None) -> None:
    """Put together what another person needs to look into a job: status, incidents, journal, policy, versions, logs.

    Tokens, keys, webhooks, the environment and the command line are left out, and removed from texts. Look through the
    logs before you send it on: only you know what a script prints. It is bounded: the latest events of the
    journal, and the end of each log.

    JOB is a job's name, the beginning of one, or a job directory; without it, the latest job is meant. JOB/ROLE is one
    role of a job of several. It may have ended, or have no controller. With --controller it is the job's whole name,
    and no logs are in it: they lie with the job.

    \b
    Examples:
      midstep bundle                        the latest job
      midstep bundle gpt -o gpt.tar.gz
    """
    made = bundle_of(reached(job, controller, token_file))
    path = output or Path(made.name)
    try:
        with open_new_file(path) as file:
            file.write(made.data)
    except FileExistsError as error:
        raise ConfigurationError(f"{path} is there already, and nothing was written. Name another file.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}. Name another file.") from error
    for each in made.missing:
        echo(f"not in it: {each}", err=True)
    echo(f"wrote {path} ({len(made.data):,} bytes). Look through it before you send it on.")


def bundle_of(job: ReachedJob) -> SupportBundle:
    """Put together what can be had of a job. It takes seconds, and does not raise for what is missing."""
    at = datetime.datetime.now(datetime.timezone.utc)
    missing: list[str] = []

    def tried(what: str, get: Callable[[], Any]) -> Any:
        try:
            return get()
        except (MidstepError, OSError) as error:
            missing.append(f"{what}: {error}")
            return None

    found = tried("the status", lambda: look(job))
    note = "" if found is None else found[1]
    policy = tried("the policy", lambda: policy_of(job, is_live=found is not None and not note))
    founding = tried("the start of the job", lambda: founding_of(job.directory)) if isinstance(job, HereJob) else None
    redactor = Redactor(_secrets(job, policy, founding))
    parts: dict[str, bytes] = {}
    if found is not None:
        status = found[0]
        if note and status.policy_changes:
            missing.append("changes of the policy since the start: policy.yaml is as it was then, story.txt has them")
        if isinstance(job, JobElsewhere) and not note:
            incidents = tried("the incidents", lambda: tuple(incidents_after(job, 0))) or status.incidents
            status = msgspec.structs.replace(status, incidents=incidents)
        parts["status.json"] = _json(redactor, msgspec.to_builtins(status))
        parts["incidents.json"] = _json(redactor, report_json(status, status.incidents))
    if policy is not None:
        tree = {**msgspec.to_builtins(policy), "notify": _without_addresses(policy)}
        parts["policy.yaml"] = write_yaml(redactor.tree(tree)).encode()
    story = tried("the journal", lambda: _story(job))
    if story is not None:
        earlier = f"{story.earlier_left_out:,} earlier events are left out\n" if story.earlier_left_out else ""
        parts["story.txt"] = redactor.text(earlier + "\n".join(story.told) + "\n").encode("utf-8", "replace")
    if isinstance(job, HereJob):
        parts.update(_logs(job.directory, redactor, of_ranks=founding is not None))
        if founding is None:
            missing.append("the logs of ranks: what to take out of them is in the journal, and that cannot be read")
    else:
        missing.append("the logs: they lie with the job, on its machines")
    return _packed(job.name, parts, note, [redactor.text(each) for each in missing], at)


def _packed(job: str, parts: dict[str, bytes], note: str, missing: list[str], at: datetime.datetime) -> SupportBundle:
    for name, data in parts.items():
        if len(data) > MOST_OF_A_PART:
            parts[name] = data[-MOST_OF_A_PART:]
            missing.append(f"{name}: its first {len(data) - MOST_OF_A_PART:,} bytes, as it has {len(data):,}")
    made = {"job": job, "made": at.isoformat(), "note": note, "missing": missing, "parts": sorted(parts)}
    about = {**_versions(), **made}
    named = {
        "README.txt": _ABOUT.format(kept=MOST_OF_A_LOG, logs=MOST_LOGS).encode(),
        "about.json": msgspec.json.format(msgspec.json.encode(about), indent=2),
        **parts,
    }
    folder = f"midstep-{_UNSAFE.sub('_', job)}-{at:%Y%m%d-%H%M%S}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for name, data in named.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(at.timestamp()), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return SupportBundle(f"{folder}.tar.gz", packed.getvalue(), tuple(missing))


def _without_addresses(policy: Policy) -> dict[str, Any]:
    """Return which webhooks hear of what, without the places of their files."""
    tree: dict[str, Any] = msgspec.to_builtins(policy.notify)
    kept = ("name", "shape", "events")
    return {**tree, "webhooks": [{key: each[key] for key in kept if key in each} for each in tree["webhooks"]]}


def _story(job: ReachedJob) -> StoryReply:
    if isinstance(job, HereJob):
        return excerpt(read_story(job.directory), None, told)
    return asked(job, StoryRequest(None), StoryReply, STORY_S)


def _json(redactor: Redactor, tree: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(redactor.tree(tree)), indent=1)


def _versions() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "midstep": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "up_s": round(time.clock_gettime(time.CLOCK_BOOTTIME)),
    }


# --- logs -----------------------------------------------------------------------------------------------------------


def _logs(directory: Path, redactor: Redactor, *, of_ranks: bool) -> dict[str, bytes]:
    """Return the ends of a job's logs, by name: first those of controllers and agents, then the newest of ranks."""
    found, room = {}, MOST_OF_LOGS
    files = (path for path in _log_files(directory) if of_ranks or not path.name.startswith(_OF_RANKS))
    for path in sorted(files, key=_order)[:MOST_LOGS]:
        text = end_of_log(path, MOST_OF_A_LOG + _SEAM)
        kept = redactor.text(text).encode("utf-8", "replace")[-min(MOST_OF_A_LOG, room) :]
        if not kept:
            continue
        found[f"logs/{path.name}"] = kept
        room -= len(kept)
        if room <= 0:
            break
    return found


def _log_files(directory: Path) -> Iterator[Path]:
    try:
        yield from (path for path in (directory / "logs").iterdir() if path.suffix in {".log", ".json"})
    except OSError:
        return


def _order(path: Path) -> tuple[bool, float]:
    try:
        return path.name.startswith(_OF_RANKS), -path.lstat().st_mtime
    except OSError:  # gone meanwhile
        return True, 0.0


# --- secrets --------------------------------------------------------------------------------------------------------


def _secrets(job: ReachedJob, policy: Policy | None, founding: Founding | None) -> Iterator[str]:
    """Yield each secret that is known here: of the job, and of the user who makes the bundle."""
    yield from _of_environment(os.environ, chosen=False)
    named = os.environ.get(TOKEN_FILE_VARIABLE)
    if named:
        yield from _in_file(Path(named))
    for webhook in () if policy is None else policy.notify.webhooks:
        yield from _in_file(Path(webhook.url_file))
        if webhook.header_file is not None:
            yield from _in_file(Path(webhook.header_file))
    if not isinstance(job, HereJob):
        return
    if founding is not None:
        yield from _of_environment(founding.job.environment, chosen=True)
        yield founding.rendezvous_key.hex()
    for name in (ROLE_STORE_NAME, ROLES_NAME):  # of a job of roles, which this one may be a part of
        yield from _texts_in(job.directory.parent.parent / name)
    with contextlib.suppress(MidstepError, OSError):
        run_directory = run_directory_of(job.directory)
        files = () if run_directory is None else (run_directory / "keys").rglob("*.json")
        for path in itertools.islice(files, _MOST_KEY_FILES):
            yield from _texts_in(path)


def _of_environment(environment: Mapping[str, str], *, chosen: bool) -> Iterator[str]:
    """Yield the values that are secrets by their names. `chosen`: by the job's user, and so all but short ones."""
    for name, value in environment.items():
        if is_called_secret(name) or (chosen and len(value) >= _SHORT_VARIABLE and not value.isdecimal()):
            yield value


def _in_file(path: Path) -> Iterable[str]:
    """Return what a file of secrets says, and each word of it: a header is a name, a kind and the secret."""
    try:
        text = read_secret(path)
    except MidstepError:
        return ()
    return (text, *(word for word in text.split() if len(word) >= _SHORT_VARIABLE))


def _texts_in(path: Path) -> Iterator[str]:
    """Yield the keys in a file of keys."""
    try:
        with path.open("rb") as file:
            tree = msgspec.json.decode(file.read(_MOST_SECRETS_BYTES))
    except (OSError, msgspec.MsgspecError):
        return
    if isinstance(tree, dict):
        yield from (value for key, value in tree.items() if key == "secret" and isinstance(value, str))
