"""What workers print is sent in bounded parts, and a lost one's last lines are found."""

from pathlib import Path

from elaswave.observability import run_folder
from elaswave.observability.run_folder import LogTail, add_to_copy, last_lines, worker_log


def log_of(run_dir: Path) -> Path:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    return run_dir / "logs" / worker_log(3)


def test_the_last_lines_are_the_last_ones_that_are_not_empty(tmp_path: Path) -> None:
    assert last_lines(tmp_path, 3) == []
    log_of(tmp_path).write_text("".join(f"line {number}\n\n" for number in range(9)) + "Killed")
    assert last_lines(tmp_path, 3) == ["line 5", "line 6", "line 7", "line 8", "Killed"]
    log_of(tmp_path).write_bytes(b"x" * 3 * run_folder.TAIL_BYTES + b"\nlast \xff\n")
    assert last_lines(tmp_path, 3) == ["x" * (run_folder.TAIL_BYTES - 8), "last \N{REPLACEMENT CHARACTER}"]


def test_parts_make_the_log(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    tail = LogTail(here, 3)
    assert tail.next() == ""
    log_of(there)
    text = ""
    for number in range(4):
        text += f"{number}" * 9000 + "\n"
        log_of(here).write_text(text)
        add_to_copy(there, 3, tail.next())
    while part := tail.next():
        add_to_copy(there, 3, part)
    assert log_of(there).read_text() == text
    assert tail.next(is_last=True) == ""


def test_what_a_worker_prints_without_end_is_cut_but_its_last_words_are_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "SENT_MAX_BYTES", 2 * run_folder.SENT_AT_ONCE_BYTES)
    log, tail = log_of(tmp_path), LogTail(tmp_path, 3)
    log.write_text("y" * 10 * run_folder.SENT_AT_ONCE_BYTES)
    parts = [tail.next() for _ in range(5)]
    assert [len(part) > 0 for part in parts] == [True, True, False, False, False]
    assert parts[1].endswith(f"[what follows stands only in {log}, but for the last words]\n")
    with log.open("a") as file:
        file.write("\nlast words\n")
    assert tail.next(is_last=True).endswith("\nlast words\n")


def test_who_ends_soon_leaves_a_hole_before_its_last_words_and_not_after_them(tmp_path: Path) -> None:
    log, tail = log_of(tmp_path), LogTail(tmp_path, 3)
    log.write_text("z" * 3 * run_folder.TAIL_BYTES + "\nlast words\n")
    part = tail.next(is_last=True)
    assert part.startswith(f"\n[{2 * run_folder.TAIL_BYTES + 12} bytes stand only in {log}]\n")
    assert part.endswith("\nlast words\n") and len(part) < run_folder.TAIL_BYTES + 200
