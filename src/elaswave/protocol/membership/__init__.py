"""Who takes part: admission of joiners, hosts, respawned places."""
