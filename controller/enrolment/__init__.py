"""Admission of nodes that join a job by themselves, with its token."""
