"""Programs of workers: from a plan to actions, their validation, and how long they take."""
