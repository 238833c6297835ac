"""What is shown on the terminal, with and without an agent that has it."""

from elaswave.channel.messages.agent import ShowEvaluation, ShowText
from elaswave.channel.wire import agent_id
from elaswave.coordinator.records import terminal
from elaswave.coordinator.records.terminal import Terminal

AGENT = agent_id(7)


class Server:
    """Has a connection to the agent, or not."""

    def __init__(self) -> None:
        self.is_connected = False
        self.sent: list[object] = []

    def send(self, peer, message) -> bool:
        assert peer == AGENT
        if self.is_connected:
            self.sent.append(message)
        return self.is_connected


def test_lines_that_come_before_the_agent_are_shown_when_it_comes():
    """A new coordinator may be found by the workers first."""
    server = Server()
    shown = Terminal(server)
    shown.show(ShowEvaluation(step=4, loss=2.0))
    shown.say("worker 2 is lost")
    shown.say_trouble("the disk is full")
    server.is_connected = True
    shown.agent_came(AGENT)
    assert server.sent == [
        ShowEvaluation(step=4, loss=2.0),
        ShowText(text="worker 2 is lost"),
        ShowText(text="the disk is full", is_error=True),
    ]
    shown.agent_came(AGENT)
    assert len(server.sent) == 3, "each once"
    shown.say("now")
    assert server.sent[3:] == [ShowText(text="now")]
    shown.agent_went(AGENT)
    shown.say("later")
    assert len(server.sent) == 4, "it waits for the next agent"


def test_of_too_many_lines_the_oldest_are_dropped(monkeypatch):
    monkeypatch.setattr(terminal, "UNSAID_MAX", 3)
    server = Server()
    shown = Terminal(server)
    for number in range(5):
        shown.say(str(number))
    server.is_connected = True
    shown.agent_came(AGENT)
    assert [message.text for message in server.sent] == ["2", "3", "4"]


def test_of_strangers_each_reason_is_shown_once_and_not_too_many(monkeypatch):
    """Who has a wrong key dials again and again, and anybody may dial."""
    monkeypatch.setattr(terminal, "STRANGERS_MAX", 3)
    server = Server()
    server.is_connected = True
    shown = Terminal(server)
    shown.agent_came(AGENT)
    for number in (0, 0, 1, 0, 2, 3, 4, 2):
        shown.say_of_stranger(f"agent {number} was given another key")
    assert [(message.text[6], message.is_error) for message in server.sent] == [("0", True), ("1", True), ("2", True)]
