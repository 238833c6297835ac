"""Scenarios from traces of machines that come and go, in the forms in which they are published.

`formats` knows the forms and recognises them; each has its module: `events`, `polls`, `philly`, `alibaba`. `acme`
makes rates of a trace of jobs. `history` turns comings and goings into a scenario. Lines are given by the caller:
nothing here opens a file.
"""

from elaswave.sim.cluster.traces.formats import FORMATS, read_trace

__all__ = ["FORMATS", "read_trace"]
