"""Megatron-LM's own pretrain, two ranks of which are killed.

Megatron-LM's training loop is in no package. Check it out, name the place in MIDSTEP_MEGATRON_LM, and these tests run.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from midstep.protocol.types import ArmedFault, FaultAction, FlippedBits, InjectionPoint

from ..comparing import assert_nobody_harmed, assert_same_numbers
from ..jobs import Job, Record, inject
from ..test_audits import blamed, flip
from .conftest import POLICY, run_to_its_end

CHECKOUT = "MIDSTEP_MEGATRON_LM"
SCRIPT = Path(__file__).with_name("pretraining.py")
STEPS = 12
# A tiny GPT without what needs a GPU. The rerun state machine is refused, and is on by default.
ARGUMENTS = f"""
    --use-mcore-models --transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 2 --bf16
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters {STEPS}
    --lr 0.01 --min-lr 0.001 --lr-decay-style cosine --lr-warmup-iters 2 --eval-interval 5 --eval-iters 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 1 --num-workers 0
    --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm --no-create-attention-mask-in-dataloader
    --log-interval 1 --rerun-mode disabled
    --tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce
"""
GATHERS = "--overlap-param-gather"
AUDITS: dict[str, Any] = {**POLICY, "integrity": {"audit_steps": 2, "strikes": 100}}

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHECKOUT not in os.environ, reason=f"{CHECKOUT} names no checkout of Megatron-LM"),
]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for jobs, which find Megatron-LM."""
    places = os.environ[CHECKOUT], os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # it asks for that with tensor parallelism
    return tmp_path


def start(place: Path, faults: tuple[ArmedFault, ...] = (), *options: str, policy: dict[str, Any] = POLICY) -> Job:
    """Start a job that trains with Megatron-LM."""
    arguments = [str(place / "records"), *ARGUMENTS.split(), *options]
    return Job(place, script=SCRIPT, arguments=arguments, policy=policy, faults=faults)


def undisturbed(place: Path, *options: str) -> Record:
    """Return the record of a run to which nothing happens."""
    job = start(place, (), *options)
    try:
        assert not run_to_its_end(job)["incidents"], job.said()
    finally:
        job.close()
    return job.record()


def test_a_kill_in_megatron_lms_pretrain_changes_no_bit(root: Path) -> None:
    """Only the killed ranks are replaced, no iteration is lost, and all numbers are those of an undisturbed run."""
    faults = (inject(1, InjectionPoint.BACKWARD, 3), inject(0, InjectionPoint.FORWARD, 8))
    calm = undisturbed(root / "calm", GATHERS)
    job = start(root / "job", faults, GATHERS)
    try:
        incidents = run_to_its_end(job)["incidents"]
    finally:
        job.close()
    assert len(incidents) == len(faults), job.said()
    for incident, fault in zip(incidents, faults, strict=True):
        assert_nobody_harmed(incident, {fault.rank})
        assert incident["resumed_step"] == fault.step, incident
    assert_same_numbers(job.record(), calm)


def test_a_wrong_gradient_in_megatron_lms_pretrain_is_blamed_on_its_rank(root: Path) -> None:
    """Of two tensor parallel ranks that compute together; in a replica, and in the one that repeats its step."""
    flips = (
        flip(1, FaultAction.FLIP_ACTIVATION, InjectionPoint.FORWARD, 4, bits=FlippedBits.TENSOR),
        flip(2, FaultAction.FLIP_GRADIENT, InjectionPoint.BACKWARD, 6, bits=FlippedBits.SIGN),
        flip(0, FaultAction.FLIP_ACTIVATION, InjectionPoint.REPLAY, 8, bits=FlippedBits.TENSOR),
    )
    calm = undisturbed(root / "calm")
    job = start(root / "job", flips, policy=AUDITS)
    try:
        incidents = run_to_its_end(job)["incidents"]
    finally:
        job.close()
    assert len(incidents) == len(flips), job.said()
    assert all(incident["pids_before"] == incident["pids_after"] for incident in incidents)
    assert blamed(job) == {(1, 4), (2, 6), (0, 8)}
    assert_same_numbers(job.record(), calm)
