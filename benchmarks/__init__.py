"""Measurements, each beside what it is compared with in the same run. See README.md."""
