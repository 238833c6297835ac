"""What a coordinator shows on terminals, which the agents have."""

from collections import deque
from typing import Protocol

from elaswave.channel.messages.agent import ShowText, ToAgent

UNSAID_MAX = 10_000
"""Most lines that are kept while there is no agent; of more, the oldest are dropped."""


STRANGERS_MAX = 20
"""Most lines in a job about processes that have not proved that they hold its key; the log has all."""


class SendsToPeers(Protocol):
    """Of a control server what is needed here."""

    def send(self, peer: int, message: ToAgent) -> bool:
        """Sends a message; False if there is no connection to this peer."""


class Terminal:
    """Lines for the terminals of all agents; those that come while none is connected wait for one.

    Args:
        server: has the connections.
    """

    def __init__(self, server: SendsToPeers) -> None:
        self._server = server
        self.agents: list[int] = []
        """Those that are connected, as control connections name them."""
        self._unsaid: deque[ToAgent] = deque(maxlen=UNSAID_MAX)
        self._of_strangers: set[str] = set()

    def show(self, message: ToAgent) -> None:
        """Shows something, now or when an agent has come."""
        if not [agent for agent in self.agents if self._server.send(agent, message)]:
            self._unsaid.append(message)

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Shows a line."""
        self.show(ShowText(text=text, is_error=is_error))

    def say_trouble(self, text: str) -> None:
        """Shows a line about something that has gone wrong."""
        self.say(text, is_error=True)

    def say_of_stranger(self, reason: str) -> None:
        """Shows why a process was turned away that may be one of the job: each reason once, as it dials again and
        again, and only so many in all, as anybody may dial."""
        if reason in self._of_strangers or len(self._of_strangers) == STRANGERS_MAX:
            return
        self._of_strangers.add(reason)
        self.say_trouble(reason)

    def agent_came(self, agent: int) -> None:
        """From now on this agent shows what there is; the first one also what has waited.

        Args:
            agent: its id on control connections.
        """
        if agent not in self.agents:
            self.agents.append(agent)
        for message in self._unsaid:
            self._server.send(agent, message)
        self._unsaid.clear()

    def agent_went(self, agent: int) -> None:
        """An agent is not connected any more."""
        if agent in self.agents:
            self.agents.remove(agent)
