"""A pattern of exceptions, in `configs/exceptions.yaml` or a policy: what a text says about the fault behind it."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

import msgspec

from .faults import FaultKind, FaultLevel

LONGEST_CHARS = 200
OF_JOB = "job"  # the library of a pattern that a policy has

Text = Annotated[str, msgspec.Meta(min_length=3, max_length=LONGEST_CHARS)]
PatternName = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]*$")]


class FaultEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a pattern means as a fault.

    `mendable`: the process may mend it while it lives; it decides when it knows. `locate`: memory is damaged, and the
    device is to be asked where.
    """

    kind: FaultKind
    level: FaultLevel = FaultLevel.SOFTWARE
    mendable: bool = False
    locate: bool = False


class ExceptionPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One text of one library. At least one of `text`, `regex` and `types`, and either `fault` or `stopped`."""

    name: PatternName
    meaning: Text
    library: PatternName = OF_JOB
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
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version

        try:
            return SpecifierSet(self.versions, prereleases=True).contains(Version(installed))
        except InvalidVersion:
            return True

    def mistakes(self) -> list[str]:
        """Return what is wrong between its keys, empty when nothing is."""
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        found = []
        if self.text is None and self.regex is None and not self.types:
            found.append("one of text, regex and types is needed")
        if (self.fault is None) == (not self.stopped):
            found.append("either fault or stopped: true is needed")
        try:
            assert self.compiled is None or self.compiled.pattern
        except re.error as error:
            found.append(f"regex: {error}")
        try:
            SpecifierSet(self.versions)
        except InvalidSpecifier as error:
            found.append(f"versions: {error}")
        return found
