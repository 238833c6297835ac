"""An agent sends its workers' logs to coordinators that ask for them, and to no others."""

from pathlib import Path

from elaswave.control.agent_messages import LogPart
from elaswave.control.log_sending import EVERY_S, LogSending
from elaswave.observability.worker_logs import worker_log


def test_logs_are_sent_while_they_are_wanted_and_last_words_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / worker_log(5)
    sent: list[LogPart] = []

    def send(part: LogPart) -> bool:
        sent.append(part)
        return True

    sending = LogSending(tmp_path, send)
    sending.started(5)
    log.write_text("one\n")
    sending.turn(100.0)
    assert sent == [], "nobody has asked"
    sending.wanted()
    sending.turn(200.0)
    log.write_text("one\ntwo\n")
    sending.turn(200.0 + EVERY_S / 2)
    assert sent == [LogPart(worker=5, text="one\n")]
    sending.turn(200.0 + EVERY_S)
    assert sent[1:] == [LogPart(worker=5, text="two\n")]
    log.write_text("one\ntwo\nthree\n")
    sending.ended(5)
    sending.ended(5)
    assert sent[2:] == [LogPart(worker=5, text="three\n")]
    sending.connected()
    sending.started(5)
    sending.turn(300.0)
    sending.ended(5)
    assert len(sent) == 3, "another coordinator has not asked"
