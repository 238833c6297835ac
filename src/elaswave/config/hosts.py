"""``elastic.hosts``: which hosts workers are told apart by, and how many each has."""

import re
from collections import Counter
from collections.abc import Sequence

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")


def host_problems(hosts: Sequence[str], num_workers: int | None) -> list[str]:
    """What is wrong with the setting.

    Args:
        hosts: as configured.
        num_workers: of the layout; None: it is not known.
    """
    problems = []
    entries = [entry.partition("=") for entry in hosts]
    for entry, (label, _, count) in zip(hosts, entries, strict=True):
        if not _LABEL.fullmatch(label) or ("=" in entry and not _COUNT.fullmatch(count)):
            problems.append(
                f"{entry!r} is no host: write a label such as a or rack-1/a, and, for all hosts or none, =N for the "
                "number of its workers"
            )
    if problems:
        return problems
    counted = [bool(equals) for _, equals, _ in entries]
    if len(set(counted)) > 1:
        problems.append("some hosts have a number of workers and some have none: give it for all (a=2) or for none")
    problems += [f"host {label} is given {times} times" for label, times in _labels(hosts).items() if times > 1]
    labels = list(_labels(hosts))
    problems += [
        f"{label} is a host, and {other} a host in a domain of that name: rename one"
        for label in labels
        for other in labels
        if other.startswith(f"{label}/")
    ]
    if problems or num_workers is None:
        return problems
    if not all(counted):
        if len(hosts) > num_workers:
            problems.append(f"{len(hosts)} hosts are given for {num_workers} workers: give at most one for each")
    elif (total := sum(int(count) for _, _, count in entries)) != num_workers:
        problems.append(f"the hosts have {total} workers, but the layout has {num_workers}: make them equal")
    return problems


def host_sizes(hosts: Sequence[str], num_workers: int) -> dict[str, int]:
    """Host -> number of workers that a run begins with; even shares where no numbers are given, larger ones first.

    Args:
        hosts: as configured, without a problem.
        num_workers: of the layout.
    """
    share, more = divmod(num_workers, len(hosts))
    sizes = {}
    for index, entry in enumerate(hosts):
        label, equals, count = entry.partition("=")
        sizes[label] = int(count) if equals else share + (index < more)
    return sizes


def _labels(hosts: Sequence[str]) -> Counter[str]:
    return Counter(entry.partition("=")[0] for entry in hosts)
