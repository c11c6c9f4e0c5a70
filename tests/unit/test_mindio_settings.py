"""Settings of NPUs in a job with MindIO: what the launcher sets, what a rank refuses and what it warns of."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from midstep.adapters.mindio import processor
from midstep.launch.job import Start, spec_of
from midstep.policies.schema import default_policy
from midstep.protocol.errors import ConfigurationError


def test_a_job_with_mindio_gets_what_an_npu_needs_whatever_its_device_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch-npu's watchdog would end every survivor at the first failed collective."""
    monkeypatch.delenv("HCCL_ASYNC_ERROR_HANDLING", raising=False)
    start = Start(command=("train.py",), mindio=True)
    spec = spec_of(start, "job", default_policy(), tmp_path)
    assert spec.environment["HCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert (
        "HCCL_ASYNC_ERROR_HANDLING" not in spec_of(Start(("train.py",)), "job", default_policy(), tmp_path).environment
    )


@pytest.fixture
def on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank of a job, and its script has imported torch-npu."""
    settings = SimpleNamespace(link_up_s=1.5)
    runtime = SimpleNamespace(rank=0, world_size=1, settings=settings, await_rank=lambda: None)
    monkeypatch.setattr("midstep.processor.runtime.Runtime.current", lambda: runtime)
    npu = SimpleNamespace(get_allocator_backend=lambda: "native", current_device=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    monkeypatch.setenv("HCCL_ASYNC_ERROR_HANDLING", "0")


@pytest.mark.usefixtures("on_an_npu")
def test_a_script_on_an_npu_that_cannot_be_recovered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_ASYNC_ERROR_HANDLING", "1")
    with pytest.raises(ConfigurationError, match="HCCL_ASYNC_ERROR_HANDLING=1: torch-npu's watchdog"):
        processor.tft_init_processor(0, 1, enable_local_copy=False)


@pytest.mark.usefixtures("on_an_npu")
@pytest.mark.parametrize(("local_rank", "warned"), [("0", True), ("1", False)])
def test_the_first_rank_of_a_node_warns_of_slow_settings(
    local_rank: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`prepare` of the device, which warns in other jobs, is not called in one with MindIO."""
    monkeypatch.setattr(processor, "HandlerDriver", lambda *_: SimpleNamespace(recovery=SimpleNamespace()))
    monkeypatch.setattr(processor, "_Process", type("Process", (), {}))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1800")
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "60000")
    with caplog.at_level("WARNING", logger="midstep"):
        processor.tft_init_processor(0, 1, enable_local_copy=False)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("HCCL_CONNECT_TIMEOUT=1800" in line for line in told) is warned
    assert any("HCCL_IF_BASE_PORT=60000" in line for line in told) is warned
