"""The change of a job's key that a person asks for: the coordinator's side. When a key counts no more is
`elaswave.protocol.coordinator.key_change`'s; here it is said who takes part, what they are told, and what the person
is.

Workers and agents are told the secrets of those who take part, which are made of the job's keys; the agent of this
host, which starts coordinators, reads the job's new key from its file. A change goes on only while a person asks for
it, who has that file: a key that nobody has must not remain alone.
"""

from collections.abc import Callable, Iterable

from elaswave.channel.messages.worker import KeysNow
from elaswave.channel.wire import peer_name, role_of
from elaswave.coordinator.commands.reply import Reply, refusal
from elaswave.job.key_files import KeyRole, secrets_for
from elaswave.protocol.coordinator.key_change import KeyChange
from elaswave.transport.handshake import Secrets

SHOWN_MAX = 5
"""Of those that are waited for."""


def obstacle_to(store: str, listen: str, *, has_tls: bool) -> str:
    """Why the key of a job cannot be changed while it runs; empty: it can.

    Args:
        store: as configured.
        listen: where the coordinator does.
        has_tls: whether connections are encrypted.
    """
    if store != "file":
        return (
            "what this job keeps in etcd is sealed with its key, which therefore stays: end the job (`elaswave ctl RUN "
            "stop`), and start it with another key"
        )
    if not listen.startswith("unix:") and not has_tls:
        return (
            "this job's connections are not encrypted, so that the new key could be read on the way: only a job over "
            "Unix sockets or with net.tls changes its key while it runs"
        )
    return ""


class KeyCommands:
    """The keys of one job, as its coordinator has them.

    Args:
        keys: the job's, with which it is started.
        obstacle: as of `obstacle_to`.
        send_all: sends a message to peers, as far as they are connected.
        present: gives all that take part, also those that are not connected just now.
        retired: called when old keys count no more. Connections that stand were made with them: whoever does not take
            part has to connect anew.
    """

    def __init__(
        self,
        keys: Secrets,
        obstacle: str,
        send_all: Callable[[Iterable[int], KeysNow], object],
        present: Callable[[], Iterable[int]],
        retired: Callable[[], None],
    ) -> None:
        self._change = KeyChange(*keys)
        self._obstacle = obstacle
        self._send_all, self._present, self._retired = send_all, present, retired
        self._problems: dict[int, str] = {}
        """Of participants that cannot take the present keys."""

    def of_peer(self, peer: int) -> Secrets:
        """What a participant of an id must prove one of."""
        return secrets_for(Secrets(self._change.accepted, self._change.retired), role_of(peer))

    @property
    def sent(self) -> tuple[bytes, ...]:
        """What participants are told to go by; none: by what they were given."""
        return self._of_participants.accepted if self._change.was_begun else ()

    @property
    def _of_participants(self) -> Secrets:
        return secrets_for(Secrets(self._change.accepted), KeyRole.JOINING)

    @property
    def under_way(self) -> list[str]:
        """What is not ended, in words."""
        num_keys = len(self._change.accepted)
        if num_keys == 1:
            return []
        return [f"{num_keys} keys of the job are good: `elaswave keys rotate` ends the change{self._waiting()}"]

    def ask(self, key: bytes) -> Reply:
        """Somebody wants another key.

        Args:
            key: the new one.
        """
        problem = self._obstacle or self._change.offer(key)
        if problem:
            return refusal(problem)
        self._tell_all()
        if self._change.accepted == (key,):
            return self._retiring(key)
        text = f"the new key of the job is good too{self._waiting()}; once all have it, the old one is good no more"
        return Reply("offered", text, follow=lambda: self._next(key))

    def _next(self, key: bytes) -> Reply | None:
        if key in self._change.retired:
            return Reply("void", "another change of the key has come before this one to its end")
        if self._problems:
            peer, problem = next(iter(self._problems.items()))
            return Reply("failed", f"{peer_name(peer)} cannot take the new key: {problem}")
        if self._change.retire(key, self._present()):
            self._tell_all()
            self._retired()
            return self._retiring(key)
        if self._change.is_over(key, self._present()):
            return Reply("changed", "the new key is the job's only one, and nobody takes the old one any more")
        return None

    def _retiring(self, key: bytes) -> Reply:
        text = "all have the new key: the old one, and all that were made of it, are refused from now on"
        return Reply("retiring", text, follow=lambda: self._next(key))

    def connected(self, peer: int) -> None:
        """A worker or an agent has connected."""
        self._change.connected(peer)
        self._problems.pop(peer, None)
        if self._change.was_begun:
            self._send_all([peer], KeysNow(keys=self.sent))

    def taken(self, peer: int, ring: bytes, problem: str = "") -> None:
        """A participant says by what it goes.

        Args:
            peer: its id.
            ring: the name of its secrets. Of older ones, that it had before it heard of the present ones, it is no
                answer.
            problem: why it cannot; empty: it does.
        """
        if problem:
            self._problems[peer] = problem
        elif ring == self._of_participants.name:
            self._problems.pop(peer, None)
            self._change.has(peer)

    def _tell_all(self) -> None:
        self._problems.clear()
        self._send_all(sorted(set(self._present())), KeysNow(keys=self._of_participants.accepted))

    def _waiting(self) -> str:
        names = [peer_name(peer) for peer in self._change.waits_for(self._present())]
        more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
        return f", and {', '.join(names[:SHOWN_MAX])}{more} must still say so" if names else ""
