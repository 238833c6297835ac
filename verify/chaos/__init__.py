"""Real jobs and faults drawn at random, each judged against a run without faults."""
