"""A GPT on megatron-core: before, after, and with a record of what it did."""
