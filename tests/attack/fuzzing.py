"""How many cases each fuzzer of this folder tries, and how long it may take: `make test SUITE=attack` tries 100,000."""

import os

CASES = int(os.environ.get("MIDSTEP_FUZZ_CASES", "300"))
LIMIT_S = 120 + CASES // 20  # of one test, on a busy machine
