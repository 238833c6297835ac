"""What training takes, as functions of machines and layers: seconds, bytes, watts. Pure.

``machines`` are devices, links and workers; ``layers`` the costs of a model's layers, ``analytic`` from sizes and a
device's figures or ``profiled`` from a running job; ``memory`` and ``step_time`` say what a worker holds and how long a
step takes; ``schedules`` what is in flight; ``presets`` the form of known devices and models; ``recovery_times`` how
long training stands still.
"""
