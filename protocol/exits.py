"""Exit codes of an agent and of `midstep run` on a machine that has joined: what the launcher of an engine goes by.

Any other one is the job's own.
"""

RESTART_HERE = 75  # no controller for too long: the job may be elsewhere, or over
ANOTHER_NODE = 76  # this node is not to be used any more by the job
NOT_ADMITTED = 77  # wrong or expired token, a name that is in use: the same again will not help

# Of `midstep controller`, whose job is not over then.
CONTROLLER_FAILED = 70  # it failed, or another one leads by now: there is no result.json
JOURNAL_DAMAGED = 65  # no other one can continue either: the journal is not what was written
