"""Hosts as they come and go: who is started where, and who is lost with whom, one event after the other."""

import math

from elaswave.protocol.membership.hosts import Came, Host, Hosts, HostState, Turned

LABELS = ("rack-1/x", "rack-2/b")


def two() -> tuple[Hosts, Host, Host]:
    """A job of four workers that has begun on hosts a and b, both connected."""
    hosts = Hosts((0, 1, 0, 1), LABELS, home=11)
    return hosts, came(hosts, "a", 11), came(hosts, "b", 22)


def came(hosts: Hosts, node: str, incarnation: int, slots: int = 2) -> Host:
    answer = hosts.hello(node, incarnation, slots)
    assert isinstance(answer, Came), answer
    host = hosts.add(answer, 0.0)
    hosts.connected(host)
    return host


def silent(*incarnations: int):
    return lambda incarnation: incarnation in incarnations


def test_a_job_begins_once_all_of_its_hosts_are_there():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=11)
    assert not hosts.is_complete
    a = came(hosts, "a", 11)
    assert not hosts.is_complete and hosts.num_here == 1
    b = came(hosts, "b", 22)
    assert hosts.is_complete and (hosts.first_workers(a), hosts.first_workers(b)) == ((0, 2), (1, 3))
    assert hosts.room == 0 and hosts.choose() is None
    assert [hosts.of(worker) for worker in range(5)] == [a, b, a, b, None]


def test_a_host_that_goes_before_the_job_begins_makes_room_for_another():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=99)
    a = came(hosts, "a", 11)
    hosts.disconnected(11, 1.0)
    assert hosts.overdue(5.9, 5.0) == [] and hosts.overdue(6.1, 5.0) == [a]
    hosts.give_up(a)
    assert came(hosts, "c", 33).number == 0
    assert not hosts.is_complete
    came(hosts, "b", 22)
    assert hosts.is_complete


def test_a_job_does_not_begin_with_hosts_that_are_away_or_leave():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=99)
    a = came(hosts, "a", 11)
    hosts.disconnected(11, 1.0)
    b = came(hosts, "b", 22)
    assert not hosts.is_complete
    hosts.leaving(22)
    hosts.connected(a)
    assert not hosts.is_complete
    c = came(hosts, "c", 33)
    assert c.number == b.number and b.state is HostState.GONE, "who leaves gives way"
    assert hosts.is_complete
    hosts.disconnected(33, 2.0)
    assert hosts.is_complete, "what has begun has begun"


def test_before_the_job_begins_who_is_away_gives_way_to_who_comes():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=99)
    a = came(hosts, "a", 11)
    hosts.disconnected(11, 1.0)
    b = came(hosts, "b", 22)
    hosts.disconnected(22, 1.0)
    again = came(hosts, "b", 23)
    assert again.number == b.number and a.state is HostState.AWAY, "a node's next agent takes the node's part"
    assert came(hosts, "c", 33).number == a.number and a.state is HostState.GONE
    assert hosts.is_complete
    turned = hosts.hello("a", 11, 2)
    assert isinstance(turned, Turned) and turned.verdict == "again"


def test_a_host_without_room_for_its_share_is_a_mistake():
    answer = Hosts((0, 1, 0, 1), LABELS, home=11).hello("a", 11, 1)
    assert isinstance(answer, Turned) and answer.verdict == "misused"
    assert "takes 1 workers, but the job begins with 2 on each" in answer.reason


def test_a_node_has_one_agent_at_a_time():
    hosts, _, b = two()
    answer = hosts.hello("b", 23, 2)
    assert isinstance(answer, Turned) and answer.verdict == "needless"
    assert hosts.hello("b", 22, 2) is b, "the same one has connected again"
    hosts.disconnected(22, 1.0)
    later = came(hosts, "b", 23)
    assert b.state is HostState.GONE and later.number == 2
    turned = hosts.hello("b", 22, 2)
    assert isinstance(turned, Turned) and turned.verdict == "again", "its ids are burnt"


def test_workers_that_join_are_started_where_most_room_is():
    hosts, a, b = two()
    c = came(hosts, "c", 33, slots=3)
    assert (hosts.room, hosts.choose()) == (3, c)
    hosts.placed(4, c.number)
    hosts.ended(1)
    hosts.ended(3)
    assert (hosts.room, hosts.choose()) == (4, b)
    hosts.leaving(22)
    assert (hosts.room, hosts.choose()) == (2, c), "nobody is started where all leave"
    hosts.disconnected(33, 1.0)
    assert hosts.room == 0
    any_number = came(hosts, "d", 44, slots=0)
    assert hosts.room == math.inf and hosts.choose() is any_number
    assert a.workers == {0, 2} and c.workers == {4}


def test_all_workers_of_a_host_are_lost_with_its_agent():
    hosts, _, _ = two()
    assert hosts.lost_with([1], silent()) == {}, "its agent is there: it is one worker's loss"
    assert hosts.lost_with([1], silent(22)) == {"b": {1, 3}}
    hosts.disconnected(22, 1.0)
    assert hosts.lost_with([], silent()) == {}, "an agent alone is nobody's loss: its workers commit"
    assert hosts.lost_with([3], silent()) == {"b": {1, 3}}
    assert hosts.lost_with([0], silent(11)) == {}, "that of the coordinator's own host shares its fate"


