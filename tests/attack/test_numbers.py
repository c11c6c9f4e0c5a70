"""Numbers on the command line: whatever is typed, every command refuses it or gets one that a message can carry."""

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from midstep.cli.main import COMMANDS, main
from midstep.cli.numbers import NodesAsked
from midstep.launch.job import Start, create_job
from midstep.launch.rank_environment import load_schedule
from midstep.protocol.bounds import LARGEST_NUMBER
from midstep.protocol.discovery import MOST_ENDPOINTS, each_address
from midstep.protocol.errors import ConfigurationError
from midstep.protocol.faults import ArmedFault
from midstep.protocol.token import new_token, token_text

from .attack import attack

TWENTY_DIGITS = "9" * 20
NUMBERS_AS_TEXT = st.one_of(st.integers(), st.integers(-(10**30), 10**30), st.floats()).map(str) | st.text(
    "0123456789:.-+e_mhd\u00b2\u0663", max_size=6000
)


def commands() -> Iterator[tuple[str, click.Command]]:
    """All commands, also those within others."""
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())


def taken(command: click.Command, parameter: click.Parameter, text: str) -> object:
    """What an option makes of a text. Raises UsageError when it refuses it."""
    value: object = (text,) if parameter.multiple else text
    return parameter.process_value(click.Context(command), value)


def is_number(value: object) -> bool:
    """Whether an option has taken a number for one."""
    return isinstance(value, int | float | NodesAsked) and not isinstance(value, bool)


def numbers() -> list[tuple[str, click.Command, click.Parameter]]:
    """All options that take numbers: of any usual one they make a number."""
    found = []
    for name, command in commands():
        for parameter in command.params:
            if getattr(parameter, "is_flag", False) or isinstance(parameter, click.Argument):
                continue
            for usual in ("1", "100", "0.5", "1h"):
                try:
                    value = taken(command, parameter, usual)
                except click.UsageError:
                    continue
                if is_number(value):
                    found.append((f"{name} {parameter.name}", command, parameter))
                    break
    return found


NUMBERS = numbers()


def test_the_options_that_take_numbers_are_found() -> None:
    names = {name for name, _, _ in NUMBERS}
    assert {"run nodes", "run ranks_per_node", "inject rank", "inject step", "inject device", "report number"} <= names
    assert {"simulate mtbf", "agent limit_s", "policy explain nodes", "token lasts_s"} <= names


@attack(
    "a number of twenty digits in any option of any command that takes a number",
    holds="the command is refused before it does anything",
    reads="Invalid value for '--rank': ... is not in the range 0<=x<=16777216",
)
@pytest.mark.parametrize(("command", "parameter"), [row[1:] for row in NUMBERS], ids=[row[0] for row in NUMBERS])
def test_a_number_of_twenty_digits_is_refused_by_every_option(
    command: click.Command, parameter: click.Parameter
) -> None:
    with pytest.raises(click.UsageError):
        taken(command, parameter, TWENTY_DIGITS)


@pytest.mark.parametrize(("command", "parameter"), [row[1:] for row in NUMBERS], ids=[row[0] for row in NUMBERS])
@given(
    text=st.one_of(st.integers(), st.integers(-(10**30), 10**30), st.floats(width=64)).map(str)
    | st.text("0123456789:.-+e_²٣", max_size=6000)
)
def test_what_an_option_takes_for_a_number_a_message_can_carry(
    command: click.Command, parameter: click.Parameter, text: str
) -> None:
    try:
        value = taken(command, parameter, text)
    except click.UsageError:
        return
    assert msgspec.json.encode(value)
    if is_number(value) and not isinstance(value, NodesAsked):
        assert -LARGEST_NUMBER <= value <= LARGEST_NUMBER  # type: ignore[operator]


@attack(
    "`--nnodes` of twenty digits",
    holds="it is refused at once, and no memory is taken for so many nodes",
    reads="Invalid value for '--nnodes': ... is not in the range",
)
@pytest.mark.parametrize("nodes", [TWENTY_DIGITS, f"1:{TWENTY_DIGITS}"])
def test_a_job_of_very_many_nodes_is_refused_at_once(nodes: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    done = CliRunner().invoke(main, ["run", "--nnodes", nodes, str(script)])
    assert done.exit_code == 2
    assert "is not in the range" in done.output


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"nodes": 65_536, "ranks_per_node": 4096}, "at most 16777216 ranks on 65536 nodes"),
        ({"nodes": 65_536, "spare_nodes": 1}, "at most 16777216 ranks on 65536 nodes"),
        ({"nodes": 60, "spare_nodes": 5}, "for at most 64"),
    ],
)
def test_a_world_that_is_too_large_is_refused_before_anything_is_made(
    size: dict[str, int], words: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigurationError, match=words):
        create_job(Start(command=(str(script),), job_directory=tmp_path / "job", **size))  # type: ignore[arg-type]
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("group", [TWENTY_DIGITS, f"0,{TWENTY_DIGITS}", "-1", ""])
def test_ranks_of_a_group_are_bounded_like_any_other(group: str) -> None:
    done = CliRunner().invoke(main, ["inject", "--rank", "0", "--group", group])
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize("key", ["rank", "step", "incarnation", "life", "group"])
def test_a_number_of_twenty_digits_in_a_file_of_faults_is_refused_by_name(key: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    value = f"[{TWENTY_DIGITS}]" if key == "group" else TWENTY_DIGITS
    rank = "" if key == "rank" else "rank: 0, "
    path.write_text(f"faults:\n  - {{{rank}do: kill, {key}: {value}}}\n")
    with pytest.raises(ConfigurationError, match=r"faults\.yaml: "):
        load_schedule(path, 1, 1)


def test_faults_of_the_largest_numbers_can_be_sent() -> None:
    for _, command, parameter in NUMBERS:
        if command.name == "inject" and isinstance(parameter.type, click.IntRange):
            assert parameter.type.max is not None
            assert msgspec.json.encode(ArmedFault(parameter.type.max, "kill", None, parameter.type.max))  # type: ignore[arg-type]


@attack(
    "`--controller` names 3,000 endpoints",
    holds="the command ends with an error, where libzmq would end the process",
    reads="3000 endpoints of controllers: at most ... can be named",
)
def test_thousands_of_endpoints_are_an_error_of_the_command() -> None:
    """libzmq would end the process: it has room for 1,023 sockets."""
    token = token_text(new_token(job="demo"))
    given = ",".join(f"10.0.{number // 250}.{number % 250 + 1}:29400" for number in range(3000))
    done = CliRunner().invoke(main, ["status", "demo", "--controller", given], env={"MIDSTEP_TOKEN": token})
    assert done.exit_code == 1
    assert f"3000 endpoints of controllers: at most {MOST_ENDPOINTS} can be named" in done.output
    many = tuple(f"tcp://10.0.0.{number}:{port}" for number in range(1, 250) for port in range(1, 5))
    assert len(each_address(many)) == MOST_ENDPOINTS
