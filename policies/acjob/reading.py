"""Read what an AscendJob (acjob) says about recovery, each value with its line, and refuse what is wrong.

Strict where MindCluster is lenient: MindCluster takes an unknown value for "off", so a typing error switches recovery
off without a word. Here it is an error that names the key, the line and what is allowed.
"""

import difflib
from collections.abc import Iterator, Sequence

import msgspec

from ...protocol.compat import StrEnum
from ...protocol.errors import PolicyError
from ...protocol.types import Rung
from ..yaml_text import refuse_lines
from .manifest import Field, Mistakes, documents, meant

API_VERSION = "mindxdl.gitee.com/v1"
KIND = "AscendJob"
MIN_WAIT_S, MAX_WAIT_S = 30, 270  # of wait-reschedule-timeout
MIN_ACTION_S, MAX_ACTION_S = 30, 1800  # of TTP_NORMAL_ACTION_TIME_LIMIT
RECOVER_POLICY_PATH = "huawei.com/recover_policy_path"
ACTION_TIME_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
INT32_MOST = 2**31 - 1
PODS_RESTARTED = (Rung.RECOVER, Rung.RESCHEDULE_POD, Rung.RESCHEDULE_JOB)  # rungs for which MindCluster restarts pods
WAITS_FOR_PROCESSES = frozenset({"graceExit", "hotSwitch"})  # of subHealthyStrategy: those that do not kill at once
_CHOICES: dict[str, tuple[str, ...]] = {
    "fault-scheduling": ("grace", "force", "off"),
    "pod-rescheduling": ("on", "off"),
    "process-recover-enable": ("on", "pause", "off"),
    "subHealthyStrategy": ("ignore", "graceExit", "forceExit", "hotSwitch"),
}
_RETRY_TIMES, _STRATEGY, _WAIT = ("fault-retry-times", "recover-strategy", "wait-reschedule-timeout")
_HOMES = {"labels": (*_CHOICES, _RETRY_TIMES), "annotations": (_STRATEGY, _WAIT)}
# Environment variables that have a say in MindCluster's recovery, and none in midstep's.
_VARIABLES = frozenset(
    {
        "ELASTIC_PROCESS_RECOVER_ENABLE",
        "ENABLE_RESTART_FAULT_PROCESS",
        "HIGH_AVAILABILITY",
        "MINDIO_FOR_MINDSPORE",
        "MINDIO_WAIT_MINDX_TIME",
        "MS_ENABLE_TFT",
        "PROCESS_RECOVER",
        "RESTART_FAULT_PROCESS_TYPE",
        "TASKD_PROCESS_ENABLE",
        "TASKD_REPORT_FAULT_TIMEOUT",
        "TTP_PORT",
        "TTP_RETRY_TIMES",
    }
)


class Strategy(StrEnum):
    """The words of `recover-strategy`, in MindCluster's order, the first tried first."""

    RETRY = "retry"
    RECOVER_IN_PLACE = "recover-in-place"
    RECOVER = "recover"
    ELASTIC_TRAINING = "elastic-training"
    DUMP = "dump"
    EXIT = "exit"


class AcjobValue(msgspec.Struct, frozen=True):
    """One value of the document: its key's path, the line it stands on, and itself."""

    path: str
    line: int
    value: str

    @property
    def number(self) -> int:
        """The value of a setting that was checked to be a whole number."""
        return int(self.value)

    def __str__(self) -> str:
        """Return it as a comment names it."""
        return f"line {self.line}, {self.path}: {self.value}"


