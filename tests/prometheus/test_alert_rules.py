"""Each shipped alert by itself, on made-up numbers, with the times that it really waits: it fires, and it clears."""

import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        shutil.which("promtool") is None and "MIDSTEP_REQUIRE_PROMETHEUS" not in os.environ,
        reason="there is no promtool: Debian's package prometheus",
    ),
]

RULES = Path(str(resources.files("midstep.configs") / "prometheus-alerts.yaml"))


class Course(NamedTuple):
    """What an alert sees, each minute, and at which minutes it fires."""

    series: dict[str, str]
    silent: int  # at this minute it does not fire yet
    fires: int
    clear: int  # and not any more


COURSES = {
    "MidstepNoController": Course({"midstep_controller_leader": "1x5 _x8 1x20"}, 10, 13, 16),
    "MidstepJobFailed": Course({"midstep_exit_code": "_x5 3x5 stale"}, 4, 7, 15),
    "MidstepNotTraining": Course(
        {
            'midstep_phase{phase="running"}': "1x5 0x20 1x20",
            'midstep_phase{phase="pausing"}': "0x45",
            'midstep_phase{phase="starting"}': "0x5 1x20 0x20",
            'midstep_goodput_ratio{window="job"}': "0.5x45",
        },
        12,
        18,
        28,
    ),
    "MidstepJournalNotWritable": Course({"midstep_journal_writable": "1x5 0x5 1x20"}, 6, 8, 12),
    "MidstepBudgetNearlySpent": Course(
        {
            'midstep_budget_used{rung="recover",scope="job"}': "7x5 8x5 2x20",
            'midstep_budget_limit{rung="recover",scope="job"}': "10x30",
            'midstep_budget_used{rung="stop",scope="job"}': "0x30",  # without a limit
            'midstep_budget_limit{rung="stop",scope="job"}': "0x30",
        },
        4,
        8,
        15,
    ),
    "MidstepNoSpare": Course({'midstep_nodes{state="spare"}': "1x5 0x5 1x20"}, 6, 8, 14),
    "MidstepUnguarded": Course(
        {'midstep_time_seconds_total{category="unguarded"}': "0x5 45x40"},
        5,
        8,
        25,
    ),
    "MidstepManyIncidents": Course(
        {
            'midstep_recovery_seconds_count{part="whole"}': "0x5 1+1x3 4x100",
            'midstep_recovery_seconds_count{part="quiesce"}': "0+9x110",  # of the same ones
        },
        5,
        12,
        80,
    ),
    "MidstepGoodputLow": Course(
        {
            'midstep_goodput_ratio{window="hour"}': "0.97x5 0.85x20 0.95x20",
            'midstep_goodput_ratio{window="job"}': "0.2x45",
        },
        12,
        18,
        28,
    ),
}  # fmt: skip


def alerts() -> set[str]:
    """The names of the alerts that are shipped."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"] for rule in group["rules"]}


def checked(name: str, course: Course, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Have promtool say whether an alert fires when it should, and only then."""
    rule = next(each for each in yaml.safe_load(RULES.read_text())["groups"][0]["rules"] if each["alert"] == name)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    series = [{"series": each, "values": values} for each, values in course.series.items()]
    expected = [(course.silent, 0), (course.fires, 1), (course.clear, 0)]
    exprs = [
        {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for minute, value in expected
    ]
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": exprs}],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    command = ["promtool", "test", "rules", "test.yaml"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60.0, check=False)


@pytest.mark.parametrize("name", sorted(COURSES))
def test_an_alert_fires_when_it_should_and_clears(name: str, tmp_path: Path) -> None:
    done = checked(name, COURSES[name], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_that_never_calls_midstep_is_no_reason_for_an_alert(tmp_path: Path) -> None:
    """It is starting for as long as it lives. While it waits for nodes, that is one."""
    phases = {"running": "0x60", "starting": "1x20 0x20 1x20", "waiting": "0x20 1x20 0x20"}
    series = {f'midstep_phase{{phase="{phase}"}}': values for phase, values in phases.items()}
    done = checked("MidstepNotTraining", Course(series, silent=19, fires=35, clear=50), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_that_is_shipped_is_tested() -> None:
    assert alerts() == set(COURSES)


def test_the_rules_are_what_prometheus_takes() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(COURSES)} rules found" in done.stdout
