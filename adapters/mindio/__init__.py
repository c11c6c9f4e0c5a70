"""MindIO's names over midstep: what stands behind the package `mindio_ttp` that `midstep run --mindio` gives to ranks.

The package itself lies in `path/`, which is nowhere on a path but in those ranks. It holds names; what they do is here.
"""
