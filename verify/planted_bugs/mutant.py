"""What a planted bug is."""

from typing import NamedTuple

from verify.simulator.run import Build


class Mutant(NamedTuple):
    """A planted bug."""

    name: str
    what: str
    """What is wrong."""
    build: Build
    example: str
    """A schedule that shows it, as short as the search could make it."""
    real: bool = False
    """Whether the core once had it."""
