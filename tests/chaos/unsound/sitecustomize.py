"""Makes a machine unsound: the process that checks the node ends before it has measured anything."""

import os
import sys

if "midstep.agent.node_check" in sys.orig_argv:
    os._exit(3)
