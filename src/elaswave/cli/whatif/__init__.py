"""`plan`, `compare` and `simulate`: what a job would do, without one."""
