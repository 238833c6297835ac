"""The control connections of a job."""
