"""The process that has imported torch and built the model once, and forks workers and coordinators."""
