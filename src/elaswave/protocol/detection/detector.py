"""Who is lost, judged by what is heard: ends of processes, closed links, silence, standstill. No IO, no clocks.

Nothing here has to be tuned to a model or a machine. Every bound is a multiple of the worst that was seen lately and
turned out to be harmless, and has a floor:

    exit        the process has ended                                    at once; certain
    link        a peer has lost its connection to the worker             after a grace in which an exit may explain it
    heartbeat   nothing is heard of a worker                             4 x the longest gap, at least 1.5 s;
                                                                         twice that while others still compute;
                                                                         4 times that while most are silent together;
                                                                         time in which its process was seen to wait for
                                                                         a processor does not count, up to 20 s;
                                                                         longer by what the link of its site may hold
                                                                         back a heartbeat
                it has not registered, and uses no processor time        20 s
    host        nothing comes from any worker of a host, and its kernel  2 s (`host_silence`);
                acknowledges nothing                                     4 times that while most are silent together
    progress    it computes one action far longer than any took          10 x the longest one, at least 2 s
                all workers wait, and nothing moves, not even bytes      10 x the longest standstill, one step, 3 s

What keeps a slow machine from looking like a dead worker: time in which the coordinator itself was not scheduled does
not count; nor does time in which a worker was not, as its host's agent sees it
(`elaswave.protocol.detection.starvation`); a committed step is a sign of life of all members, since the vote needs all
of them; when no worker at all is heard, none is suspected (for half a minute: then no worker is left to go on with);
after a silence of all, or of most, everybody has a whole bound again.

Durations are compared, never times of different machines. The same calls with the same times give the same answers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from elaswave.protocol.detection.active_time import TICK_S, ActiveTime
from elaswave.protocol.detection.host_silence import HOST_SILENT_S, LOOK_S, Counters, HostSilence
from elaswave.protocol.detection.starvation import EXCUSED_MAX_S, Stillness
from elaswave.protocol.detection.watched import LongestLately, WatchedWorker
from elaswave.protocol.events import Suspected
from elaswave.protocol.step.activity import FIRST_S, IDLE, PHASES, STARTING, WRITE, WorkerActivity, action_kind, blame

__all__ = ["Detector", "WorkerActivity", "Suspicion"]

LINK_GRACE_S = 0.015
"""How long a closed link waits for the end of the process that explains it."""

SILENCE_FLOOR_S = 1.5
SILENCE_FACTOR = 4.0
SILENCE_MARGIN_S = 5.0
"""A bound on silence is never more than this above the longest gap."""
NO_HURRY = 2.0
"""Factor on a bound on silence while another worker still computes: so far the silent one delays no other."""
SILENCE_STARTING_S = 20.0
"""Bound on silence of a worker that has not begun its first step, and on standing still of one that has not registered:
it says nothing yet, but as long as its process uses processor time it gets on, however slowly."""
UNSEEN_START_S = 120.0
"""Bound for a worker that has not registered and whose process the agent cannot see."""
SILENCE_UNLEARNED_S = 5.0
"""Least bound on silence until `LEARNED_GAPS` heartbeats have come (`LEARNED_GAPS_AGAIN` to a successor), and while a
worker is in one of `BESIDE_STEPS`."""
LEARNED_GAPS = 4
LEARNED_GAPS_AGAIN = 40
"""The same for a coordinator that takes over: what its predecessor has learned of a busy machine is gone with it."""
GAP_MAX_S = 5.0
"""Longer gaps teach nothing more."""
CROWD = 4
CROWD_FACTOR = 4.0
"""Factor on bounds on silence while at least `CROWD` workers and more than half of all are silent together: then the
machine is too busy for them, or a large part of it is gone, which takes longer to tell from each other. Of workers on
several hosts, more than half of the hosts: one that is lost takes many workers with it, and busies no other."""
SENT_AGAIN_S = 10.0
"""After so long without an answer a peer makes its connection anew (`elaswave.channel.client`), whatever its kernel
does."""
STRAY_S = 0.5
"""What comes from a process so much later than the newest sign of life of all others was not lost with theirs."""
NOBODY_S = 30.0
"""Silence of all workers together that ends the job."""

BUSY_FLOOR_S = 2.0
STALL_FLOOR_S = 3.0
PROGRESS_FACTOR = 10.0
"""An action, or a standstill, may take this many times as long as the longest one lately."""
UNLEARNED_S = 120.0
"""Bound on progress until `LEARNED_STEPS` steps have been committed, and for whatever is no part of a step."""
LEARNED_STEPS = 2

DURATION_HALF_LIFE_S = 600.0
UNSEEN_S = 0.5
"""How much of the time between two heartbeats an action may be taken to have lasted on."""

Suspicion = Suspected
"""What a detector answers with is what the coordinator's machine takes."""


