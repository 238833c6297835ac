"""Who takes part: who joins and leaves, hosts, places that are taken again, and what a driver tells the machines."""
