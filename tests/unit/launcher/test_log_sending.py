"""An agent sends its workers' logs to coordinators that ask for them, and to no others."""

from pathlib import Path

from elaswave.channel.messages.agent import LogPart
from elaswave.launcher.supervisors import SEND_LOGS_EVERY_S, LogSending
from elaswave.observability.run_folder import worker_log


def test_logs_are_sent_while_they_are_wanted_and_last_words_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / worker_log(5)
    sending = LogSending(tmp_path)
    sending.started(5)
    log.write_text("one\n")
    assert sending.turn(100.0) == [], "nobody has asked"
    sending.wanted()
    assert sending.turn(200.0) == [LogPart(worker=5, text="one\n")]
    log.write_text("one\ntwo\n")
    assert sending.turn(200.0 + SEND_LOGS_EVERY_S / 2) == []
    assert sending.turn(200.0 + SEND_LOGS_EVERY_S) == [LogPart(worker=5, text="two\n")]
    log.write_text("one\ntwo\nthree\n")
    assert sending.ended(5) == [LogPart(worker=5, text="three\n")]
    assert sending.ended(5) == []
    sending.connected()
    sending.started(5)
    assert sending.turn(300.0) == sending.ended(5) == [], "another coordinator has not asked"
