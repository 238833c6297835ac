"""Virtual time: the protocol under faults (`sim.protocol`), and weeks of a cluster under any policy (`sim.cluster`)."""
