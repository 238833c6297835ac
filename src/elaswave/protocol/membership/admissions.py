"""Who is to become a member, and who is to leave, before the next generation says so. No IO.

A joiner becomes a member once every member has a link to it and it has one to every member; a worker that is asked to
leave is let go once it runs and holds nothing. Both happen at a voted boundary between two steps, at which all members
pause (docs/protocol.md, rules J).

Who differs from the workers that began would compute other bits, or train something else: it is refused before it
disturbs anybody. What stands here cannot tell a joiner with another key: that one does not get a connection
(`elaswave.transport.handshake`).
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from elaswave.blocks.placement import Placement
from elaswave.protocol.messages import Dial, Joining
from elaswave.protocol.step.ballot import ENVIRONMENT, read_votes
from elaswave.types import Layout


class Founders(msgspec.Struct, frozen=True, kw_only=True, tag="founders"):
    """What all workers of a job have in common. Made durable once, with the first committed step, so that a joiner is
    compared with the workers that began, however many have come and gone since."""

    protocol: int
    libraries: str
    environment: str
    """Of one of them, for people; empty where bits are not compared."""
    config_hash: int
    model_hash: int
    data_hash: int
    foreign: tuple[str, ...] = ()
    """``LAYER: KIND`` of each foreign part."""
    determinism_hashes: dict[int, int]
    """That all have agreed on in the first vote, by place."""


def libraries(versions: Mapping[str, str]) -> str:
    """Versions of libraries as they are compared, and as people read them: "numpy 2.1.0, torch 2.7.0".

    Args:
        versions: by name.
    """
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def determinism_hashes_in(
    vector: Sequence[int], *, num_layers: int, num_tensors: int, num_buffers: int
) -> Mapping[int, int]:
    """Reads the determinism hashes that all voters agree on; empty where bits are not compared.

    They stand before what a vote says of tensors, which is its end, see `elaswave.protocol.step.ballot.VoteShape`.

    Args:
        vector: of a merged vote.
        num_layers, num_tensors, num_buffers: of the model.
    """
    stop = len(vector) - num_tensors - 2 * num_buffers
    return read_votes(vector[stop - 2 * (1 + num_layers) : stop]).known


def admission_problem(joining: Joining, founders: Founders, layer_names: Sequence[str]) -> str | None:
    """Explains why a worker may not join.

    Args:
        joining: what it says of itself.
        founders: what it must have in common with the others.
        layer_names: of the model, by layer.
    Returns:
        One line with everything that differs, and what to do; None if it may join.
    """
    problems = []
    if joining.protocol != founders.protocol:
        problems.append(
            f"it speaks protocol {joining.protocol} and the job {founders.protocol}: install the job's elaswave"
        )
    if joining.libraries != founders.libraries:
        problems.append(f"it has {joining.libraries}, and the job {founders.libraries}: install the same versions")
    if joining.config_hash != founders.config_hash:
        problems.append("its configuration is another one: start it with the config.toml of the run's folder")
    if joining.model_hash != founders.model_hash:
        problems.append("its model or optimizer has other tensors: give it the script that the run was started with")
    if joining.data_hash != founders.data_hash:
        problems.append("its data are others: give it the files that the run trains on")
    if joining.foreign != founders.foreign:
        problems += _other_parts(joining.foreign, founders.foreign)
    elif joining.model_hash == founders.model_hash:  # else its layers are others anyway
        problems += _other_bits(joining, founders, layer_names)
    return "; ".join(problems) or None


def _other_parts(there: Sequence[str], here: Sequence[str]) -> list[str]:
    found, needed = (dict(line.partition(": ")[::2] for line in lines) for lines in (there, here))
    return [
        f"its foreign part {name} is served by {found.get(name, 'nothing')}, and the job's by "
        f"{needed.get(name, 'nothing')}: install the same software, with the same code of the part"
        for name in sorted(found.keys() | needed.keys())
        if found.get(name) != needed.get(name)
    ] or ["its foreign parts stand in another order than the job's"]


def _other_bits(joining: Joining, founders: Founders, layer_names: Sequence[str]) -> list[str]:
    known = founders.determinism_hashes
    differing = sorted(place for place, value in joining.determinism_hashes.items() if known.get(place, value) != value)
    if known and not joining.determinism_hashes:
        return ["it does not say what bits it computes, and the job compares them: set elastic.verify=true"]
    if ENVIRONMENT in differing:
        return [
            f"it computes other bits: it has {joining.environment}, and the job {founders.environment}. All machines "
            "of a job need processors of one kind and the same libraries"
        ]
    layers = ", ".join(layer_names[place - ENVIRONMENT - 1] for place in differing)
    if layers:
        return [
            f"layers of the same kind as {layers} give other bits there, forward or backward, or begin with other "
            "values: a layer must give the same bits in every process, and its code must be the job's"
        ]
    return []


class Admissions:
    """What a coordinator knows of them. Nothing of it is durable but `leaving`: members, joiners and the agent say the
    rest again to every successor."""

    def __init__(self) -> None:
        self.joiners: dict[int, str] = {}
        """Those that may come in, in the order in which they came -> where their data plane listens."""
        self.domains: dict[int, str] = {}
        """Where joiners run, see `elaswave.blocks.domains`."""
        self.leaving: set[int] = set()
        """Members that are asked to leave."""
        self.paused: dict[int, int] = {}
        """Members that wait, in the present generation -> the step after which they do."""
        self.go_on_after = 0
        """The newest step after which a member was let go on: who has paused after it, or before, is to go on too."""
        self.is_asked = False
        """Whether the members were asked to pause, in the present generation."""
        self._linked: dict[int, frozenset[int]] = {}
        """Worker -> those of the wanted peers to which it has links."""

    def new_generation(self) -> None:
        """What was said of the last generation is void; links to joiners outlive it."""
        self.paused.clear()
        self.is_asked = False
        self.go_on_after = 0

    def came(self, worker: int, address: str, domain: str) -> None:
        """A joiner may come in; may be said again."""
        self.joiners[worker] = address
        self.domains[worker] = domain

    def gone(self, worker: int) -> bool:
        """A joiner has ended, or has not become a member in time; returns whether there was one."""
        self._linked.pop(worker, None)
        self.domains.pop(worker, None)
        return self.joiners.pop(worker, None) is not None

    def linked(self, worker: int, peers: Collection[int]) -> None:
        """A worker says to which of the peers that it is to be linked to it has links."""
        self._linked[worker] = frozenset(peers)

    def go_on(self, step: int) -> list[int]:
        """A member has been let go on after a step; returns those that have paused after it, or before: they wait for
        nothing any more."""
        self.go_on_after = max(self.go_on_after, step)
        waiting = [worker for worker, after in self.paused.items() if after <= self.go_on_after]
        for worker in waiting:
            del self.paused[worker]
        return waiting

    def ready(self, members: Collection[int]) -> tuple[int, ...]:
        """Lists the joiners whose links stand, from both sides, and between each other."""
        found: list[int] = []
        for joiner in self.joiners:
            peers = {*members, *found}
            theirs = self._linked.get(joiner, frozenset())
            if peers <= theirs and all(joiner in self._linked.get(peer, ()) for peer in peers):
                found.append(joiner)
        return tuple(found)

    def released(self, members: Collection[int], layout: Layout, placement: Placement) -> tuple[int, ...]:
        """Lists the leaving members that can be let go now, while others stay: those that run and hold nothing.

        Args:
            members: of the generation.
            layout, placement: in force.
        """
        candidates = self.leaving.intersection(members, layout.idle)
        going = [worker for worker in sorted(candidates) if not placement.holds(worker)]
        return tuple(going) if len(going) < len(members) else ()

    def calls(
        self, addresses: Mapping[int, str], members: Collection[int], term: int, generation: int
    ) -> list[tuple[int, Dial]]:
        """Lists (worker, what it is told): members are to make links to all joiners, joiners to all members and
        joiners.

        Args:
            addresses: of those members that have told theirs; joiners are told nothing before all have.
            members, term, generation: of the coordinator.
        """
        everybody = {**addresses, **self.joiners}
        calls = [(worker, Dial(term=term, generation=generation, addresses=self.joiners)) for worker in addresses]
        for joiner in self.joiners if addresses.keys() >= set(members) else ():
            others = {peer: address for peer, address in everybody.items() if peer != joiner}
            calls.append((joiner, Dial(term=term, generation=generation, addresses=others)))
        return calls
