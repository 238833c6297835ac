"""Which worker or host is lost: heartbeats, silence, starvation, suspicion."""
