"""Abilities that CANN or the chip lacks are named before a recovery needs them."""

import pytest

from midstep.devices.npu_symbols import ASCENDCL, HCCL, SYMBOLS, chip_problem, loaded, missing

ALL = {name for symbol in SYMBOLS for name in symbol.names}


def test_a_cann_with_every_function_is_good() -> None:
    assert missing(lambda library, name: name in ALL) == []


@pytest.mark.parametrize("name", ["aclrtDeviceTaskAbort", "aclrtGetMemUceInfo", "HcclCommResume"])
def test_a_missing_function_is_named_with_its_use(name: str) -> None:
    (line,) = missing(lambda library, asked: asked in ALL - {name})
    assert name in line
    assert "Install a newer CANN" in line


def test_one_of_the_two_ways_to_repair_memory_is_enough() -> None:
    for lacking in ("aclrtRepairError", "aclrtMemUceRepair"):
        assert missing(lambda library, asked, lacking=lacking: asked in ALL - {lacking}) == []  # type: ignore[misc]
    (line,) = missing(lambda library, asked: asked not in {"aclrtRepairError", "aclrtMemUceRepair"})
    assert "repair damaged memory" in line


def test_each_function_is_looked_for_in_its_library() -> None:
    asked = set()
    missing(lambda library, name: bool(asked.add((library, name)) or True))  # type: ignore[func-returns-value]
    assert (HCCL, "HcclCommResume") in asked
    assert (ASCENDCL, "aclrtDeviceTaskAbort") in asked


def test_a_library_that_cannot_be_loaded_is_said_so() -> None:
    """As on this machine: without CANN."""
    assert all("cannot be loaded" in line for line in missing())


def test_a_shared_library_is_really_searched() -> None:
    assert loaded("libc.so.6", "malloc")
    assert not loaded("libc.so.6", "aclrtDeviceTaskAbort")


@pytest.mark.parametrize("chip", ["Ascend910B2", "Ascend910B4-1", "Ascend910_9382", "Ascend950PR_9599"])
def test_chips_on_which_communicators_can_be_resumed(chip: str) -> None:
    assert chip_problem(chip) is None


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend910B", "Ascend910ProB", "Ascend310P3", ""])
def test_others_are_named(chip: str) -> None:
    assert "retry_step" in (chip_problem(chip) or "")
