"""Virtual time: weeks of a cluster under any policy (`sim.cluster`)."""
