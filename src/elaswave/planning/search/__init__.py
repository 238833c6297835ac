"""The search for a plan: shapes, cuts, pipelines, teams, within the memory of each worker."""