class Detector:
    """Says which workers are lost.

    Every method but `next_tick_s` takes the present monotonic time. After each of them `tick` is to be called no later
    than `next_tick_s` says. A worker is named once; after that, as after `left`, nothing about it counts any more
    until it has `joined` again.

    Args:
        takes_over: whether the job has begun under another coordinator.
        domains: where workers run, as far as that is known, see `elaswave.blocks.domains`; looked up again each time.
        can_look: whether somebody can be expected to say of a worker how its process gets on, if it is one of `quiet`.
        active_time: counts the time in which the coordinator is awake, for others too; None: for this detector alone.
        held_up_s: for how long the link from a worker's site may hold back what it says.
    """

    def __init__(
        self,
        *,
        takes_over: bool = False,
        domains: Mapping[int, str] = MappingProxyType({}),
        can_look: Callable[[int], bool] = lambda worker: False,
        active_time: ActiveTime | None = None,
        held_up_s: Callable[[int], float] = lambda worker: 0.0,
    ) -> None:
        self._active_time = ActiveTime() if active_time is None else active_time
        self._held_up_s = held_up_s
        self._domains = domains
        self._can_look = can_look
        self._quiet: tuple[int, ...] = ()
        self._excuses: list[str] = []
        self._silent_hosts: dict[str, tuple[HostSilence, tuple[int, ...]]] = {}
        """By host all of whose workers are silent: what is known of it, and these workers."""
        self._learned_gaps = LEARNED_GAPS_AGAIN if takes_over else LEARNED_GAPS
        self._watched: dict[int, WatchedWorker] = {}
        self._awaited: dict[int, Stillness] = {}
        self._gone: set[int] = set()
        """Workers of which nothing counts any more."""
        self._exits: dict[int, str] = {}
        self._broken: dict[tuple[int, int], float] = {}
        """(reporter, peer) -> when the reporter lost its link to the peer."""
        self._now_s = self._active_time.seen_s
        """All times in here are of this clock."""
        self._all_silent = False
        """Whether no worker at all was heard, for half of its usual bound, at the last tick."""
        self.are_together = False
        """Whether all workers, or most, were silent together then."""
        self._hosts_factor = 1.0
        """On the bounds on the silence of whole hosts."""
        self._newest_step = (-1, 0, 0)
        """The newest (generation, step, attempt) that any worker has begun."""
        self._newest_step_s = 0.0
        self._num_computing = 0
        self._moved_s = 0.0
        """When any worker's position changed last, or a link was seen to move bytes, however slowly."""
        self._paused = False
        """Whether all workers wait for the coordinator."""
        self._busy: dict[str, LongestLately] = {}
        """By kind of action: how long it took any worker."""
        self._standstills = LongestLately(DURATION_HALF_LIFE_S)
        self._steps = LongestLately(DURATION_HALF_LIFE_S)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers being watched, ascending."""
        return tuple(sorted(self._watched))

    @property
    def awaited(self) -> tuple[int, ...]:
        """The workers that have not registered, ascending."""
        return tuple(sorted(self._awaited))

    @property
    def quiet(self) -> tuple[int, ...]:
        """The workers, ascending, that had been silent at the last tick for so long that it would raise the bound:
        somebody is to look at their processes, and say so with `looked`."""
        return self._quiet

    @property
    def quiet_hosts(self) -> Mapping[str, tuple[int, ...]]:
        """Of each host on which all workers were silent at the last tick: these workers. Somebody is to look at the
        connections to it before the next tick, and say so with `looked_at_host`."""
        return {host: workers for host, (_, workers) in self._silent_hosts.items()}

    def take_excuses(self) -> list[str]:
        """Explains for people, once, why each silence that has outlasted its bound was excused."""
        excuses, self._excuses = self._excuses, []
        return excuses

    # --------------------------------------------------------------------------------------------- what is heard

    def expect(self, worker: int, now_s: float) -> None:
        """A worker's process is being started: it is to join."""
        self._advance(now_s)
        self._awaited[worker] = Stillness(self._now_s)

    def used(self, worker: int, cpu_s: float, now_s: float) -> None:
        """Notes how much processor time the process of a worker had used when it was looked at just now."""
        self._advance(now_s)
        awaited = self._awaited.get(worker)
        if awaited is not None:
            awaited.looked(cpu_s, self._now_s)

    def looked(self, worker: int, waited_s: float, now_s: float) -> None:
        """Somebody on a worker's host has looked at its process just now.

        Args:
            worker: its id.
            waited_s: seconds of those since the look before in which the process could have run, and got no processor.
            now_s: monotonic time.
        """
        self._advance(now_s)
        watched = self._watched.get(worker)
        if watched is not None:
            watched.starvation.looked(waited_s, self._now_s)

    def looked_at_host(self, host: str, counters: Iterable[Counters], now_s: float) -> None:
        """Somebody has looked at the connections to one of `quiet_hosts` just now, and sent something on each.

        Args:
            host: its failure domain.
            counters: of each connection to its workers and its agent.
            now_s: monotonic time.
        """
        self._advance(now_s)
        if host in self._silent_hosts:
            self._silent_hosts[host][0].looked(counters, self._now_s)

    def joined(self, worker: int, now_s: float) -> None:
        """A worker begins to send heartbeats, or does so again over a new connection."""
        self._advance(now_s)
        self._gone.discard(worker)
        is_new = self._awaited.pop(worker, None) is not None
        # What was learned of a worker stays when it only connects again.
        watched = self._watched.setdefault(worker, WatchedWorker(worker, self._now_s, is_new=is_new))
        watched.connected = watched.is_fresh = True
        watched.lives(self._now_s)

    def left(self, worker: int) -> None:
        """A worker is no member any more: it has finished, or the coordinator goes on without it."""
        self._drop(worker)

    def heartbeat(self, worker: int, activity: WorkerActivity, now_s: float) -> None:
        """A heartbeat has arrived."""
        self._advance(now_s)
        watched = self._watched.get(worker)
        if watched is None:
            return
        # Read now: the sign of life below makes an end of it.
        starved_s = watched.starvation.excused_s
        # Time without a connection, or of the start, says nothing about gaps that are harmless.
        if not watched.is_fresh and not watched.starting:
            watched.gaps.add(min(self._now_s - watched.last_heartbeat_s - starved_s, GAP_MAX_S), self._now_s)
        previous = watched.activity
        if previous is None or not previous.same_stay(activity):
            self._enter(watched, activity)
        elif previous.moved_bytes != activity.moved_bytes:
            self._moved_s = self._now_s
        if starved_s:  # those who waited for it did not stand still meanwhile
            self._moved_s = min(self._moved_s + starved_s, self._now_s)
        watched.activity = activity
        watched.connected, watched.is_fresh = True, False
        watched.lives(self._now_s)
        watched.last_heartbeat_s = self._now_s
        self._follow_newest_step(activity)

    def link_lost(self, reporter: int, peer: int, now_s: float) -> None:
        """A worker reports, from the present generation, that its data-plane connection to a peer has ended."""
        self._advance(now_s)
        if reporter in self._watched and peer in self._watched and reporter != peer:
            # Said again, it does not begin the grace anew.
            self._broken.setdefault((reporter, peer), self._now_s)

    def exited(self, worker: int, text: str, now_s: float) -> None:
        """A worker's process has ended; it need not have joined.

        Args:
            text: how, such as "was killed by SIGKILL".
        """
        self._advance(now_s)
        if worker not in self._gone:
            self._exits.setdefault(worker, text)

    def pause(self, now_s: float) -> None:
        """All workers wait for the coordinator, until `resume`: none is suspected for this standstill (P7)."""
        self._advance(now_s)
        self._paused = True

    def resume(self, now_s: float) -> None:
        """The coordinator has said how to go on."""
        self._advance(now_s)
        if self._paused:
            self._paused, self._moved_s = False, self._now_s

    def new_generation(self, now_s: float) -> None:
        """A new generation begins: links are made again, so what was said of them is of the old one. The call also does
        the same as `resume`."""
        self.resume(now_s)
        self._broken.clear()

    def disconnected(self, worker: int, now_s: float) -> None:
        """A worker's control connection has ended. That proves nothing: it may dial again."""
        self._advance(now_s)
        watched = self._watched.get(worker)
        if watched is not None:
            watched.connected, watched.is_fresh = False, True

    # ------------------------------------------------------------------------------------------------- what follows

    def next_tick_s(self, now_s: float) -> float:
        """Tells when `tick` is to be called next at the latest; the present time if there is news that cannot wait."""
        if self._exits:
            return now_s
        if not self._broken:
            return now_s + TICK_S
        due_s = [self._due_s(pair) - self._now_s for pair in self._broken]
        return now_s + max(0.0, min(TICK_S, *due_s))

    def tick(self, now_s: float) -> list[Suspicion]:
        """Lists the workers that are held for lost from now on."""
        self._advance(now_s)
        # Ends first: they explain links that are broken, and silence.
        suspicions = self._ended()
        if not self._active_time.take_overslept():  # else what came in the meantime is read first
            # Before links are judged: about those of a worker that it spares nothing is decided yet (`_due_s`).
            self._look_for_silence_of_all()
            suspicions += self._cut_off()
            suspicions += self._never_begun()
            suspicions += self._hosts_cut_off()
            suspicions += self._silent()
            # Who is lost for another reason may be what the others wait for.
            if not suspicions:
                suspicions += self._computing_too_long()
            if not suspicions:
                suspicions += self._standing_still()
        return suspicions

    def _advance(self, now_s: float) -> None:
        self._now_s = self._active_time.passed_s(now_s)

    def _drop(self, worker: int) -> None:
        self._gone.add(worker)
        self._exits.pop(worker, None)
        self._awaited.pop(worker, None)
        watched = self._watched.pop(worker, None)
        if watched is None:
            return
        self._num_computing -= watched.computing
        self._broken = {pair: at_s for pair, at_s in self._broken.items() if worker not in pair}
        self._moved_s = self._now_s  # what stood still because of it may now go on

    def _suspect(self, worker: int, detected_by: str, reason: str) -> Suspicion:
        self._drop(worker)
        return Suspicion(worker, detected_by, reason)

    # -------------------------------------------------------------------------------------------------- exit and link

    def _ended(self) -> list[Suspicion]:
        ended = sorted(self._exits.items())
        return [self._suspect(worker, "exit", f"worker {worker} {text}") for worker, text in ended]

    def _cut_off(self) -> list[Suspicion]:
        """Of every link that is broken without an explanation, one end is held for lost: that which has lost more
        links, then that which more peers complain about, then that which is not heard, then the larger id. All workers
        of another host count as one, since a broken network breaks the links to all of them."""
        suspicions = []
        # Anew after each loss: what the lost worker has said, and what was said of it, is forgotten with it.
        while due := [pair for pair in self._broken if self._due_s(pair) <= self._now_s]:
            counterparts: dict[int, set[int]] = {}
            accusers: dict[int, set[int]] = {}
            # Also those whose grace is not over: they too tell which end has lost more links.
            for reporter, peer in self._broken:
                counterparts.setdefault(reporter, set()).add(peer)
                counterparts.setdefault(peer, set()).add(reporter)
                accusers.setdefault(reporter, set())
                accusers.setdefault(peer, set()).add(reporter)
            _, _, _, _, worker = max(
                (
                    self._num_apart(worker, counterparts[worker]),
                    self._num_apart(worker, accusers[worker]),
                    not self._watched[worker].connected,
                    self._now_s - self._watched[worker].alive_s > SILENCE_FLOOR_S / 2,
                    worker,
                )
                for pair in due
                for worker in pair
            )
            accusing = sorted(accusers[worker])
            says = (
                f"{_workers(accusing)} {'says' if len(accusing) == 1 else 'say'} so"
                if accusing
                else "it says so itself"
            )
            reason = (
                f"worker {worker} has lost its links to {_workers(sorted(counterparts[worker]))} "
                f"({says}), and no end of its process was reported within {LINK_GRACE_S * 1000:.0f} ms"
            )
            suspicions.append(self._suspect(worker, "link", reason))
        return suspicions

    def _due_s(self, pair: tuple[int, int]) -> float:
        """Computes when it is decided about a broken link. While one end has still to be heard after a silence of all
        it is not: whose words come first says nothing about whose link it was."""
        ends = [self._watched[worker] for worker in pair]
        if any(end.is_spared for end in ends):
            return math.inf
        return max(self._broken[pair], *(end.back_s for end in ends)) + LINK_GRACE_S

    def _host_of(self, worker: int) -> str:
        return self._domains.get(worker, "")

    def _num_apart(self, worker: int, others: Collection[int]) -> int:
        """Counts how many others there are to a worker: each one of its own host, and each other host."""
        here = self._host_of(worker)
        return len({(host, other if host == here else -1) for other in others for host in (self._host_of(other),)})

    # ------------------------------------------------------------------------------------------------------ heartbeat

    def _never_begun(self) -> list[Suspicion]:
        """Lists, of the workers that have not registered, those whose process was seen to stand still, and those whose
        process was not seen."""
        suspicions = []
        for worker, awaited in sorted(self._awaited.items()):
            still_s = awaited.still_s  # as it was seen: time without a look is another matter
            unseen_s = self._now_s - awaited.looked_s
            who = f"worker {worker} has not registered, and "
            if still_s > SILENCE_STARTING_S:
                reason = (
                    f"its process has used no processor time for {still_s:.1f} s (bound {SILENCE_STARTING_S:.1f} s)"
                )
            elif unseen_s > UNSEEN_START_S:
                reason = f"nothing was seen of its process for {unseen_s:.1f} s (bound {UNSEEN_START_S:.1f} s)"
            else:
                continue
            suspicions.append(self._suspect(worker, "heartbeat", who + reason))
        return suspicions

    def _common_gap_s(self) -> float:
        """Finds the longest gap lately that not only one worker has had: what disturbs two may disturb all."""
        # With the two zeros there is a second longest even of one worker, or none.
        return sorted([0.0, 0.0, *(watched.gaps.value_s for watched in self._watched.values())])[-2]

    def _usual_bound_s(self, watched: WatchedWorker, common_gap_s: float) -> float:
        """Computes the bound that a worker's heartbeats and those of others have taught, whatever it does at
        present."""
        gap_s = max(watched.gaps.value_s, common_gap_s)
        bound_s = max(SILENCE_FLOOR_S, min(SILENCE_FACTOR * gap_s, gap_s + SILENCE_MARGIN_S))
        return bound_s + self._held_up_s(watched.worker)

    def _bound_of(self, watched: WatchedWorker, common_gap_s: float) -> float:
        if watched.starting:
            return SILENCE_STARTING_S
        bound_s = self._usual_bound_s(watched, common_gap_s)
        if watched.gaps.count < self._learned_gaps or watched.beside_steps:
            return max(bound_s, SILENCE_UNLEARNED_S)
        return bound_s

    def _look_for_silence_of_all(self) -> None:
        """Checks whether all workers, or most, are silent together. If they were, and somebody is heard again, whatever
        was heard, it is not held against the others that they are not the first: each has a whole bound from now on.
        Between hosts that is at least as long as it was silent, up to `SENT_AGAIN_S`: a kernel doubles the time after
        which it sends again. A process that has not registered is silent with them if nobody has looked at it since
        they were heard last: looks are a second apart, which may be most of a bound."""
        watched = self._watched.values()
        hushed: list[int] = []
        # No usual bound is below the floor: mostly all have been heard too lately for any.
        if silent := [each for each in watched if self._now_s - each.alive_s > SILENCE_FLOOR_S / 2]:
            common_gap_s = self._common_gap_s()
            # By its usual bound: one that may be silent for longer at present is no sign that others are heard.
            hushed = [
                each.worker
                for each in silent
                if self._now_s - each.alive_s > self._usual_bound_s(each, common_gap_s) / 2
            ]
        newest_s = max([each.alive_s for each in watched], default=-math.inf) if self._awaited else -math.inf
        unseen = [each for each in self._awaited.values() if not each.was_seen or each.looked_s <= newest_s + STRAY_S]
        all_were_silent, were_together = self._all_silent, self.are_together
        self._all_silent = 0 < len(hushed) + len(unseen) == len(watched) + len(self._awaited)
        self.are_together = self._all_silent or self._is_crowd(hushed) or self._are_most_hosts(hushed)
        if (all_were_silent and not self._all_silent) or (were_together and not self.are_together):
            sent_again_s = SENT_AGAIN_S if len({self._host_of(each.worker) for each in watched}) > 1 else 0.0
            longest_s = max((self._now_s - each.alive_s for each in watched), default=0.0)
            for each in watched:
                each.spare(self._now_s, sent_again_s)
            # What is known of hosts is of the silence that is over: each has its whole time again.
            self._silent_hosts.clear()
            self._moved_s = self._now_s + min(longest_s, sent_again_s)  # nor could anything move

    def _is_crowd(self, workers: Sequence[int]) -> bool:
        return len(workers) >= CROWD and self._are_most(workers)

    def _are_most_hosts(self, workers: Sequence[int]) -> bool:
        """Tells whether most hosts, of several, have no other worker than these."""
        if not workers:
            return False
        heard = {self._host_of(worker) for worker in self._watched.keys() - set(workers)}
        hosts = {self._host_of(worker) for worker in self._watched}
        return len(hosts) > 1 and 2 * len(hosts - heard) > len(hosts)

    def _silent(self) -> list[Suspicion]:
        # No bound is below the floor: mostly all have been heard too lately to be even quiet.
        silent = [
            (watched, silence_s)
            for watched in self._watched.values()
            if (silence_s := self._now_s - watched.counted_s) > SILENCE_FLOOR_S / SILENCE_FACTOR
        ]
        if not silent:
            self._quiet = ()
            return []
        common_gap_s = self._common_gap_s()
        known = [(watched, silence_s, self._bound_of(watched, common_gap_s)) for watched, silence_s in silent]
        # Of all by the same measure, whichever worker computes.
        hushed = [watched.worker for watched, silence_s, bound_s in known if silence_s > bound_s / 2]
        quiet = (watched.worker for watched, silence_s, bound_s in known if silence_s > bound_s / SILENCE_FACTOR)
        self._quiet = tuple(sorted(quiet))
        # Since a real sign of life: to be spared again and again must not hide for ever that nobody is left.
        shortest_s = min([self._now_s - watched.alive_s for watched in self._watched.values()], default=math.inf)
        crowd = CROWD_FACTOR if self._is_crowd(hushed) else 1.0
        late: list[tuple[WatchedWorker, float, float]] = []
        for watched, silence_s, bound_s in known:
            # Another one has to compute: that this one does is no reason to wait, it may hang in just that.
            spare = self._num_computing > watched.computing and not watched.starting
            hurry = NO_HURRY if spare else 1.0
            silent_host = self._silent_hosts.get(self._host_of(watched.worker))
            is_mute = silent_host is not None and silent_host[0].is_mute(self._now_s)
            allowed_s = watched.allowed_s(bound_s * hurry * (CROWD_FACTOR if is_mute else crowd))
            if is_mute:  # what its kernel does not acknowledge says more
                allowed_s = max(allowed_s, self._hosts_factor * HOST_SILENT_S)
            if silence_s <= allowed_s:
                continue
            if watched.starvation.condemns(silence_s, allowed_s, self._now_s, self._can_look(watched.worker)):
                late.append((watched, silence_s, allowed_s))
            elif excuse := watched.starvation.take_excuse():
                self._excuses.append(
                    f"worker {watched.worker} has been silent for {silence_s:.2f} s (bound {allowed_s:.2f} s), {excuse}"
                )
        if late and self._all_silent and shortest_s < NOBODY_S:
            for watched in self._watched.values():
                watched.is_fresh = True  # it is no gap of one worker
            return []
        return [
            self._suspect(
                watched.worker,
                "heartbeat",
                f"worker {watched.worker} has been silent for {silence_s:.2f} s (bound {bound_s:.2f} s; its longest "
                f"gap lately was {watched.gaps.value_s:.2f} s{'' if watched.connected else '; it is disconnected'}"
                f"{watched.starvation.finding})",
            )
            for watched, silence_s, bound_s in sorted(late, key=lambda entry: entry[0].worker)
        ]

    def _hosts_cut_off(self) -> list[Suspicion]:
        """Lists the workers of hosts whose kernels acknowledge nothing; none if no worker at all is heard: then this
        host is cut off."""
        quiet = {worker for worker, each in self._watched.items() if self._now_s - each.alive_s > LOOK_S}
        if not quiet or len(quiet) == len(self._watched):
            self._silent_hosts.clear()
            return []
        silent: dict[str, list[int]] = {host: [] for host in map(self._host_of, quiet) if host}
        for worker in self._watched:
            if (host := self._host_of(worker)) in silent:
                silent[host].append(worker)
        known, self._silent_hosts = self._silent_hosts, {}
        for host, workers in silent.items():
            if quiet.issuperset(workers):
                last_heartbeat_s = max(self._watched[worker].counted_s for worker in workers)
                found = known[host][0] if host in known else HostSilence(last_heartbeat_s)
                self._silent_hosts[host] = found, tuple(sorted(workers))
        together = [worker for _, workers in self._silent_hosts.values() for worker in workers]
        factor = self._hosts_factor = CROWD_FACTOR if self._are_most_hosts(together) else 1.0
        return [
            self._suspect(worker, "host", f"worker {worker} is on host {host}, which is cut off: {finding}")
            for host, (silence, workers) in sorted(self._silent_hosts.items())
            if (finding := silence.finding(self._now_s, self._spared(workers, factor)))
            for worker in workers
        ]

    def _spared(self, workers: Iterable[int], factor: float) -> float:
        """Computes the factor on a silent host's bounds, if its workers have more time than that."""
        return max(self._watched[worker].allowed_s(factor * HOST_SILENT_S) for worker in workers) / HOST_SILENT_S

    def _are_most(self, workers: Sequence[int]) -> bool:
        """Tells whether these are more than half of all that are watched; of several hosts, on more than half of
        them."""
        hosts = {self._host_of(worker) for worker in self._watched}
        if len(hosts) == 1:
            return 2 * len(workers) > len(self._watched)
        return 2 * len({self._host_of(worker) for worker in workers}) > len(hosts)

    def _follow_newest_step(self, activity: WorkerActivity) -> None:
        """Takes a step that has been begun as a sign of life of all that were in the one before: they have voted."""
        here = (activity.generation, activity.step, activity.attempt)
        if here <= self._newest_step or activity.label in (*IDLE, *STARTING):
            return
        # No vote leads to the first step of a generation: it shows nobody to be alive.
        if here[0] == self._newest_step[0]:
            for watched in self._watched.values():
                if watched.activity is not None and watched.activity.generation == activity.generation:
                    watched.lives(self._now_s)
            # Another attempt, or a return to a checkpoint, tells nothing of how long a step takes.
            if here[1] == self._newest_step[1] + 1:
                self._steps.add(self._now_s - self._newest_step_s, self._now_s)
        self._newest_step, self._newest_step_s = here, self._now_s

    # ------------------------------------------------------------------------------------------------------- progress

    def _enter(self, watched: WatchedWorker, activity: WorkerActivity) -> None:
        """Takes note of what a worker has begun, and learns from what it has ended."""
        entered_s = self._now_s - activity.since_s
        previous = watched.activity
        if previous is not None:
            entered_s = max(watched.last_heartbeat_s, entered_s)  # at its last heartbeat it did something else
            if previous.computing and not previous.first_s:  # how long compiling takes says nothing of what is compiled
                # When exactly it ended that is not known, only that it was before it began this.
                took_s = max(0.0, previous.since_s - previous.starved_s) + min(
                    entered_s - watched.last_heartbeat_s, UNSEEN_S
                )
                longest = self._busy.setdefault(action_kind(previous.label), LongestLately(DURATION_HALF_LIFE_S))
                longest.add(took_s, self._now_s)
            # A standstill that has ended by itself was harmless.
            if self._num_computing == 0 and action_kind(previous.label) in PHASES:
                self._standstills.add(max(0.0, entered_s - self._moved_s), self._now_s)
        self._num_computing += activity.computing - watched.computing
        watched.entered_s = entered_s
        self._moved_s = self._now_s

    @property
    def _learned(self) -> bool:
        return self._steps.count >= LEARNED_STEPS

    def busy_bound_s(self, label: str, *, is_first: bool = False) -> float:
        """Computes the seconds for which a worker may compute what is called `label`; the first time, without using a
        processor."""
        kind = action_kind(label)
        longest = self._busy.get(kind)
        longest_s = 0.0 if longest is None else longest.value_s
        is_tight = kind in PHASES and longest is not None and self._learned and not is_first
        floor_s = BUSY_FLOOR_S if is_tight else UNLEARNED_S
        return max(floor_s, PROGRESS_FACTOR * longest_s)

    def _computing_too_long(self) -> list[Suspicion]:
        suspicions = []
        for watched in list(self._watched.values()):
            activity = watched.activity
            if activity is None or not activity.computing:
                continue
            # As it said itself: silence is another matter.
            age_s = activity.since_s if activity.first_s else watched.last_heartbeat_s - watched.entered_s
            age_s -= min(activity.starved_s, EXCUSED_MAX_S)
            if max(age_s, activity.first_s) <= BUSY_FLOOR_S:
                continue
            bound_s = self.busy_bound_s(activity.label, is_first=activity.first_s > 0.0)
            if activity.first_s > FIRST_S or (activity.first_s and age_s > bound_s):
                reason = (
                    f"worker {watched.worker} has been computing {activity} for {activity.first_s:.1f} s, for the "
                    f"first time (bound {FIRST_S:.0f} s), and neither it nor what it has started has used a processor "
                    f"for {age_s:.1f} s (bound {bound_s:.1f} s)"
                )
                suspicions.append(self._suspect(watched.worker, "progress", reason))
            elif age_s > bound_s:
                reason = (
                    f"worker {watched.worker} has been computing {activity} for {age_s:.1f} s (bound "
                    f"{bound_s:.1f} s, {PROGRESS_FACTOR:.0f} times the longest lately)"
                )
                suspicions.append(self._suspect(watched.worker, "progress", reason))
        return suspicions

    def stall_bound_s(self) -> float:
        """Computes the seconds for which all workers may wait without anything moving."""
        activities = [watched.activity for watched in self._watched.values()]
        ordinary = all(activity is None or action_kind(activity.label) in (*PHASES, *IDLE) for activity in activities)
        floor_s = max(STALL_FLOOR_S, self._steps.value_s) if ordinary and self._learned else UNLEARNED_S
        return max(floor_s, PROGRESS_FACTOR * self._standstills.value_s)

    def _standing_still(self) -> list[Suspicion]:
        if self._num_computing or not self._watched or self._paused:
            return []
        age_s = min(watched.last_heartbeat_s for watched in self._watched.values()) - self._moved_s  # as all have said
        if age_s <= STALL_FLOOR_S:
            return []
        activities = {
            worker: watched.activity for worker, watched in self._watched.items() if watched.activity is not None
        }
        # All wait for the coordinator, and nobody for another worker.
        if all(activity.label in IDLE for activity in activities.values()):
            return []
        if any(activity.label == WRITE for activity in activities.values()):
            return []  # all wait for a disk, perhaps through others
        bound_s = self.stall_bound_s()
        if age_s <= bound_s:
            return []
        worker = blame(activities)
        its = activities[worker]
        num_waiting = sum(worker in activity.waiting_on for activity in activities.values())
        if num_waiting:
            finding = f"{num_waiting} of {len(activities)} workers wait for worker {worker}, which is in {its}"
        else:
            finding = (
                f"of all that are waited for nothing is known, and worker {worker} is the furthest behind, in {its}"
            )
        if its.waiting_on:
            finding += f" and waits for {_workers(its.waiting_on)}"
        reason = f"nothing has moved for {age_s:.1f} s (bound {bound_s:.1f} s): {finding}"
        return [self._suspect(worker, "progress", reason)]


def _workers(workers: Iterable[int]) -> str:
    names = [str(worker) for worker in workers]
    return ("worker " if len(names) == 1 else "workers ") + ", ".join(names)
