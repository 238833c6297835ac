"""``python -m elaswave.agent``: `elaswave agent`, as torchrun starts it."""

import sys

from elaswave.api.environment import use_one_thread

if __name__ == "__main__":
    use_one_thread()
    from elaswave.cli.agent import run_module  # late: it loads what reads the environment

    sys.exit(run_module(sys.argv[1:]))
