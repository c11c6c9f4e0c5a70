"""A function for `on_node_relaunch` in these tests: it writes down what it was given."""

import os
import sys
from pathlib import Path

place = Path(os.environ["TMPDIR"]).parent / "records" / "relaunch.json"
place.with_suffix(".new").write_text(sys.stdin.read())
place.with_suffix(".new").rename(place)
