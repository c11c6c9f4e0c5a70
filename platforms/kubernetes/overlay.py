"""Lays a part of a manifest that a user wrote over midstep's own, as a strategic merge patch does."""

from typing import Any

# By which key the items of a list are the same one. Other lists are appended to.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
}
_REPLACED = {"command", "args"}


def laid_over(base: Any, over: Any, field: str = "") -> Any:
    """Return `base` with all that `over` says: fields of objects one by one, items of lists by their names.

    None takes a field away.
    """
    if isinstance(base, dict) and isinstance(over, dict):
        merged = dict(base)
        for key, value in over.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = laid_over(base[key], value, key) if key in base else value
        return merged
    if isinstance(base, list) and isinstance(over, list) and field not in _REPLACED:
        return _items(base, over, _KEYS.get(field))
    return over


def _items(base: list[Any], over: list[Any], key: str | None) -> list[Any]:
    if key is None:
        return [*base, *(item for item in over if item not in base)]
    merged = {item[key]: item for item in base}
    for item in over:
        name = item.get(key)
        merged[name] = laid_over(merged[name], item) if name in merged else item
    return list(merged.values())
