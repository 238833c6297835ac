"""What is asked of Linux: families of processes, signals, limits."""
