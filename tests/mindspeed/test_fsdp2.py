"""MindSpeed-LLM's FSDP2 program, unmodified, on torch-npu's own wheel over the fake CANN: ranks are lost.

The model is one of Qwen3's architecture with random weights, and its tokenizer and text are made here.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from midstep.protocol.types import ArmedFault, InjectionPoint

from ..chaos.comparing import assert_nobody_harmed, finish
from ..chaos.jobs import Job, inject
from ..chaos.losing import closing
from .conftest import PATIENCE_S, POLICY, Programs, on_cann, surroundings
from .test_pretrain import differences

RANKS, STEPS, SAVE_STEPS = 2, 8, 5
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "attention_dropout": 0.1,
}
TOKENIZER = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
LAYERS = "model.layers.{*}"
StartFsdp2 = Callable[..., tuple[Job, Path]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what a model of a hub would have, and a text to train on."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("model")
    words = " ".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))).split(" ")
    samples = [" ".join(words[first : first + 8]) for first in range(0, 4000, 8)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = [token for name, token in TOKENIZER.items() if name.endswith("token")]
    made.train_from_iterator(samples, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": sample}) + "\n" for sample in samples))
    return folder


def configuration(model: Path, root: Path) -> dict[str, Any]:
    """Return what train_fsdp2.py reads: as its example for Qwen3, but smaller."""
    return {
        "model": {"model_name_or_path": str(model), "train_from_scratch": True},
        "data": {
            "dataset": {"file_name": str(root / "text.jsonl")},
            "template": "qwen3",
            "cutoff_len": 64,
            "overwrite_cache": True,
            "preprocessing_num_workers": 1,
            "data_manager_type": "mg",
        },
        "parallel": {
            "fsdp_size": RANKS,
            "fsdp_modules": [LAYERS, "model.embed_tokens", "lm_head"],
            "recompute": True,
            "recompute_modules": [LAYERS],
        },
        "training": {
            "stage": "pt",
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "dataloader_num_workers": 0,
            "output_dir": str(root / "saved"),
            "lr": 0.001,
            "max_steps": STEPS,
            "save_steps": SAVE_STEPS,
            "save_hf_weights": False,
        },
    }


@pytest.fixture(scope="module")
def start_fsdp2(programs: Programs, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartFsdp2]:
    """Start train_fsdp2.py, and kill what is left of it when the tests are over."""
    if not (programs.program / "train_fsdp2.py").is_file():
        pytest.skip("this MindSpeed-LLM has no FSDP2 backend: 2.3.0 and older have none")
    device = on_cann()

    def start(faults: list[ArmedFault]) -> tuple[Job, Path]:
        root = tmp_path_factory.mktemp("job")
        asked = root / "train.yaml"
        asked.write_text(yaml.safe_dump(configuration(model, root)))
        shutil.copy(model / "text.jsonl", root)  # it is converted beside where it is
        with surroundings(programs, device) as patch:
            patch.chdir(programs.program)
            patch.setenv("TRAINING_BACKEND", "mindspeed_fsdp")
            job = Job(
                root,
                nodes=1,
                ranks_per_node=RANKS,
                policy={**POLICY, "replica": "buddy", "checkpoint": {"every_steps": 0}},
                script="midstep.adapters.mindspeed_fsdp2",
                options=["--module"],
                arguments=[str(programs.program / "train_fsdp2.py"), str(asked)],
                faults=faults,
                device=device.name,
            )
        return keep(job), root / "saved" / "checkpoints"

    with closing() as keep:
        yield start


def saved(checkpoints: Path, step: int) -> dict[str, Any]:
    """Return what a checkpoint holds, but for the speed of training."""
    place = checkpoints / f"global_step_{step}"
    whole = checkpoints / f"{step}.pt"
    dcp_to_torch_save(place, whole)
    found: dict[str, Any] = {"dcp": torch.load(whole, weights_only=False)}
    for path in sorted((place / "extra_state").iterdir()):
        found[path.name] = torch.load(path, weights_only=False)
        del found[path.name]["train_metric"]
    return found


def test_killed_ranks_are_replaced_and_no_step_is_lost(start_fsdp2: StartFsdp2) -> None:
    """In the backward pass and in the update; a copy at a buddy, and the bits of the undisturbed training."""
    job, checkpoints = start_fsdp2([inject(1, InjectionPoint.BACKWARD, 2), inject(0, InjectionPoint.UPDATE, 6)])
    calm, expected = start_fsdp2([])
    assert calm.wait(PATIENCE_S) == 0, calm.said()
    assert not calm.report()["incidents"], calm.said()
    job.wait(PATIENCE_S)
    incidents = finish(job)["incidents"]
    assert [set(incident["replaced"]) for incident in incidents] == [{1}, {0}], job.said()
    for incident, rank in zip(incidents, (1, 0), strict=True):
        assert_nobody_harmed(incident, {rank}, ranks=RANKS)
    for step in (SAVE_STEPS, STEPS):
        assert not list(differences(saved(expected, step), saved(checkpoints, step)))
