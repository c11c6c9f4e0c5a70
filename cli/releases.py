"""Which releases go together: facts about torch, torch-npu, megatron-core and Python, held against what is installed.

Pure, so that `midstep doctor` can be asked about any machine. A fact that is not in this table is not judged.
"""

from collections.abc import Mapping
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

PYTHON = "Python"
MIDSTEP, TORCH, TORCH_NPU, MEGATRON = "midstep", "torch", "torch-npu", "megatron-core"
MINDSPORE, NUMPY = "mindspore", "numpy"


class Fact(NamedTuple):
    """`package` in one of `releases` needs `other` in one of `needed`."""

    package: str
    releases: SpecifierSet
    other: str
    needed: SpecifierSet
    because: str


FACTS = (
    Fact(MIDSTEP, SpecifierSet(), PYTHON, SpecifierSet(">=3.10"), "older ones lack the syntax"),
    Fact(MIDSTEP, SpecifierSet(), TORCH, SpecifierSet(">=2.6"), "older ones were never tried"),
    Fact(MIDSTEP, SpecifierSet(), TORCH_NPU, SpecifierSet(">=2.6"), "older ones lack calls of a recovery"),
    Fact(MIDSTEP, SpecifierSet(), MEGATRON, SpecifierSet(">=0.12.1"), "older ones were never tried"),
    Fact(
        MINDSPORE, SpecifierSet(), NUMPY, SpecifierSet("<2"), "2.10.0 was tried with numpy 2 and fails in its operators"
    ),
    Fact(MEGATRON, SpecifierSet(">=0.12"), TORCH, SpecifierSet(">=2.6"), "its package asks for it"),
    Fact(TORCH_NPU, SpecifierSet("<2.7"), PYTHON, SpecifierSet("<3.12"), "it is published for Python 3.10 and 3.11"),
)

# midstep's own checks ran with these together: Python, torch, megatron-core (docs/versions.md).
RUN_TOGETHER = (
    ("3.10", "2.6.0", "0.12.1"),
    ("3.10", "2.7.1", "0.12.1"),
    ("3.11", "2.13.0", "0.16.1"),
    ("3.12", "2.9.1", "0.14.0"),
    ("3.13", "2.15.0", "0.16.1"),
)
# As above, without torch: Python, mindspore.
RUN_WITH_MINDSPORE = (("3.11", "2.10.0"),)


def misfits(installed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each pair that does not fit. `installed`: versions by name, PYTHON among the names."""
    versions = {name: version for name, text in installed.items() if (version := _parsed(text)) is not None}
    found = []
    for fact in FACTS:
        this, other = versions.get(fact.package), versions.get(fact.other)
        if this is None or other is None or not fact.releases.contains(this, prereleases=True):
            continue
        if not fact.needed.contains(other.public, prereleases=True):
            found.append(f"{fact.package} {this} needs {fact.other} {fact.needed}, and this is {other}: {fact.because}")
    torch, npu = versions.get(TORCH), versions.get(TORCH_NPU)
    if torch is not None and npu is not None and torch.release[:3] != npu.release[:3]:
        of = ".".join(map(str, npu.release[:3]))
        found.append(
            f"{TORCH_NPU} {npu} is built for {TORCH} {of}, and this is {torch}: install the release of one number"
        )
    return found


def was_run(installed: Mapping[str, str]) -> bool:
    """Say whether midstep's checks have run with this Python, torch or MindSpore, and megatron-core if any."""
    versions = {name: _parsed(text) for name, text in installed.items()}
    if TORCH not in versions:
        return any(
            _same(versions.get(PYTHON), python, 2) and _same(versions.get(MINDSPORE), mindspore, 3)
            for python, mindspore in RUN_WITH_MINDSPORE
        )
    return any(
        _same(versions.get(PYTHON), python, 2)
        and _same(versions.get(TORCH), torch, 3)
        and (MEGATRON not in versions or _same(versions[MEGATRON], megatron, 3))
        for python, torch, megatron in RUN_TOGETHER
    )


def _same(version: Version | None, text: str, parts: int) -> bool:
    return version is not None and version.release[:parts] == Version(text).release[:parts]


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:  # a build of somebody's own: nothing is known about it
        return None
