"""Virtual time: weeks of a cluster under any policy (`sim.cluster`), and a step over slow links."""
