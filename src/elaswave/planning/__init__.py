"""Plans as pure functions: layouts, and the programs of actions that they compile to. No torch, IO, clock or chance."""
