"""Expressions for lines of a log: those that could be tried for ever on one line are refused before a job starts."""

import re
import time

import pytest

from midstep.protocol.line_patterns import LONGEST_LINE, LONGEST_PATTERN, mistakes_in

GOOD = [
    r"loss is nan",
    r"(?i)fatal",
    r"\bNaN\b",
    r"(?:CUDA|NPU) error.*code \d{1,4}:",
    r"rank \d+ .* at step \d+",
    r"^\s*\[error\] ",
    r"[^:]*: link (is )?down",
    r"overflow.*scale.*skipp",
    r"\w+Error: .*memory",
    r"x{3}",
    r"a|bc+d",
    r"(?P<what>disk|quota) (full|exceeded)",
    r"é+ ",
]
REFUSED = [
    (r"(a+)+$", "repeats a group"),
    (r"(?:ab)*c", "repeats a group"),
    (r"(a|aa)+$", "repeats a group"),
    (r"(\d+,?){3,}x", "repeats a group"),
    (r"a.*b.*c.*d.*e", "too many ways"),
    (r"\s*\s*\s*\s*x", "too many ways"),
    (r"(a.*)?(b.*)?(c.*)?(d.*)?x", "too many ways"),
    (r"\w*[^ ]*[^,]*\d*x", "too many ways"),
    (r"(a)\1", "reference back"),
    (r"(?=a)b", "look ahead"),
    (r"(?<!a)b", "look ahead"),
    (r"(", "no regular expression"),
    (r"a**", "no regular expression"),
    (r".*", "fits an empty line"),
    (r"x?", "fits an empty line"),
    (r"", "has 0 characters"),
    ("x" * (LONGEST_PATTERN + 1), "has 201 characters"),
]


@pytest.mark.parametrize("pattern", GOOD)
def test_what_is_tried_in_few_ways_is_allowed(pattern: str) -> None:
    assert mistakes_in(pattern) == []


@pytest.mark.parametrize(("pattern", "wrong"), REFUSED)
def test_what_may_take_for_ever_is_refused_and_says_why(pattern: str, wrong: str) -> None:
    (mistake,) = mistakes_in(pattern)
    assert wrong in mistake


@pytest.mark.parametrize(
    ("pattern", "is_allowed"),
    [
        (r"a.*\d+ .*b", True),  # a digit is no space: what is given back cannot help
        (r"a.*\d+.*b", False),
        (r"a.*[^ ]+ .*b", True),
        (r"a.*\S+ .*b", True),
        (r"a.*\S+x.*b", False),
        (r"a.*\w+\s.*b", True),
        (r"a.*\w+\W.*b", True),
        (r"a.*(?i:x+X).*b", False),  # one case is the other
        (r"a.*x+X.*b", False),
        (r"a.*[^a-z]+[^A-Z].*b", False),
        (r"a.*[一-龥]+\w.*b", False),
        (r"a.*\w+[一-龥].*b", False),
        (r"a.*b+$", True),
    ],
)
def test_a_repetition_that_cannot_give_back_multiplies_nothing(pattern: str, is_allowed: bool) -> None:
    assert (mistakes_in(pattern) == []) is is_allowed


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"a.*b.*c", "ab" * (LONGEST_LINE // 2)),
        (r"a.*b.*c", "a" * 133 + "b" * 133 + "x" * 134),
        (r"rank \d+ .* at step \d+x", "rank 1 " * 20 + " at step 1" * 26),
        (r".*[^:]*:", "a" * LONGEST_LINE),
        (r"\w+\s+\w+\s+!", "a " * (LONGEST_LINE // 2)),
    ],
)
def test_what_is_allowed_takes_less_than_half_a_second_on_its_worst_line(pattern: str, line: str) -> None:
    assert mistakes_in(pattern) == []
    began_s = time.process_time()
    assert re.search(pattern, line[:LONGEST_LINE]) is None
    assert time.process_time() - began_s < 0.5
