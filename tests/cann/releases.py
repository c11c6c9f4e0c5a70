"""The releases of torch-npu that run on the fake CANN, and how they differ in what they ask of it."""

from pathlib import Path
from typing import NamedTuple

from ..versions.environments import ENVIRONMENTS, NEWEST, Environment, NotHere


class Release(NamedTuple):
    """A torch-npu that these tests run with.

    `below` has the torch for it; None: this project's own environment. `headers`: the wheel that has CANN's headers, if
    its own are of a CANN that is older than the library: then an older torch-npu is on a newer CANN.
    """

    version: str
    below: Environment | None = None
    headers: str = ""

    @property
    def torch(self) -> str:
        """The torch that it was built for: the release of the same number."""
        return self.version.partition(".post")[0]


def _on(version: str, headers: str = "") -> Release:
    """Return a release on an environment that other tests make, or on one of its own, with its torch."""
    release = Release(version)
    own = Environment("3.11", release.torch, NEWEST.megatron, instead="3.12")
    below = next((each for each in ENVIRONMENTS if each.torch == release.torch), own)
    return release._replace(below=below, headers=headers)


# The last torch-npu of each torch that these tests have run with, the one of the lane first.
RELEASES = (
    Release("2.13.0"),
    _on("2.7.1.post11"),
    _on("2.6.0", headers="2.7.1.post11"),
    _on("2.9.0.post9"),
    _on("2.10.0.post7"),
    _on("2.12.0.post3"),
    _on("2.14.0"),
)

# What the library has for newer releases only, by the first of the wheels that names it, of those read: 2.6.0,
# 2.7.1.post11, 2.10.0.post7, 2.12.0.post3, 2.13.0 and 2.14.0. For 2.6.0 alone it has the graph engine
# (library/compiler.cpp) and aclnnCast; there operators also have to be told not to be compiled just in time
# (operators.py).
ASKED_SINCE = {
    "2.7.1.post11": (
        "aclrtBinaryGetFunction",
        "aclrtBinaryLoadFromData",
        "aclrtDeviceGetBareTgid",
        "aclrtGetDeviceInfo",
        "aclrtGetFunctionAddr",
        "aclrtGetPrimaryCtxState",
        "aclrtGetSysParamOpt",
        "aclrtMallocHostWithCfg",
        "aclrtMemExportToShareableHandle",
        "aclrtMemImportFromShareableHandle",
        "aclrtMemSetPidToShareableHandle",
        "aclrtMemset",
        "aclrtProcessReport",
        "rtDevBinaryRegister",
        "rtFunctionRegister",
        "rtGetC2cCtrlAddr",
        "rtKernelLaunch",
    ),
    "2.12.0.post3": ("aclrtMemsetAsync",),
}
NOT_ASKED = {"2.12.0.post3": {"aclrtGetFunctionAddr"}}  # by that release alone: older and newer ones look it up


def chosen(name: str) -> Release:
    """Return the release whose number begins so; the first one without. Raises NotHere for an unknown one."""
    for release in RELEASES:
        if release.version.startswith(name):
            return release
    known = ", ".join(release.version for release in RELEASES)
    raise NotHere(f"there is no torch-npu {name} among those of these tests: {known}")


def names_in(library: Path, names: tuple[str, ...]) -> set[str]:
    """Return which of these names are in a compiled library: as symbols, or as what it looks up when it needs them."""
    content = library.read_bytes()
    return {name for name in names if b"\0" + name.encode() + b"\0" in content}
