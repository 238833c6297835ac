"""Progress: plain lines without a terminal, a display that fits with one, and nothing left behind."""

import errno
import io
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.observability.samples import CONFIG, LAYOUT, RECOVERY, make_result

from elaswave.observability.progress import Reporter, make_reporter, sparkline


class FakeTerminal(io.TextIOWrapper):
    """A stream that says it is a terminal; what was written is in ``text()``."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("LINES", "24")
    return FakeTerminal()


def run_steps(reporter: Reporter, clock: Clock, steps: int, step_s: float) -> None:
    for step in range(1, steps + 1):
        clock.now += step_s
        reporter.step(step, steps, 5.0 / step, 15234.4, 0, 0, "2x2")


# ------------------------------------------------------------------------------------------------------------ curves


@given(st.lists(st.floats(width=32)), st.integers(1, 100), st.booleans())
def test_a_sparkline_fits_and_has_one_character_per_value(values: list[float], width: int, ascii_only: bool) -> None:
    curve = sparkline(values, width, ascii_only=ascii_only)
    assert len(curve) == min(len(values), width)
    assert set(curve) <= set("_.-=+*#@x" if ascii_only else "▁▂▃▄▅▆▇█×")


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 10, ""),
        ([1.0], 10, "▄"),
        ([3.0, 3.0, 3.0], 10, "▄▄▄"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 5, 4, 2, 1, 0], 3, "█▄▁"),
        ([4.0, math.nan, 2.0], 10, "█×▁"),
        ([math.nan, math.inf], 10, "××"),
        ([1.7e308, -1.7e308], 10, "█▁"),
        ([5e-324, 0.0], 10, "▄▄"),
    ],
)
def test_sparklines(values: list[float], width: int, curve: str) -> None:
    assert sparkline(values, width) == curve


def test_a_sparkline_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="a width of at least 1, not 0"):
        sparkline([1.0], 0)


# ------------------------------------------------------------------------------------------------------------- lines


def test_plain_lines_from_start_to_finish() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = make_reporter(json_mode=False, stream=stream, clock=clock)
    reporter.started(CONFIG, LAYOUT, Path("runs/a"))
    run_steps(reporter, clock, 3, 0.3)
    reporter.evaluation(3, 4.5)
    reporter.message("checkpoint written")
    reporter.error("worker 2 has gone")
    reporter.finished(make_result(recoveries=[RECOVERY]), Path("runs/a"))
    reporter.refresh()
    reporter.close()
    assert stream.getvalue() == (
        "gpt model, 4 layers of hidden size 128, float32, 6 steps, layout 2x2 (4 workers), 8 micro-batches\n"
        "run folder runs/a\n"
        "step 1/3  loss 5.0000  15,234 tokens/s  layout 2x2  generation 0  epoch 1\n"
        "step 3/3  loss 1.6667  15,234 tokens/s  layout 2x2  generation 0  epoch 1\n"
        "step 3  validation loss 4.5000\n"
        "checkpoint written\n"
        "error: worker 2 has gone\n"
        "finished 6 steps in 2.8 s (start-up 0.9 s), 15,234 tokens/s\n"
        "loss 5.6000 → 3.9000  █▆▄▂▃▁\n"
        "validation loss 4.5000\n"
        "1 recovery\n"
        "state digest 00ff00ff00ff00ff00ff00ff00ff00ff\n"
        "results in runs/a\n"
        "look at them with: elaswave inspect runs/a\n"
    )


@pytest.mark.parametrize(
    ("steps", "step_s", "printed"),
    [
        (35, 0.3, [1, 11, 21, 31, 35]),  # every tenth
        (100, 0.01, [1, 51, 100]),  # so fast that every tenth would flood
        (7, 2.6, [1, 3, 5, 7]),  # so slow that every tenth would keep silent
    ],
)
def test_which_steps_are_printed(steps: int, step_s: float, printed: list[int]) -> None:
    stream, clock = io.StringIO(), Clock()
    run_steps(make_reporter(json_mode=False, stream=stream, clock=clock), clock, steps, step_s)
    assert [int(step) for step in re.findall(r"step (\d+)/", stream.getvalue())] == printed


def test_losses_that_are_not_finite_are_printed() -> None:
    stream = io.StringIO()
    make_reporter(json_mode=False, stream=stream).step(1, 2, math.nan, math.nan, 0, 0, "1x1")
    assert "loss nan  - tokens/s" in stream.getvalue()


def test_json_mode_keeps_standard_output_free(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make_reporter(json_mode=True)
    reporter.started(CONFIG, LAYOUT, Path("runs/a"))
    reporter.step(1, 2, 5.0, 100.0, 0, 0, "2x2")
    reporter.error("broken")
    reporter.finished(make_result(), Path("runs/a"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 1/2" in captured.err and "error: broken" in captured.err


def test_otherwise_progress_goes_to_standard_output_and_errors_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make_reporter(json_mode=False)
    reporter.message("hello")
    reporter.error("broken")
    assert capsys.readouterr() == ("hello\n", "error: broken\n")


def test_a_stream_of_another_encoding_gets_what_it_can_hold() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    reporter = make_reporter(json_mode=False, stream=stream)
    reporter.message("naïve")
    reporter.finished(make_result(), Path("runs/ä"))
    assert raw.getvalue().startswith(b"na?ve\n")
    assert b"loss 5.6000 -> 3.9000" in raw.getvalue()


class Gone(io.TextIOWrapper):
    """A terminal, or a file on a full disk, that takes no more."""

    def __init__(self, number: int, isatty: bool) -> None:
        self.descriptor = os.memfd_create("gone")
        super().__init__(open(self.descriptor, "wb", closefd=False), encoding="utf-8")
        self._number, self._isatty = number, isatty

    def isatty(self) -> bool:
        return self._isatty

    def fileno(self) -> int:
        return self.descriptor

    def flush(self) -> None:
        if os.readlink(f"/proc/self/fd/{self.descriptor}").startswith("/memfd:"):
            raise OSError(self._number, os.strerror(self._number))
        super().flush()


@pytest.mark.parametrize("number, isatty", [(errno.EIO, True), (errno.EPIPE, True), (errno.ENOSPC, False)])
def test_what_a_closed_terminal_does_not_show_goes_to_a_file(
    number: int, isatty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Gone(number, isatty)
    try:
        reporter = make_reporter(json_mode=False, stream=stream, lost_output=tmp_path / "terminal.log")
        run_steps(reporter, Clock(), 12, 1.0)
        reporter.message("a message")
        reporter.finished(make_result(), Path("runs/a"))
        reporter.close()
    finally:
        os.close(stream.descriptor)
    lines = (tmp_path / "terminal.log").read_text().splitlines()
    assert lines[0] == f"output is not taken any more ({os.strerror(number)}); what follows goes here"
    assert any(line.startswith("step 12/12  loss ") for line in lines)
    assert "a message" in lines and any(line.startswith("finished ") for line in lines)
    assert len(lines) == len(set(lines)), "nothing comes twice"
    assert "\x1b" not in "".join(lines)


def test_a_file_that_takes_nothing_either_ends_no_run(tmp_path: Path) -> None:
    for lost_output in (None, tmp_path / "no-folder" / "terminal.log", Path("/dev/full")):
        stream = Gone(errno.EIO, isatty=False)
        try:
            reporter = make_reporter(json_mode=False, stream=stream, lost_output=lost_output)
            for _ in range(3):
                reporter.message("words")
                reporter.error("more words")
        finally:
            os.close(stream.descriptor)


def test_an_error_on_a_closed_terminal_does_not_hide_how_the_command_ends() -> None:
    program = (
        "import sys\n"
        "from elaswave.observability.output import say_error\n"
        "say_error('one')\n"
        "say_error('two')\n"
        "sys.exit(7)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert subprocess.run([sys.executable, "-c", program], stderr=writer, timeout=60).returncode == 7
    finally:
        os.close(writer)


def test_a_run_goes_on_when_nobody_reads_its_progress_any_more() -> None:
    program = (
        "import sys\n"
        "from elaswave.observability.progress import make_reporter\n"
        "reporter = make_reporter(json_mode=False)\n"
        "for _ in range(3):\n"
        "    reporter.message('x' * 100_000)\n"
        "sys.stderr.write('went on')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"went on")


# -------------------------------------------------------------------------------------------------------------- live


def visible_lines(text: str) -> list[str]:
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))


def test_the_display_fits_a_narrow_terminal_and_leaves_nothing_behind(terminal: FakeTerminal) -> None:
    threads = threading.active_count()
    clock = Clock()
    reporter = make_reporter(json_mode=False, stream=terminal, clock=clock)
    reporter.started(CONFIG, LAYOUT, Path("runs/a"))
    drawn_before = terminal.text()
    run_steps(reporter, clock, 100, 0.3)
    reporter.evaluation(100, 4.5)
    assert threading.active_count() == threads
    display = terminal.text()[len(drawn_before) :]
    assert max(map(len, visible_lines(display))) <= 50
    assert "step 50/100" in display and "loss 0.1000  15,234 tokens/s  layout 2x2  generat…" in display
    assert "0:15 left" in display and "0:00 left" in display
    assert "validation loss 4.5000" in display
    reporter.finished(make_result(), Path("runs/a"))
    reporter.close()
    assert terminal.text().count("\x1b[?25l") == terminal.text().count("\x1b[?25h") == 1
    assert "state digest 00ff" in terminal.text()
    assert threading.active_count() == threads


def test_the_display_is_redrawn_at_most_ten_times_a_second(terminal: FakeTerminal) -> None:
    clock = Clock()
    reporter = make_reporter(json_mode=False, stream=terminal, clock=clock)
    run_steps(reporter, clock, 1000, 0.001)
    assert 9 <= terminal.text().count("left") <= 12
    drawn = terminal.text().count("left")
    reporter.refresh()
    assert terminal.text().count("left") == drawn
    clock.now += 0.2
    reporter.refresh()
    assert terminal.text().count("left") == drawn + 1
    reporter.close()


def test_messages_and_errors_stand_above_the_display(terminal: FakeTerminal) -> None:
    reporter = make_reporter(json_mode=False, stream=terminal, clock=Clock())
    reporter.step(1, 10, 5.0, 100.0, 0, 0, "2x2")
    reporter.message("checkpoint [bold]written[/bold]")
    reporter.error("worker 2 has gone")
    reporter.close()
    lines = visible_lines(terminal.text())
    assert "checkpoint [bold]written[/bold]" in lines
    assert "error: worker 2 has gone" in lines
    assert lines.index("error: worker 2 has gone") < max(i for i, line in enumerate(lines) if "step 1/10" in line)


def test_messages_wrap_between_words_and_never_inside_a_command(terminal: FakeTerminal) -> None:
    reporter = make_reporter(json_mode=False, stream=terminal, clock=Clock())
    folder = Path("runs/of a person/20261120T125701Z-ab12cd")
    reporter.started(CONFIG, LAYOUT, folder)
    recovery = (
        "worker 3 (stage 1) lost in backward of step 17 (exit): generation 2, 4 micro-batches rerouted, 14 blocks "
        "promoted, "
        "0 B moved, going on after 44 ms, step redone in 332 ms"
    )
    reporter.message(recovery)
    reporter.finished(make_result(), folder)
    reporter.close()
    lines = visible_lines(terminal.text())
    assert f"run folder {folder}" in lines
    assert f"look at them with: elaswave inspect '{folder}'" in [" ".join(line.split()) for line in lines] or (
        f"  elaswave inspect '{folder}'" in lines
    )
    (first,) = (index for index, line in enumerate(lines) if line.startswith("worker 3"))
    wrapped = lines[first : first + 4]
    assert " ".join(" ".join(wrapped).split()) == recovery
    assert max(map(len, wrapped)) <= 50 and not any(line.endswith((" 44", " 332", " 0")) for line in wrapped)


def test_the_curve_of_a_long_run_stays_small(terminal: FakeTerminal) -> None:
    reporter = make_reporter(json_mode=False, stream=terminal, clock=Clock())
    for step in range(1, 5000):
        reporter.step(step, 10_000, 10_000.0 - step, 1.0, 0, 0, "1x1")
    curve = reporter._reporter._curve.means()  # type: ignore[attr-defined]
    assert len(curve) <= 480
    assert curve == sorted(curve, reverse=True)
    reporter.close()


def test_a_terminal_without_block_characters_gets_ascii(terminal: FakeTerminal) -> None:
    plain = FakeTerminal("ascii")
    reporter = make_reporter(json_mode=False, stream=plain, clock=Clock())
    reporter.started(CONFIG, LAYOUT, Path("runs/a"))
    reporter.step(1, 2, 5.0, 100.0, 0, 0, "2x2")
    reporter.finished(make_result(), Path("runs/a"))
    assert "5.6000 -> 3.9000  @*=.-_" in plain.text()


def test_a_dumb_terminal_gets_plain_lines(terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    reporter = make_reporter(json_mode=False, stream=terminal)
    reporter.step(1, 2, 5.0, 100.0, 0, 0, "2x2")
    assert "\x1b" not in terminal.text() and "step 1/2" in terminal.text()
