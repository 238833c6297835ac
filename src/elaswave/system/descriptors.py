"""Whether this machine lets a process open as many files as a job needs."""

import resource
import sys

from elaswave.errors import UsageError

_BESIDE = 48
"""Descriptors that a process of a job needs beside one or two for each worker: output, sockets, logs, checkpoints, and
what libraries open for a moment."""


GROWTH = 64
"""Workers that may join a job, as far as the system's limit permits: there is room for them from the beginning, since
the limit of a process that runs is raised by itself only."""


def needed_descriptors(num_workers: int, num_loaders: int = 0) -> int:
    """Descriptors that the process of a job needs that needs most: a connection to each worker, and one to come; or,
    in the template, each worker and each loader, and a line to each worker."""
    return (2 + num_loaders) * num_workers + _BESIDE


def workers_max(num_loaders: int = 0) -> int:
    """How many workers a job may have with the limit that this process has.

    Args:
        num_loaders: of each worker.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(0, soft - _BESIDE) // (2 + num_loaders)


def provide_descriptors(num_workers: int, num_loaders: int = 0) -> None:
    """Raises this process's limit as far as the job needs and the system allows; children inherit it.

    Args:
        num_workers: of the job.
        num_loaders: of each worker.
    Raises:
        UsageError: the system does not allow enough.
    """
    needed = needed_descriptors(num_workers, num_loaders)
    wanted = needed_descriptors(num_workers + GROWTH, num_loaders)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"a job of {num_workers} workers needs up to {needed} open files in a process, and the limit here is "
            f"{hard} (ulimit -n): raise it to {needed} or more, or train with fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
