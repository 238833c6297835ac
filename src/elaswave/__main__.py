"""``python -m elaswave``: the same as the ``elaswave`` command."""

import sys

from elaswave.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
