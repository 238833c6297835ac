"""``python -m elaswave.agent``: `elaswave agent`, as torchrun starts it."""

import sys

from elaswave.cli.agent import run_module

if __name__ == "__main__":
    sys.exit(run_module(sys.argv[1:]))
