"""Which releases of what is installed go together."""

import pytest

from midstep.cli.doctor import (
    MEGATRON,
    MIDSTEP,
    MINDSPORE,
    NUMPY,
    PYTHON,
    TORCH,
    TORCH_NPU,
    misfits,
    was_run,
)

STACK = {PYTHON: "3.10.13", MIDSTEP: "0.1.0", TORCH: "2.7.1+cpu", TORCH_NPU: "2.7.1.post11", MEGATRON: "0.12.1"}


def test_what_fits_is_not_mentioned() -> None:
    assert misfits(STACK) == []


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        (PYTHON, "3.9.18", "midstep 0.1.0 needs Python >=3.10, and this is 3.9.18"),
        (TORCH, "2.5.1", "midstep 0.1.0 needs torch >=2.6, and this is 2.5.1"),
        (TORCH, "2.13.0", "torch-npu 2.7.1.post11 is built for torch 2.7.1, and this is 2.13.0"),
        (TORCH_NPU, "2.8.0", "torch-npu 2.8.0 is built for torch 2.8.0, and this is 2.7.1+cpu"),
        (TORCH_NPU, "2.1.0.post17", "midstep 0.1.0 needs torch-npu >=2.6, and this is 2.1.0.post17"),
        (MEGATRON, "0.11.0", "midstep 0.1.0 needs megatron-core >=0.12.1, and this is 0.11.0"),
    ],
)
def test_each_misfit_is_named_with_both_versions(package: str, version: str, said: str) -> None:
    found = misfits({**STACK, package: version})
    assert any(line.startswith(said) for line in found), found


def test_a_torch_npu_that_is_not_published_for_this_python_is_named() -> None:
    found = misfits({**STACK, PYTHON: "3.12.1", TORCH: "2.6.0", TORCH_NPU: "2.6.0"})
    assert found == ["torch-npu 2.6.0 needs Python <3.12, and this is 3.12.1: it is published for Python 3.10 and 3.11"]


def test_what_is_not_installed_and_what_has_no_version_is_not_judged() -> None:
    assert misfits({PYTHON: "3.10.1", TORCH: "2.7.1"}) == []
    assert misfits({**STACK, TORCH: "git-main"}) == []


def test_a_stack_that_was_run_is_told_from_one_that_was_not() -> None:
    assert was_run(STACK)
    assert was_run({PYTHON: "3.10.2", TORCH: "2.6.0+cu124"})
    assert not was_run({**STACK, TORCH: "2.8.0"})
    assert not was_run({**STACK, MEGATRON: "0.13.0"})


def test_mindspore_is_judged_with_numpy_and_without_torch() -> None:
    stack = {PYTHON: "3.11.7", MIDSTEP: "0.1.0", MINDSPORE: "2.10.0", NUMPY: "1.26.4"}
    assert misfits(stack) == []
    assert was_run(stack)
    assert not was_run({**stack, MINDSPORE: "2.9.0"})
    assert misfits({**stack, NUMPY: "2.4.6"})[0].startswith("mindspore 2.10.0 needs numpy <2, and this is 2.4.6")
