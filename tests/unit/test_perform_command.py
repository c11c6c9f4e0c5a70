"""`midstep perform` refuses what no job could do before it asks one."""

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.cli.perform import _arguments, _ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "one"], "'one' is no rank: write numbers and ranges, as in 0-3,7"),
        (["--ranks", "0-"], "'0-' is no rank"),
        (["--ranks", "3-1"], "'3-1': the lower rank comes first"),
        (["--ranks", "0-9999999"], "at most 262,144 in all"),
        (["--set", "ranks"], "'ranks' is no argument: write KEY=VALUE"),
        (["--set", "=1"], "'=1' is no argument"),
        ([word for number in range(33) for word in ("--set", f"a{number}=1")], "at most 32 arguments"),
        (["--within", "3h"], "'3h': at most 2h"),
        (["--within", "soon"], "'soon' is no duration"),
    ],
)
def test_what_no_job_could_do_is_refused_with_what_to_write(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["perform", "stress_test", "--why", "a test", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_ranks_are_numbers_and_ranges_and_none_is_all() -> None:
    assert _ranks(None, None, "7,0-3,2") == (0, 1, 2, 3, 7)  # type: ignore[arg-type]
    assert _ranks(None, None, None) is None  # type: ignore[arg-type]


def test_a_value_may_have_an_equals_sign() -> None:
    assert _arguments(None, None, ("a=b=c", "d=")) == {"a": "b=c", "d": ""}  # type: ignore[arg-type]
