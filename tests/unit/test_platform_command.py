"""`midstep platform`, `midstep submit --job-dir`: what is refused before anything has run, and in which words."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from midstep.cli.main import main
from midstep.controller.journal.reading import read_founding
from midstep.platforms import base
from midstep.platforms.base import GROUP, platform_factory
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.token import new_token, token_text

Bring = Callable[[str], None]


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bring:
    """Install a package with one platform, `theirs`, at an object reference."""

    def installed(reference: str) -> None:
        metadata = tmp_path / "theirs-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\ntheirs = {reference}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return installed


def midstep(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env={"MIDSTEP_TOKEN": None, **environment})


def test_a_platform_that_is_not_there_is_refused_with_those_that_are(bring: Bring) -> None:
    bring("midstep.examples.agents_here:AgentsHere")
    assert "theirs" in base.names()
    with pytest.raises(ConfigurationError, match=r"no platform 'elsewhere'.*theirs.*group midstep\.platforms"):
        platform_factory("elsewhere")


def test_a_platform_of_a_package_is_found_by_its_entry_point(bring: Bring) -> None:
    from midstep.examples.agents_here import AgentsHere

    bring("midstep.examples.agents_here:AgentsHere")
    assert platform_factory("theirs") is AgentsHere


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("not_there:Platform", "cannot be imported"),
        ("midstep.examples.agents_here:Nothing", "cannot be imported"),
        ("midstep.examples.agents_here:LOOK_S", "nothing that can be called"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_named(bring: Bring, reference: str, words: str) -> None:
    bring(reference)
    with pytest.raises(ConfigurationError, match=rf"theirs \({reference}\).*{words}"):
        platform_factory("theirs")


@pytest.mark.parametrize(
    ("option", "words"), [("most", "'most' is not KEY=VALUE"), ("least=1", "has no option least; it has: most")]
)
def test_options_that_are_none_are_refused(bring: Bring, option: str, words: str) -> None:
    bring("midstep.examples.agents_here:AgentsHere")
    token = token_text(new_token())
    arguments = ("--job", "demo", "--controller", "127.0.0.1:1", "-o", option)
    found = midstep("platform", "theirs", *arguments, MIDSTEP_TOKEN=token)
    assert found.exit_code == 1
    assert words in " ".join(found.output.split())


def test_a_platform_needs_the_whole_token() -> None:
    arguments = ("platform", "theirs", "--job", "demo", "--controller", "127.0.0.1:1")
    assert "job's token" in midstep(*arguments).output
    joining = token_text(new_token().for_joining("demo"))
    found = midstep(*arguments, MIDSTEP_TOKEN=joining)
    assert "--join-only" in found.output


def test_a_job_in_a_directory_says_which_platform_makes_its_nodes(tmp_path: Path) -> None:
    script, place = tmp_path / "train.py", tmp_path / "demo"
    script.write_text("")
    submit = ("submit", "--job", "demo", "--job-dir", str(place), "--platform", "theirs", "--nnodes", "2", str(script))
    found = midstep(*submit)
    assert found.output == f"demo: submitted to {place}\n"
    founding = read_founding(place)
    assert (founding.platform, founding.job.nodes, founding.can_create_nodes) == ("theirs", 2, False)
    again = midstep(*submit)
    assert again.exit_code == 1
    assert "holds a job already" in again.output


def test_a_controller_of_a_directory_needs_the_token_or_the_run_directory(tmp_path: Path) -> None:
    found = midstep("controller", "--job-dir", str(tmp_path))
    assert found.exit_code == 2
    assert "with the job's token --job-dir alone" in " ".join(found.output.split())


@pytest.mark.parametrize("platform", ["kubernetes", "ray"])
def test_an_engine_brings_its_own_machines(tmp_path: Path, platform: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    found = midstep("run", "--platform", platform, "--image", "i", "--rdzv-endpoint", "m0", str(script))
    assert found.exit_code == 1
    assert f"--platform {platform} brings its own" in " ".join(found.output.split())
