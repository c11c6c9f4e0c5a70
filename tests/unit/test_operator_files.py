"""The alerts and the board that are shipped ask for numbers that there are, by labels that they have."""

import json
import re
from collections.abc import Iterator
from importlib import resources

import pytest
import yaml

from midstep.controller.metrics import METRICS, MetricKind
from midstep.controller.recovery.state import Phase
from midstep.controller.recovery.world import NodeState
from midstep.protocol.time_spent import TimeCategory

CONFIGS = resources.files("midstep.configs")
# What Prometheus adds to every series, and to those of a histogram.
OF_THE_TARGET = {"instance", "job"}
OF_A_BUCKET = "le"
OF_A_HISTOGRAM = re.compile(r"_(bucket|count|sum)$")
VALUES = {
    "phase": {str(each) for each in Phase},
    "state": {str(each) for each in NodeState},
    "category": {str(each) for each in TimeCategory},
    "window": {"job", "hour", "day", "month"},
}
SELECTOR = re.compile(r"(midstep_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(?:=~|!=|=)"([^"]*)"')
GROUPED = re.compile(r"(?:by|without) \(([^)]*)\)")
NAMED = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def alerts() -> list[dict[str, object]]:
    """The rules that are shipped."""
    groups = yaml.safe_load((CONFIGS / "prometheus-alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str, str]]:
    """Where it stands, what it asks for, and the texts beside it that name labels."""
    for rule in alerts():
        yield str(rule["alert"]), str(rule["expr"]), str(rule["annotations"])
    for panel in json.loads((CONFIGS / "grafana-board.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


@pytest.mark.parametrize(("where", "expression", "text"), [*expressions()], ids=lambda each: each[:30])
def test_what_is_asked_for_is_there(where: str, expression: str, text: str) -> None:
    """Names, labels, and the values of labels that are known beforehand; a counter is asked for its growth."""
    asked = SELECTOR.findall(expression)
    assert asked, where
    labels = set(OF_THE_TARGET)
    for name, matchers in asked:
        metric = METRICS[OF_A_HISTOGRAM.sub("", name)]
        assert bool(OF_A_HISTOGRAM.search(name)) == (metric.kind is MetricKind.HISTOGRAM)
        known = {*metric.labels, *OF_THE_TARGET, *([OF_A_BUCKET] if name.endswith("_bucket") else [])}
        labels |= known
        for label, value in MATCHER.findall(matchers):
            assert label in known, (where, label)
            if label in VALUES and metric.name != "midstep_ranks":
                assert {*value.split("|")} <= VALUES[label], (where, value)
        if metric.kind is not MetricKind.GAUGE:
            assert re.search(rf"(rate|increase)\({name}", expression), where
    for named in (*GROUPED.findall(expression), *NAMED.findall(text)):
        assert {each.strip() for each in named.split(",")} <= labels, (where, named)


def test_every_alert_says_what_to_do() -> None:
    """With a name of its own, how urgent it is, and a sentence that is no name."""
    names = [str(rule["alert"]) for rule in alerts()]
    assert len({*names}) == len(names) > 5
    for rule in alerts():
        assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})
        notes = rule["annotations"]
        assert isinstance(notes, dict)
        assert {*notes} == {"summary", "description"}
