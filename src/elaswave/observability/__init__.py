"""What a run leaves behind for people and tools: results, events, traces, progress, and the readers of all of them.

In the order the data flows: ``events`` (the log, written while the run lasts) and ``trace`` (every action and
transfer), ``progress`` (what a person sees meanwhile), ``result`` (what the run ends in), ``summary`` and ``compare``
(what ``elaswave inspect`` reads out of a run folder).
"""
