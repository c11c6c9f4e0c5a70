"""The forecast that is kept with a job is shown beside where its time went: in status, report, data and page."""

import json
from pathlib import Path

import pytest

from midstep.cli.kept_forecast import FORECAST_NAME, keep_forecast, kept_forecast
from midstep.cli.page.sections import Looked, SectionWriter
from midstep.cli.status import as_data
from midstep.cli.views.incident_data import report_json
from midstep.cli.views.report_text import job_view
from midstep.cli.views.status_view import status_view
from midstep.controller.time_account import time_spent
from midstep.launch.reached_job import HereJob, JobElsewhere
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.identities import Role
from midstep.protocol.time_spent import TimeCategory
from midstep.protocol.token import FullToken, new_token

from .report.test_report_text import plain
from .test_page_sentence import BEGAN_S, status

MONTH_S = 30 * 24 * 3600.0
FORECAST = time_spent(
    0.0, MONTH_S, {TimeCategory.TRAINING: 0.986 * MONTH_S, TimeCategory.DETECT: 0.014 * MONTH_S}, trained=True
)
SO_FAR = time_spent(BEGAN_S, BEGAN_S + 1000.0, {TimeCategory.TRAINING: 989.0, TimeCategory.REJOIN: 11.0}, trained=True)


def test_what_was_kept_stands_beside_the_truth_everywhere(tmp_path: Path) -> None:
    job = HereJob(tmp_path)
    assert kept_forecast(job) is None
    keep_forecast(job, FORECAST)
    forecast = kept_forecast(job)
    assert forecast == FORECAST
    told = status(time=SO_FAR)
    assert "goodput forecast 98.6 %, so far 98.9 % of" in plain(status_view(told, forecast))
    assert "forecast" not in plain(status_view(told))
    lines = plain(job_view(told, (), width=100, forecast=forecast)).splitlines()
    (training,) = (line for line in lines if line.startswith("training "))
    assert "98.9 %" in training
    assert training.endswith("98.6 %")
    assert any("(ETTR)" in line and "98.9 % (forecast 98.6 %)" in line for line in lines), lines
    assert report_json(told, (), forecast)["forecast"]["goodput"] == pytest.approx(0.986)
    assert json.loads(as_data(told, "", forecast))["forecast"]["goodput"] == pytest.approx(0.986)
    part = json.loads(SectionWriter().write(Looked(told, forecast=forecast))["time"])
    assert (part["goodput"], part["forecast"]) == (pytest.approx(0.989), pytest.approx(0.986))


@pytest.mark.parametrize("text", [b"", b"{", b'{"goodput": 1}', b"\xff" * 100_000])
def test_what_cannot_be_read_is_no_forecast(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FORECAST_NAME).write_bytes(text)
    assert kept_forecast(HereJob(tmp_path)) is None


def test_a_forecast_is_kept_where_the_job_is_and_a_place_that_takes_none_is_named(tmp_path: Path) -> None:
    token = new_token()
    assert isinstance(token, FullToken)
    with pytest.raises(ConfigurationError, match="Simulate it where its job directory is"):
        keep_forecast(JobElsewhere(("m0:29400",), token.for_role("gpt", Role.VIEWER)), FORECAST)
    with pytest.raises(ConfigurationError, match="the forecast cannot be kept"):
        keep_forecast(HereJob(tmp_path / "gone"), FORECAST)
