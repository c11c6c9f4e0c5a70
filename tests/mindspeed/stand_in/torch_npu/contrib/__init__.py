"""torch-npu's additions."""
