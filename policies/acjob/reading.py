"""Read what an AscendJob says about recovery, and refuse what is wrong.

Strict where MindCluster is lenient: it takes a value that it does not know for "off", so a typing error switches
recovery off without a word. Here it is an error with the key, the line and what is allowed.
"""

import difflib
from collections.abc import Iterator, Sequence

from ...protocol.errors import PolicyError
from ..yaml_text import refuse_lines
from . import pods
from .manifest import Field, Mistakes, documents, meant
from .settings import API_VERSION, INT32_MOST, KIND, MAX_WAIT_S, MIN_WAIT_S, AcjobValue, AscendJob, Strategy

_CHOICES: dict[str, tuple[str, ...]] = {
    "fault-scheduling": ("grace", "force", "off"),
    "pod-rescheduling": ("on", "off"),
    "process-recover-enable": ("on", "pause", "off"),
    "subHealthyStrategy": ("ignore", "graceExit", "forceExit", "hotSwitch"),
}
_RETRY_TIMES, _STRATEGY, _WAIT = ("fault-retry-times", "recover-strategy", "wait-reschedule-timeout")
_HOMES = {"labels": (*_CHOICES, _RETRY_TIMES), "annotations": (_STRATEGY, _WAIT)}


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
    nodes, ranks_per_node = pods.size(document)
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
        recover_policy_path=pods.recover_policy_path(document, mistakes),
        grace_period=pods.grace_period(document, mistakes),
        action_limit=pods.action_limit(document, mistakes),
        others=tuple(pods.without_effect(document)),
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
