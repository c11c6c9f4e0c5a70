"""Data parallel training with MindSpore, plain and resilient side by side."""
