"""The file of exception patterns (`configs/exceptions.yaml`): how it is read, and what of it holds here.

What a driver or a collective library says when a device fails is text, and the text changes with its versions. So the
texts are data; what is done with them is in `exceptions.py`. A job's policy can have patterns of its own, in the same
form: they are tried first.
"""

from functools import cache
from importlib import metadata, resources

import msgspec

from ..protocol.errors import ConfigurationError, YamlError
from ..protocol.exception_pattern import ExceptionPattern as Pattern
from ..protocol.plain_yaml import read_yaml

FILE = "exceptions.yaml"
FORMAT_VERSION = 1


class PatternFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    version: int
    patterns: tuple[Pattern, ...]


def parse_patterns(text: str, source: str) -> tuple[Pattern, ...]:
    """Return the patterns of a YAML text, in order. Raises ConfigurationError naming `source` and every mistake."""
    try:
        file = msgspec.convert(read_yaml(text), PatternFile)
    except (YamlError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{source}: {error}") from error
    mistakes = [] if file.version == FORMAT_VERSION else [f"version: found {file.version}; allowed: {FORMAT_VERSION}"]
    seen: set[str] = set()
    for pattern in file.patterns:
        mistakes += [f"pattern {pattern.name}: {mistake}" for mistake in pattern.mistakes()]
        if pattern.name in seen:
            mistakes.append(f"pattern {pattern.name}: the name stands twice")
        seen.add(pattern.name)
    if mistakes:
        raise ConfigurationError("\n".join(f"{source}: {mistake}" for mistake in mistakes))
    return file.patterns


def known_patterns() -> tuple[Pattern, ...]:
    """Return the patterns that come along with midstep, whatever is installed."""
    return parse_patterns(resources.files("midstep.configs").joinpath(FILE).read_text(), FILE)


@cache
def patterns_here() -> tuple[Pattern, ...]:
    """Return the patterns that hold for the libraries of this process. Reads a file, once.

    Runs in the fork server, too: a process that is forked from it has them. Raises ConfigurationError.
    """
    versions = {}
    for library in ("torch", "torch_npu"):
        try:
            versions[library] = metadata.version(library).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return tuple(pattern for pattern in known_patterns() if pattern.holds_for(versions))
