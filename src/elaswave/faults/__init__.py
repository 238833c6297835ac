"""For tests of training jobs: faults, injected where they are asked for."""
