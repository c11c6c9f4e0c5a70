"""Look for the optional libraries that are installed, without loading them."""

from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None
