"""torchtitan's program on a machine without an accelerator: `midstep run train_on_cpu.py --module llama3 ...`.

With accelerators there is nothing to write: `midstep run --titan -- --module llama3 ...`.
"""

from midstep.examples.torchtitan.on_cpu import prepare

if __name__ == "__main__":
    prepare()
    from midstep.adapters.torchtitan.__main__ import main

    main()
