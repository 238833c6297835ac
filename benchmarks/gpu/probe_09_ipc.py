"""Probe 9: memory that one process lends another (CUDA IPC; on a CPU shared memory), and the lender is killed.

It decides whether a worker may read a neighbour's staging memory directly.
"""

import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch
from crowd import Crowd, Ended, Member, pipe
from nvml import memory_used
from parts import Bench, Probe, Row

PROBE = Probe(9, __file__)
_LENT, _OTHER = 7, 9
_LENDER, _READER, _THIRD = range(3)


def _size(bench: Bench) -> int:
    return 1 << (10 if bench.small else 28)


def _lend(member: Member, bench: Bench, reader: Connection) -> None:
    values = torch.full((_size(bench),), _LENT, dtype=torch.int32, device=bench.device)
    bench.sync()
    reader.send(values)  # memory that was lent cannot be lent on, so no other process is between the two
    member.say("lent")
    member.heard(120.0)


def _read(member: Member, bench: Bench, lender: Connection) -> None:
    if not lender.poll(60.0):
        raise RuntimeError("nothing was lent within 60 s")
    start_s = time.monotonic()
    values = lender.recv()
    first = int(values[0])
    member.say(("has it", first, time.monotonic() - start_s))
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        start_s = time.perf_counter()
        try:
            copy = values.clone()
            wrong = int((copy != _LENT).sum())
            member.say({"wrong": wrong, "seconds": time.perf_counter() - start_s})
        except RuntimeError as error:
            member.say({"error": str(error)[:400]})
            return
        if member.heard(0.02 if bench.small else 0.0) == "enough":
            break
    member.say({"still_good": int(values.sum()) == _LENT * _size(bench)})


def _take_all(member: Member, bench: Bench, _: None) -> None:
    """Fills the memory that is free, so that what a dead process left is used again."""
    if member.heard(60.0) != "go":
        return
    held = []
    try:
        for _ in range(4 if bench.small else 400):
            held.append(torch.full((_size(bench) // 2,), _OTHER, dtype=torch.int32, device=bench.device))
    except RuntimeError as error:
        member.say({"took": len(held), "until": str(error)[:80]})
    else:
        member.say({"took": len(held)})
    bench.sync()
    member.heard(30.0)


def _body(member: Member, bench: Bench, role: int, link: Connection | None) -> None:
    (_lend, _read, _take_all)[role](member, bench, link)  # type: ignore[operator]


def _summary(reports: list[Row]) -> Row:
    found: Row = {"reads": sum("wrong" in each for each in reports)}
    found["wrong_elements"] = max((each["wrong"] for each in reports if "wrong" in each), default=0)
    found["slowest_s"] = max((each["seconds"] for each in reports if "seconds" in each), default=None)
    for each in reports:
        found |= {key: value for key, value in each.items() if key in ("error", "still_good")}
    return found


@PROBE.part(30, alone=True)
def lender_killed(bench: Bench) -> Iterator[Row]:
    """The lender dies while its memory is read; then a third process takes all free memory."""
    before = memory_used(bench)
    reading, writing = pipe()
    with Crowd(_body, [(bench, _LENDER, writing), (bench, _READER, reading), (bench, _THIRD, None)]) as crowd:
        reading.close()
        writing.close()
        _, first, opened_s = crowd.expect(tuple, 60.0, [_READER])[_READER].message
        yield {"reads": first, "opening_s": opened_s, "device_bytes": memory_used(bench) - before}
        phases: dict[str, list[Row]] = {"lender lives": [], "lender killed": [], "memory taken again": []}
        seconds = 0.3 if bench.small else 3.0
        ends: dict[int, int | None] = {}
        for phase, found in phases.items():
            if phase == "lender killed":
                crowd.kill(_LENDER)
            elif phase == "memory taken again":
                crowd.tell(_THIRD, "go")
            until_s = time.monotonic() + seconds
            for report in crowd.reports(seconds):
                if isinstance(report.message, Ended):
                    ends[report.member] = report.message.exit_code
                elif report.member == _READER:
                    found.append(report.message)
                else:
                    yield {"third": report.message}
                if report.at_s > until_s:
                    break
            yield {"phase": phase, **_summary(found), "device_bytes": memory_used(bench) - before}
        crowd.tell(_READER, "enough")
        last: list[Row] = []
        for report in crowd.reports(5.0):
            if isinstance(report.message, Ended):
                ends[report.member] = report.message.exit_code
                if report.member == _READER:
                    break
            elif report.member == _READER:
                last.append(report.message)
        yield {"phase": "end", **_summary(last), "exit_codes": ends}
    start_s = time.monotonic()
    while memory_used(bench) - before > (256 << 20) and time.monotonic() - start_s < 10.0:
        time.sleep(0.01)
    yield {"device_bytes_left": memory_used(bench) - before, "after_s": time.monotonic() - start_s}


if __name__ == "__main__":
    sys.exit(PROBE.main())
