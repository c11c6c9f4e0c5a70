"""The same, resilient: two lines differ from pretrain_plain.py. Start it with `midstep run`, or torchrun."""

import functools

from gpt_builders import gpt_builder  # these three lie beside Megatron-LM's pretrain_gpt.py
from megatron.core.enums import ModelType
from megatron.training import pretrain
from model_provider import model_provider
from pretrain_gpt import forward_step, train_valid_test_datasets_provider

from midstep.adapters.megatron import resilient_pretrain

if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True  # as pretrain_gpt.py has it
    resilient_pretrain(pretrain)(
        train_valid_test_datasets_provider,
        functools.partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
    )