class AscendJob(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one document; None where it does not say.

    `others` are keys of MindCluster's recovery that steer nothing in midstep, `typos` keys that are nearly
    MindCluster's. `nodes` are the pods that ask for NPUs, `ranks_per_node` what each asks for; 0: not said.
    """

    name: str
    line: int
    fault_scheduling: AcjobValue | None = None
    fault_retry_times: AcjobValue | None = None
    pod_rescheduling: AcjobValue | None = None
    process_recover: AcjobValue | None = None
    sub_healthy: AcjobValue | None = None
    recover_strategy: AcjobValue | None = None
    strategies: frozenset[Strategy] = frozenset()
    wait_reschedule: AcjobValue | None = None
    backoff_limit: AcjobValue | None = None
    recover_policy_path: AcjobValue | None = None
    grace_period: AcjobValue | None = None
    action_limit: AcjobValue | None = None
    others: tuple[AcjobValue, ...] = ()
    typos: tuple[str, ...] = ()
    nodes: int = 0
    ranks_per_node: int = 0

    @property
    def retries(self) -> AcjobValue | None:
        """The setting that limits restarts of the world: the lower of the two, as in MindCluster; None: no limit."""
        limits = [each for each in (self.fault_retry_times, self.backoff_limit) if each is not None and each.number > 0]
        return min(limits, key=lambda each: each.number, default=None)

    @property
    def left_alone(self) -> bool:
        """True if MindCluster would reschedule nothing of this job."""
        return self.fault_scheduling is None or self.fault_scheduling.value == "off"

    @property
    def paused(self) -> bool:
        """True if process-level recovery is set up, and switched off for now."""
        return self.process_recover is not None and self.process_recover.value != "on"

    @property
    def elastic(self) -> bool:
        """True if the job asks to continue with fewer nodes."""
        return not self.left_alone and not self.paused and Strategy.ELASTIC_TRAINING in self.strategies

    @property
    def stop_grace(self) -> AcjobValue | None:
        """The time that a stopped process may take, where that has a meaning."""
        graceful = self.fault_scheduling is not None and self.fault_scheduling.value == "grace"
        return self.grace_period if graceful else None


def read_acjob(text: str, source: str, name: str | None = None) -> AscendJob:
    """Return what the AscendJob in `text` says; `name` chooses one of several, `source` names the file in errors.

    Raises PolicyError: every mistake on a line of its own, with file, line, key, what was found and what is allowed.
    """
    document = _chosen(documents(text, source), source, name)
    mistakes = Mistakes()
    job = _read(document, mistakes)
    refuse_lines(mistakes.lines, source)
    return job


def _chosen(found: Sequence[Field], source: str, name: str | None) -> Field:
    """Return the AscendJob that is meant, or say what the file has instead."""
    jobs = [document for document in found if _text(document, "kind") == KIND]
    if not jobs:
        kinds = ", ".join(_named(_text(document, "kind")) or "a document without kind" for document in found)
        raise PolicyError(f"{source}: kind: found {kinds or 'nothing'}; allowed: a document of kind {KIND}")
    names = [_named(_text(job, "metadata", "name")) or f"the one on line {job.line}" for job in jobs]
    if name is None and len(jobs) > 1:
        raise PolicyError(f"{source}: {len(jobs)} documents of kind {KIND}: {', '.join(names)}; choose one with --job")
    matching = [job for job in jobs if name in (None, _text(job, "metadata", "name"))]
    if len(matching) != 1:
        found_so = "no" if not matching else str(len(matching))
        raise PolicyError(f"{source}: {found_so} {KIND} named {name!r}; it has: {', '.join(names)}")
    return matching[0]


def _named(text: str | None) -> str | None:
    """Return a text so that an error which names it stays on its line."""
    return text if text is None or text.isprintable() else repr(text)


def _read(document: Field, mistakes: Mistakes) -> AscendJob:
    for place in (document, *(document.get(*keys) for keys in (("metadata",), ("spec",), ("spec", "runPolicy")))):
        mistakes.mapping(place)
    _check_version(document, mistakes)
    _check_homes(document, mistakes)
    chosen = {
        key: _setting(document, "labels", key, mistakes.choice(_at(document, "labels", key), _CHOICES[key]))
        for key in _CHOICES
    }
    retries = mistakes.quoted_number(_at(document, "labels", _RETRY_TIMES), 0, INT32_MOST)
    wait = mistakes.quoted_number(_at(document, "annotations", _WAIT), MIN_WAIT_S, MAX_WAIT_S)
    strategy = mistakes.quoted(_at(document, "annotations", _STRATEGY))
    backoff = document.get("spec", "runPolicy", "backoffLimit")
    limit = mistakes.number(backoff, -INT32_MOST - 1, INT32_MOST)
    nodes, ranks_per_node = size(document)
    return AscendJob(
        name=_text(document, "metadata", "name") or "without a name",
        line=document.line,
        fault_scheduling=chosen["fault-scheduling"],
        fault_retry_times=_setting(document, "labels", _RETRY_TIMES, retries),
        pod_rescheduling=chosen["pod-rescheduling"],
        process_recover=chosen["process-recover-enable"],
        sub_healthy=chosen["subHealthyStrategy"],
        recover_strategy=_setting(document, "annotations", _STRATEGY, strategy),
        strategies=_strategies(_at(document, "annotations", _STRATEGY), strategy, mistakes),
        wait_reschedule=_setting(document, "annotations", _WAIT, wait),
        backoff_limit=None
        if backoff is None or limit is None
        else AcjobValue("backoffLimit", backoff.line, str(limit)),
        recover_policy_path=recover_policy_path(document, mistakes),
        grace_period=grace_period(document, mistakes),
        action_limit=action_limit(document, mistakes),
        others=tuple(without_effect(document)),
        typos=tuple(_typos(document)),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
    )


def _at(document: Field, home: str, key: str) -> Field | None:
    return document.get("metadata", home, key)


def _setting(document: Field, home: str, key: str, value: str | None) -> AcjobValue | None:
    field = _at(document, home, key)
    return None if field is None or value is None else AcjobValue(key, field.line, value)


def _text(field: Field, *keys: str) -> str | None:
    found = field.get(*keys)
    return None if found is None else found.text


def _check_version(document: Field, mistakes: Mistakes) -> None:
    version = document.get("apiVersion")
    if version is None:
        mistakes.say(document, f"apiVersion is missing; allowed: {API_VERSION}")
    elif version.text != API_VERSION:
        mistakes.refuse(version, API_VERSION)


def _check_homes(document: Field, mistakes: Mistakes) -> None:
    """Check for labels among the annotations, and the other way round, which MindCluster would not see."""
    for home, other in (("labels", "annotations"), ("annotations", "labels")):
        place = document.get("metadata", home)
        mistakes.mapping(place)
        for key in _HOMES[other]:
            field = _at(document, home, key)
            if field is not None:
                mistakes.say(field, f"MindCluster does not look for it here; allowed: under metadata.{other}")


def _strategies(field: Field | None, value: str | None, mistakes: Mistakes) -> frozenset[Strategy]:
    if field is None or value is None:
        return frozenset()
    words = [word.strip() for word in value.split(",")]
    known = [strategy.value for strategy in Strategy]
    wrong = [word for word in words if word not in known]
    if wrong:
        mistakes.refuse(field, f"{', '.join(known)}, with commas between them{meant(wrong[0], known)}")
        return frozenset()
    return frozenset(Strategy(word) for word in words)


def _typos(document: Field) -> Iterator[str]:
    """Warn about keys that are nearly MindCluster's. They are no error, since keys are free in Kubernetes."""
    for home, keys in _HOMES.items():
        place = document.get("metadata", home)
        for field in place.fields() if place is not None else ():
            name = field.path.rsplit(".", 1)[-1]
            close = [] if name in keys else difflib.get_close_matches(name, keys, n=1, cutoff=0.8)
            if close:
                yield f"line {field.line}, {name}: not a key of MindCluster's; did you mean {close[0]}?"


def recover_policy_path(document: Field, mistakes: Mistakes) -> AcjobValue | None:
    """Return the setting that keeps a job from being rescheduled as a whole, wherever it stands."""
    templates = [document, *_templates(document)]
    whole = document.get("spec", "template")
    for each in [*templates, whole] if whole is not None else templates:
        for kind in ("labels", "annotations"):
            field = each.get("metadata", kind, RECOVER_POLICY_PATH)
            value = mistakes.choice(field, ("pod",))
            if field is not None and value is not None:
                return AcjobValue(RECOVER_POLICY_PATH, field.line, value)
    return None


def grace_period(document: Field, mistakes: Mistakes) -> AcjobValue | None:
    """Return the longest terminationGracePeriodSeconds."""
    key = "terminationGracePeriodSeconds"
    found = [
        (each.get("spec", key), mistakes.number(each.get("spec", key), 0, INT32_MOST)) for each in _templates(document)
    ]
    settings = [
        AcjobValue(key, field.line, str(value)) for field, value in found if field is not None and value is not None
    ]
    return max(settings, key=lambda each: each.number, default=None)


def action_limit(document: Field, mistakes: Mistakes) -> AcjobValue | None:
    """Return the longest time that MindIO allows to one action."""
    fields = [value for name, value in _variables(document) if name == ACTION_TIME_LIMIT]
    found = [(field, mistakes.quoted_number(field, MIN_ACTION_S, MAX_ACTION_S)) for field in fields]
    settings = [AcjobValue(ACTION_TIME_LIMIT, field.line, value) for field, value in found if value is not None]
    return max(settings, key=lambda each: each.number, default=None)


def without_effect(document: Field) -> Iterator[AcjobValue]:
    """Yield, once each, what the templates say about recovery that nothing in midstep reads."""
    seen: set[str] = set()
    restarts = [
        ("restartPolicy", field) for role in _roles(document) if (field := role.get("restartPolicy")) is not None
    ]
    for name, field in [*restarts, *_variables(document)]:
        usual = field.text == "Never" if name == "restartPolicy" else name not in _VARIABLES
        if not usual and name not in seen:
            seen.add(name)
            yield AcjobValue(name, field.line, field.shown if field.text is None else field.text)


def size(document: Field) -> tuple[int, int]:
    """Return how many pods ask for NPUs, and for how many each; zeros where the document does not say."""
    nodes, ranks = 0, 0
    for role in _roles(document):
        asked = _npus(role)
        replicas = role.get("replicas")
        if asked:
            nodes += 1 if replicas is None else max(replicas.number or 0, 0)
            ranks = max(ranks, asked)
    return nodes, ranks


def _roles(document: Field) -> Iterator[Field]:
    replicas = document.get("spec", "replicaSpecs")
    yield from replicas.fields() if replicas is not None else ()


def _templates(document: Field) -> Iterator[Field]:
    for role in _roles(document):
        template = role.get("template")
        if template is not None:
            yield template


def _containers(template: Field) -> Iterator[Field]:
    containers = template.get("spec", "containers")
    yield from containers.fields() if containers is not None else ()


def _variables(document: Field) -> Iterator[tuple[str, Field]]:
    """Yield names and values of the environment of all containers."""
    for template in _templates(document):
        for container in _containers(template):
            variables = container.get("env")
            for variable in variables.fields() if variables is not None else ():
                name, value = variable.get("name"), variable.get("value")
                if name is not None and name.text is not None and value is not None:
                    yield name.text, value


def _npus(role: Field) -> int:
    template = role.get("template")
    asked = 0
    for container in _containers(template) if template is not None else ():
        resources = container.get("resources", "requests") or container.get("resources", "limits")
        for resource in resources.fields() if resources is not None else ():
            if "huawei.com/" in resource.path:
                text = resource.text or ""
                number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else resource.number
                asked += max(number or 0, 0)
    return asked
