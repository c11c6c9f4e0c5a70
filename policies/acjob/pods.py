"""Read the pod templates of an AscendJob: how large the job is, and the few values in them that steer recovery."""

from collections.abc import Iterator

from .manifest import Field, Mistakes
from .settings import ACTION_TIME_LIMIT, INT32_MOST, MAX_ACTION_S, MIN_ACTION_S, RECOVER_POLICY_PATH, AcjobValue

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
