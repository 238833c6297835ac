"""What workers, agents and operators say to the coordinator, and it to them: plain typed data."""
