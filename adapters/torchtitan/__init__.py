"""torchtitan's own trainer made resilient from outside, with none of its lines changed.

`python -m midstep.adapters.torchtitan` takes the place of `python -m torchtitan.train`; `midstep run --titan` calls it.
"""

from .trainer import install

__all__ = ["install"]
