"""torchtitan's program with a trainer that is resilient: `midstep run --titan -- ...` runs this module."""

import inspect

from .trainer import install


def main() -> None:
    """Train as `python -m torchtitan.train` does with the same arguments. Raises ConfigurationError, see `install`."""
    install()
    from torchtitan import train

    # 0.2.2 is told which trainer to make; from 0.3.0 on its configuration says so.
    train.main(*([train.Trainer] if inspect.signature(train.main).parameters else []))


if __name__ == "__main__":
    main()
