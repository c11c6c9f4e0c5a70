"""YAML that people write: policies, code tables, fault schedules, fault traces, manifests

Every reader is given every text.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from midstep.cli.main import main
from midstep.forecast.fault_trace import load_trace
from midstep.launch.rank_environment import load_schedule
from midstep.policies.acjob.translation import translate
from midstep.policies.code_files import load_codes
from midstep.policies.files import load_policy, parse_policy, render
from midstep.processor.exceptions import parse_patterns
from midstep.protocol.errors import ConfigurationError

from .attack import attack

WORK_S = 10.0  # of the processor, for what takes a second or two on a machine with nothing else to do
ACJOB = "apiVersion: mindxdl.gitee.com/v1\nkind: AscendJob\n"

READERS: dict[str, Callable[[Path], Any]] = {
    "policy": load_policy,
    "code table": load_codes,
    "fault schedule": lambda path: load_schedule(path, 1, 1),
    "fault trace": lambda path: load_trace(path, 1),
    "manifest": lambda path: translate(path.read_bytes().decode("utf-8", "surrogateescape"), str(path)),
    "exception patterns": lambda path: parse_patterns(path.read_bytes().decode("utf-8", "surrogateescape"), str(path)),
}
FROM_FILES = ("policy", "code table", "fault schedule", "fault trace")


def laughs() -> str:
    """Aliases of aliases, as lists: ten lines that stand for 10**10 values."""
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *lines])


HOSTILE = {
    "a word that is no bool": ("a: !!bool x", "line 1, column 4: has a YAML tag"),
    "a number that is none": ('a:\n  b: !!float ""', "line 2, column 6: has a YAML tag"),
    "an integer that is none": ('a: !!int ""', "has a YAML tag"),
    "a date that is none": ("a: !!timestamp x", "has a YAML tag"),
    "binary data that is none": ("a: !!binary ö", "has a YAML tag"),
    "an object of Python's": ("a: !!python/object/apply:os.abort []", "has a YAML tag"),
    "a tag of its own": ("a: !mine x", "has a YAML tag"),
    "lists in lists": ("[" * 100_000, "line 1, column 65: is nested deeper than 64 levels"),
    "mappings in mappings": ("{a: " * 10_000, "is nested deeper than 64 levels"),
    "lines in lines": ("- " * 10_000, "is nested deeper than 64 levels"),
    "questions in questions": ("? " * 10_000, "is nested deeper than 64 levels|is the key of a mapping"),
    "aliases that grow": (laughs(), "alias"),
    "an alias of itself": ("a: &a [*a]", "alias"),
    "an alias of nothing": ("a: *b", "alias"),
    "a zero byte": ("a: 1\nb: \0", "line 2, column 4: the character 0x00 is not allowed in YAML"),
    "an escape sequence": ("a: \x1b[2J", "line 1, column 4: the character 0x1b is not allowed in YAML"),
    "half of a surrogate pair": ('a: "\\ud800"', "surrogate|escape"),
    "a key of a megabyte": ("? " + "k" * 1_000_000 + "\n: 1", "more than 1024 characters"),
    "a list as a key": ("[a]: 1", "a list or a mapping is the key|kind: found|in the way"),
    "an end that does not come": ('a: "', "line 1, column"),
    "a tab": ("a:\n\t- b", "line 2, column 1"),
}


@attack(
    "writes YAML with tags, deep nesting, aliases, control characters, or a million values",
    holds="every reader refuses it in bounded work, without a traceback",
    reads="file, line, column, and what is wrong there",
)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_yaml_is_refused_with_file_and_line(tmp_path: Path, case: str, reader: str) -> None:
    """Nothing but the documented error leaves a reader."""
    text, complaint = HOSTILE[case]
    path = tmp_path / "file.yaml"
    path.write_text(text, errors="surrogatepass")

    began = time.process_time()
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        READERS[reader](path)

    assert str(path) in str(caught.value)
    assert all(line.isprintable() for line in str(caught.value).splitlines())
    assert time.process_time() - began < WORK_S


@pytest.mark.parametrize("reader", ["policy", "manifest"])
def test_more_values_than_anything_has_are_refused(tmp_path: Path, reader: str) -> None:
    """The count ends the work, and not the size of the file."""
    path = tmp_path / "file.yaml"
    path.write_text("a: [" + "1," * 250_000 + "]")
    with pytest.raises(ConfigurationError, match=r"line 1, column \d+: more than 200000 values"):
        READERS[reader](path)


def test_of_very_many_mistakes_the_first_are_shown() -> None:
    """A file of a megabyte does not become an error of ten."""
    with pytest.raises(ConfigurationError) as caught:
        parse_policy("restore: [" + "x," * 1000 + "]", "job.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 101
    assert lines[-1] == "job.yaml: 900 more mistakes"


@attack(
    "writes what YAML 1.1 takes for something else: base 60, dates, yes and no, numbers beyond all bounds",
    holds="it is read as YAML 1.2 has it, and refused where it does not fit",
    reads="file, key, what was found and what is allowed",
)
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("deadlines: {quiesce_s: 1:30}", "deadlines.quiesce_s: found the text '1:30'; allowed: a number"),
        ("deadlines: {quiesce_s: " + ":".join("1" * 400_000) + "}", "deadlines.quiesce_s: found the text '1:1:1:"),
        ("deadlines: {quiesce_s: 2026-01-01}", "found the text '2026-01-01'; allowed: a number"),
        ("deadlines: {quiesce_s: " + "9" * 5000 + "}", "deadlines.quiesce_s: found the text '9999"),
        ("deadlines: {quiesce_s: 1e999}", "deadlines.quiesce_s: found the text '1e999'"),
        ("checkpoint: {keep: " + "9" * 30 + "}", "checkpoint.keep: found the text '9999"),
        ("standby: {warm: yes}", "standby.warm: found the text 'yes'; allowed: true, false"),
        ("a: 1\n<<: {b: 2}", "<<: unknown key"),
        ("device: cpu\n'device': npu", "line 2, column 1: key `device` stands twice"),
        ("---\ndevice: cpu\n---\ndevice: npu", "line 3, column 1: a second document"),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, complaint: str) -> None:
    """A number too large for one is a text, which is refused where a number is wanted."""
    with pytest.raises(ConfigurationError) as caught:
        parse_policy(text, "job.yaml")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "word", ["1e5", "80E00012", "0o7", "12", "yes", "1:30", "2026-01-01", "null", "~", ".inf", "<<", "="]
)
def test_a_text_stays_one_when_a_policy_is_written_and_read(word: str) -> None:
    """Also one that looks like a number to one version of YAML and not to the other."""
    policy = parse_policy(f'faults: {{codes: {{"{word}": RestartNPU}}}}', "job.yaml")
    assert parse_policy(render(policy), "again.yaml") == policy


@attack(
    "writes a policy in another encoding, with a byte order mark, or of many megabytes",
    holds="a byte order mark is passed over, and the rest is refused",
    reads="which byte is not UTF-8, or how large a file may be",
)
@pytest.mark.parametrize("reader", FROM_FILES)
def test_encodings_are_told_apart(tmp_path: Path, reader: str) -> None:
    """A file of another encoding is named, with the byte."""
    path = tmp_path / "file.yaml"
    for data, complaint in (
        (b"a: \xff", "byte 3 is not UTF-8"),
        ("a: 1".encode("utf-16"), "byte 0 is not UTF-8"),
        (b"#" * (2 << 20), "larger than 1048576 bytes"),
        (b"\xef\xbb\xbfunheard: 1", "unheard|unknown field"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigurationError, match=complaint) as caught:
            READERS[reader](path)
        assert str(path) in str(caught.value)


@attack(
    "writes a manifest whose aliases repeat containers, or merge each other, without end",
    holds="what they come to is counted before anything is looked up",
    reads="line and column of the alias that is too much",
)
@pytest.mark.parametrize(
    "text",
    [
        "e: &e [" + "{name: a, value: b}," * 1000 + "]\nc: &c [" + "{env: *e}," * 1000 + "]\n"
        f"{ACJOB}spec: {{replicaSpecs: {{M: {{template: {{spec: {{containers: *c}}}}}}}}}}",
        "m: &m {" + ",".join(f"k{n}: 1" for n in range(10_000)) + "}\n"
        "v: &v {<<: *m, name: a, value: b}\n" + f"{ACJOB}spec: {{containers: [{'*v,' * 1000}]}}",
        "m0: &m0 {a: 1}\n" + "".join(f"m{n}: &m{n} {{<<: *m{n - 1}}}\n" for n in range(1, 5000)) + ACJOB,
    ],
    ids=["lists of lists", "one large merge in many", "a long chain of merges"],
)
def test_a_manifest_s_aliases_are_counted(text: str) -> None:
    """Each is followed in the count, and none in the memory."""
    began = time.process_time()
    with pytest.raises(ConfigurationError, match=r"line \d+, column \d+: more than 200000 values and keys, with what"):
        translate(text, "job.yaml")
    assert time.process_time() - began < WORK_S


def test_numbers_of_a_manifest_are_read_as_every_reader_reads_them() -> None:
    """010 is eight to Kubernetes and ten to others; base 60 and tags are no numbers at all."""
    for number in ("010", "0x10", "1_000", "1:30", ":".join("1" * 100_000), "9" * 5000):
        with pytest.raises(
            ConfigurationError, match=r"line 3: spec\.runPolicy\.backoffLimit: found .*; allowed: a whole"
        ):
            translate(f"{ACJOB}spec: {{runPolicy: {{backoffLimit: {number}}}}}", "job.yaml")


@attack(
    "gives a hostile policy to the commands",
    holds="the exit status says that the file is wrong",
    reads="file, line, column, and no traceback",
)
@pytest.mark.parametrize("command", [["policy", "check"], ["policy", "explain"], ["policy", "from-acjob"]])
def test_commands_refuse_hostile_yaml_in_words(tmp_path: Path, command: list[str]) -> None:
    """The error is the reader's, whichever command it is."""
    path = tmp_path / "job.yaml"
    path.write_text("device: !!bool x")
    result = CliRunner().invoke(main, [*command, str(path)])
    assert result.exit_code not in {0, None}
    assert isinstance(result.exception, SystemExit)
    assert f"{path}: line 1, column 9: has a YAML tag" in result.output
