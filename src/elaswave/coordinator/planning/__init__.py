"""From measurements to the next layout, and what a recovery asks of the planner."""
