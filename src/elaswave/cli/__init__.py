"""The command line: one file per verb. Only here is the environment read."""
