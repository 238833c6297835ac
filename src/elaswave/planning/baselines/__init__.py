"""Other systems' ways to go on after a failure, as planners of the same signature as ElasWave's own.

All of them run on this engine, with the same detection, the same communicator and the same timing of a step, so a
comparison shows the policies alone. Each module says what of its paper it models and what was simplified; where the
simplification could matter it is in the baseline's favour.
"""
