"""Pretrains with Megatron-LM, which has to be on PYTHONPATH. Start it with torchrun and Megatron-LM's arguments."""

import functools

from gpt_builders import gpt_builder  # these three lie beside Megatron-LM's pretrain_gpt.py
from megatron.core.enums import ModelType
from megatron.training import pretrain
from model_provider import model_provider
from pretrain_gpt import forward_step, train_valid_test_datasets_provider

if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True  # as pretrain_gpt.py has it
    pretrain(
        train_valid_test_datasets_provider,
        functools.partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
    )
