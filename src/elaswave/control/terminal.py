"""What a coordinator shows on the terminal, which the agent has."""

from collections import deque
from typing import Protocol

from elaswave.control.agent_messages import ShowText, ToAgent
from elaswave.control.wire import agent_id

AGENT = agent_id(0)
UNSAID_MAX = 10_000
"""Most lines that are kept while there is no agent; of more, the oldest are dropped."""


class SendsToPeers(Protocol):
    """Of a control server what is needed here."""

    def send(self, peer: int, message: ToAgent) -> bool:
        """Sends a message; False if there is no connection to this peer."""


class Terminal:
    """Lines for the terminal; those that come while no agent is connected wait for one.

    Args:
        server: has the connections.
    """

    def __init__(self, server: SendsToPeers) -> None:
        self._server = server
        self._unsaid: deque[ToAgent] = deque(maxlen=UNSAID_MAX)

    def show(self, message: ToAgent) -> None:
        """Shows something, now or when an agent has come."""
        if not self._server.send(AGENT, message):
            self._unsaid.append(message)

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Shows a line."""
        self.show(ShowText(text=text, is_error=is_error))

    def say_trouble(self, text: str) -> None:
        """Shows a line about something that has gone wrong."""
        self.say(text, is_error=True)

    def agent_came(self) -> None:
        """Shows what has waited."""
        for message in self._unsaid:
            self._server.send(AGENT, message)
        self._unsaid.clear()
