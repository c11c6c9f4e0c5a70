"""midstep beside the tools that a user would pick instead: one workload, the same faults, each tool's own idioms.

`python -m benchmarks.peers --help`. A file for each peer says how it is installed, started and used; what a run was
like is worked out of what the workload's processes write down, the same lines for all.
"""