def test_a_successor_knows_hosts_and_waits_for_their_agents():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=11)
    a = hosts.restore(Came(0, "a", 11, 2), 100.0)
    b = hosts.restore(Came(1, "b", 22, 2), 100.0)
    assert hosts.is_complete and hosts.num_here == 0
    assert hosts.lost_with([1], silent(22)) == {}, "they have not had time to find it"
    assert hosts.hello("a", 11, 2) is a
    hosts.connected(a)
    assert hosts.overdue(131.0, 30.0) == [b]
    hosts.give_up(b)
    assert hosts.overdue(131.0, 30.0) == []


def test_a_host_takes_the_part_that_bears_its_name_and_a_node_keeps_its_label():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=11)
    b, a = came(hosts, "b", 22), came(hosts, "a", 11)
    assert (a.number, a.label, b.number, b.label) == (0, "rack-1/x", 1, "rack-2/b")
    assert [hosts.label_of(worker) for worker in range(5)] == ["rack-1/x", "rack-2/b"] * 2 + [""]
    hosts.disconnected(22, 1.0)
    again, new = came(hosts, "b", 23), came(hosts, "c", 33)
    assert (again.number, again.label, new.number, new.label) == (2, "rack-2/b", 3, "host-3")
    assert came(Hosts((0, 0), home=11), "a", 11).label == "", "one host is no domain"


def test_the_coordinators_own_host_is_never_held_for_lost():
    """Its agent may be slow to connect again where processors are short; if it had ended, so had the coordinator."""
    hosts, a, b = two()
    for incarnation in (11, 22):
        hosts.disconnected(incarnation, 1.0)
    assert hosts.overdue(100.0, 5.0) == [b]
    assert hosts.lost_with([0, 1], silent(11, 22)) == {"b": {1, 3}}
    answer = hosts.hello("a", 12, 2)
    assert isinstance(answer, Turned) and answer.verdict == "needless", "the one that is there will be back"
    assert hosts.hello("a", 11, 2) is a


def test_the_coordinators_own_host_gives_way_to_nobody_that_comes_before_the_job_begins():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=11)
    a = came(hosts, "a", 11)
    hosts.disconnected(11, 1.0)
    b = came(hosts, "b", 22)
    answer = hosts.hello("c", 33, 2)
    assert isinstance(answer, Turned) and answer.verdict == "again", answer
    assert (a.state, b.state) == (HostState.AWAY, HostState.HERE)
    hosts.connected(a)
    assert hosts.is_complete


def test_a_host_that_leaves_gives_way_before_the_job_begins_wherever_the_coordinator_is():
    hosts = Hosts((0, 1, 0, 1), LABELS, home=11)
    a = came(hosts, "a", 11)
    hosts.leaving(11)
    came(hosts, "b", 22)
    assert came(hosts, "c", 33).number == a.number and a.state is HostState.GONE
    assert hosts.is_complete


def fall(hosts: Hosts, host: Host) -> None:
    """A host's agent ends, and the others go on without it."""
    hosts.disconnected(host.incarnation, 0.0)
    hosts.give_up(host)


def test_a_node_that_never_commits_is_turned_away_after_three_agents():
    hosts, _, b = two()
    records = []
    for incarnation in (23, 24):
        fall(hosts, b)
        answer = hosts.hello("b", incarnation, 2)
        assert isinstance(answer, Came) and answer.num_fruitless == incarnation - 22
        records.append(answer)
        b = hosts.add(answer, 0.0)
        hosts.connected(b)
        hosts.placed(incarnation, b.number)
        hosts.committed([0, 2])
    fall(hosts, b)
    turned = hosts.hello("b", 25, 2)
    assert isinstance(turned, Turned) and turned.verdict == "misused"
    assert "3 agents of node b have ended before any of their workers" in turned.reason
    successor = Hosts((0, 1, 0, 1), LABELS, home=11)
    last = successor.restore(records[-1], 0.0)
    successor.placed(24, last.number)
    fall(successor, last)
    assert isinstance(successor.hello("b", 25, 2), Turned), "a later coordinator knows it too"
    assert isinstance(successor.hello("c", 33, 2), Came)


def test_a_committed_step_a_notice_and_a_host_without_workers_do_not_count_against_a_node():
    hosts, _, b = two()
    for incarnation in range(23, 33):
        fall(hosts, b)
        b = came(hosts, "b", incarnation)
        if incarnation > 26:  # those before have had no workers
            hosts.placed(incarnation, b.number)
            hosts.leaving(incarnation)
        assert b.num_fruitless == (incarnation == 23), "the first one, whose worker had no part in a step, counts"
    hosts.placed(50, b.number)
    hosts.committed([0, 50])
    fall(hosts, b)
    assert came(hosts, "b", 40).num_fruitless == 0


def test_a_host_of_which_a_worker_has_committed_stays_proven_when_all_its_workers_have_ended():
    hosts, _, b = two()
    hosts.placed(50, b.number)
    hosts.committed([0, 50])
    for worker in [*b.workers]:
        hosts.ended(worker)
    hosts.placed(51, b.number)
    fall(hosts, b)
    assert came(hosts, "b", 40).num_fruitless == 0


def test_workers_of_an_agent_are_not_those_of_the_next_one_with_its_number():
    hosts = Hosts((0, 1), home=99)
    first = hosts.add(Came(0, "a", 1, 0, 0), 0.0)
    hosts.connected(first)
    hosts.placed(5, 0)
    hosts.disconnected(1, 1.0)
    came = hosts.hello("a", 3, 0)
    assert came == Came(0, "a", 3, 0, 1), "the job has not begun: its number is free"
    next_one = hosts.add(came, 2.0)
    assert hosts.of(5) is first and first.state is HostState.GONE
    assert hosts.of(0) is next_one, "who has started nothing yet starts what the job begins with"
    assert hosts.stranded == {5}
