"""What is asked of Linux: families of processes, signals, limits, folders of a job."""
