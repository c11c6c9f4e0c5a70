"""The file of exception patterns (`configs/exceptions.yaml`): its keys, how it is read, and what of it holds here.

What a driver or a collective library says when a device fails is text, and the text changes with its versions. So the
texts are data; what is done with them is in `exceptions.py`.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata, resources
from typing import Annotated

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..protocol.errors import ConfigurationError, YamlError
from ..protocol.plain_yaml import read_yaml
from ..protocol.types import FaultKind, FaultLevel

FILE = "exceptions.yaml"
FORMAT_VERSION = 1
_LONGEST_CHARS = 200

Text = Annotated[str, msgspec.Meta(min_length=3, max_length=_LONGEST_CHARS)]


class FaultEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pattern means as a fault.

    `mendable`: the process may mend it while it lives; it decides when it knows. `locate`: memory is damaged, and the
    device is to be asked where.
    """

    kind: FaultKind
    level: FaultLevel = FaultLevel.SOFTWARE
    mendable: bool = False
    locate: bool = False


class Pattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One text of one library. At least one of `text`, `regex` and `types`, and either `fault` or `stopped`."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]*$")]
    library: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]*$")]
    meaning: Text
    versions: str = ""
    text: Text | None = None
    regex: Text | None = None
    types: tuple[str, ...] = ()
    fault: FaultEntry | None = None
    stopped: bool = False

    @cached_property
    def compiled(self) -> "re.Pattern[str] | None":
        """The regular expression, ready for use."""
        return None if self.regex is None else re.compile(self.regex, re.DOTALL)

    def holds_for(self, versions: Mapping[str, str]) -> bool:
        """Say whether the pattern belongs to what is installed; a library of unknown version has all its patterns."""
        installed = versions.get(self.library)
        if not self.versions or installed is None:
            return True
        try:
            return SpecifierSet(self.versions, prereleases=True).contains(Version(installed))
        except InvalidVersion:
            return True


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
        mistakes += [f"pattern {pattern.name}: {mistake}" for mistake in _mistakes(pattern)]
        if pattern.name in seen:
            mistakes.append(f"pattern {pattern.name}: the name stands twice")
        seen.add(pattern.name)
    if mistakes:
        raise ConfigurationError("\n".join(f"{source}: {mistake}" for mistake in mistakes))
    return file.patterns


def _mistakes(pattern: Pattern) -> list[str]:
    found = []
    if pattern.text is None and pattern.regex is None and not pattern.types:
        found.append("one of text, regex and types is needed")
    if (pattern.fault is None) == (not pattern.stopped):
        found.append("either fault or stopped: true is needed")
    try:
        assert pattern.compiled is None or pattern.compiled.pattern
    except re.error as error:
        found.append(f"regex: {error}")
    try:
        SpecifierSet(pattern.versions)
    except InvalidSpecifier as error:
        found.append(f"versions: {error}")
    return found


def known_patterns() -> tuple[Pattern, ...]:
    """Return the patterns that come along with midstep, whatever is installed."""
    return parse_patterns(resources.files("midstep.configs").joinpath(FILE).read_text(), FILE)


def patterns_here() -> tuple[Pattern, ...]:
    """Return the patterns that hold for the libraries of this process. Reads a file; runs once, at start."""
    versions = {}
    for library in ("torch", "torch_npu"):
        try:
            versions[library] = metadata.version(library).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return tuple(pattern for pattern in known_patterns() if pattern.holds_for(versions))
