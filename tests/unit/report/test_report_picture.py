"""The picture: drawn in every format it offers, and refused in words where it cannot be."""

import sys
from pathlib import Path

import msgspec
import pytest

from midstep.cli.views.pictures import INCIDENTS, draw, panels, write_picture
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.incidents import JobStatus

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("ending", sorted(MAGIC))
def test_picture_is_written_in_the_format_of_its_name(status: JobStatus, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"report{ending}"
    write_picture(status, status.incidents[:1], path)
    assert path.read_bytes().startswith(MAGIC[ending])


def test_an_attempt_that_waiting_dwarfs_is_drawn_enlarged(status: JobStatus) -> None:
    assert len(panels(status.incidents[0], status.at_s)) == 1
    whole, enlarged = panels(status.incidents[2], status.at_s)
    assert enlarged.length_s < whole.length_s / 4
    assert enlarged.title == "Incident 3, enlarged: its last 270 ms"


def test_a_long_history_is_cut_to_the_latest(status: JobStatus) -> None:
    pytest.importorskip("matplotlib")
    many = tuple(msgspec.structs.replace(status.incidents[0], number=number) for number in range(1, 41))
    figure = draw(status, many)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert len(titles) == INCIDENTS
    assert titles[-1].startswith("Incident 40:")


def test_open_incidents_can_be_drawn(running: JobStatus) -> None:
    pytest.importorskip("matplotlib")
    assert len(draw(running, running.incidents).axes) == 1


def test_missing_matplotlib_is_told_with_the_command_that_helps(
    status: JobStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r'pip install "midstep\[plot\]"'):
        write_picture(status, status.incidents, tmp_path / "report.png")


@pytest.mark.parametrize("name", ["report.bmp", "report"])
def test_unknown_format_is_refused_with_the_known_ones(status: JobStatus, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"\.png, \.svg, \.pdf"):
        write_picture(status, status.incidents, tmp_path / name)


def test_nothing_to_draw_and_nowhere_to_write_are_told(status: JobStatus, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing to draw"):
        write_picture(status, (), tmp_path / "report.png")
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_picture(status, status.incidents[:1], tmp_path / "absent" / "report.png")
