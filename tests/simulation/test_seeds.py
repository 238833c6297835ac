"""Seeded and exhaustive searches: thousands of schedules here, all of them in the slow tests."""

import pytest

from verify.simulator.run import run_schedule
from verify.simulator.schedule import Schedule, parse_schedule, random_schedule
from verify.simulator.search import ALL_KINDS, JOB_OF_3, SPACES, Summary, explore, run_seeds, strike_points


def assert_clean(summary: Summary) -> None:
    shown = [
        f"{failure.violation}: python -m verify protocol --replay '{failure.schedule}'" for failure in summary.failures
    ]
    assert shown == []


@pytest.mark.parametrize("first", [0])
def test_seeded_schedules_have_no_violation(first):
    summary = run_seeds(range(first, first + 400))
    assert summary.num_schedules == 400
    assert_clean(summary)
    # The search goes where it is dangerous, not only through easy recoveries.
    for what in (
        "jobs finished",
        "jobs given up",
        "votes that only some survivors knew",
        "votes that asked for another attempt",
        "returns to a checkpoint",
        "decisions about several losses",
        "decisions while an earlier one was being carried out",
        "decisions that send parameters",
        "steps tried again",
        "losses while a recovery was planned",
        "coordinators lost while a recovery was planned",
        "planners that took too long",
        "losses while a checkpoint was committed",
        "jobs that were asked to stop",
        "steps of which something is kept",
        "steps of which something is kept twice",
        "micro-batches kept on their way",
        "coordinators followed by a candidate",
        "coordinators that learned that they were replaced",
        "stores that were seen to have gone back",
    ):
        assert summary.counts[what] > 0, what


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("3-workers-1-fault", 240),
        ("3-workers-2-faults", 800),
        pytest.param("3-workers-batches-1-fault", 160, marks=pytest.mark.slow),
        ("3-workers-change-1-fault", 480),
        ("3-workers-change-2-kills", 200),
        pytest.param("4-workers-1-fault", 400, marks=pytest.mark.slow),
        pytest.param("3-workers-slow-plan-2-faults", 300, marks=pytest.mark.slow),
        ("3-workers-slow-commit-2-faults", 400),
        ("3-workers-2-candidates-1-fault", 40),
        pytest.param("3-workers-2-candidates-2-faults", 800, marks=pytest.mark.slow),
        ("4-workers-2-hosts-1-fault", 20),
        ("3-workers-2-hosts-join-1-kill", 80),
        ("3-workers-2-agents-join-1-fault", 80),
        pytest.param("4-workers-2-kills", 240, marks=pytest.mark.slow),
        ("4-workers-salvage-1-fault", 40),
        ("4-workers-spoiled", 6),
        ("3-workers-spoiled-and-usurped", 400),
        ("3-workers-salvage-2-kills", 480),
        ("3-workers-1-flip", 12),
        ("3-workers-1-slip", 12),
    ],
)
def test_a_part_of_all_schedules_of_small_jobs_has_no_violation(name, parts):
    summary = explore(SPACES[name], part=parts // 2, parts=parts)
    assert summary.num_schedules > 50
    assert_clean(summary)


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        ("plan_delay=15 kill:0@0 suspect:1@13", "losses while a recovery was planned"),
        ("widths=2,2 plan_delay=20 kill:0@20 kill:c@37", "coordinators lost while a recovery was planned"),
        (
            "widths=2,2 heartbeat_bound=15 plan_delay=20 isolate:0@56+31",
            "newer votes while a recovery was planned",
        ),
        ("widths=2,2 plan_delay=60 kill:0@20", "planners that took too long"),
    ],
)
def test_what_comes_while_a_recovery_is_planned_is_dealt_with(schedule, what):
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")
    assert outcome.counts[what] == 1


def test_a_member_that_is_interrupted_on_its_way_back_to_a_checkpoint_goes_back_once_more():
    schedule = (
        "widths=2,3 blocks_per_layer=1 num_microbatches=3 retry_step=2 ask_step=1 tied=1 seed=357586546 exit_delay=3 "
        "link_delay=30 slow_worker=1 slow_by=5 plan_delay=4 kill:2@107 suspect:3@145 kill:3@148 kill:4@167"
    )
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_a_checkpoint_is_forgotten_with_its_coordinator_and_all_workers_that_wrote_it():
    schedule = (
        "widths=1,1 blocks_per_layer=1 num_microbatches=1 steps=7 checkpoint_every=1 join_step=2 seed=386808924 "
        "commit_delay=15 hang:1@27+75 usurp:c@80+18 suspect:0@83"
    )
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_a_link_that_is_made_again_within_an_generation_does_not_hide_that_frames_were_lost():
    schedule = "widths=2,1,1 blocks_per_round=8 slow_worker=3 slow_by=40 kill:1@15 cut:0-3@42"
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_a_copy_that_is_lost_again_on_the_same_worker_is_sent_again_and_awaited_once():
    """A follower is lost, then its copy flips: the second refill leads to the placement that the first has led to."""
    schedule = "widths=4 blocks_per_layer=1 num_microbatches=4 steps=6 suspect:1@34 kill:c@42 flip:2@103"
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_what_was_arriving_is_not_compared_at_rest():
    """A loss finds one worker in its next attempt, and the others where they compare what is to be written."""
    job = "widths=2,1,1 blocks_per_layer=1 num_followers=2 steps=8 checkpoint_every=1 retry_step=2 leave_step=1"
    schedule = parse_schedule(f"{job} blocks_at_once=3 candidates=2 kill:2@177")
    assert run_schedule(schedule).violation is None


def test_a_joiner_whose_last_words_come_after_its_end_is_lost_as_a_member():
    job = "widths=3 num_microbatches=3 steps=7 retry_step=2 join_step=1 seed=932715521 link_delay=30 restart_delay=1"
    outcome = run_schedule(parse_schedule(f"{job} kill:c@69 kill:3@72"))
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_a_copy_that_a_refused_vote_made_count_is_known_when_a_decision_applies_the_next_one():
    job = (
        "widths=3,2 num_microbatches=3 stop_step=1 blocks_at_once=2 blocks_per_round=8 tied=1 seed=634478333 "
        "link_delay=5 slow_worker=0 slow_by=5 keeps_in_flight=0 commit_delay=15"
    )
    outcome = run_schedule(parse_schedule(f"{job} cut:0-3@51 flip:0@106 suspect:4@180"))
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_a_decision_that_reaches_the_store_twice_gives_nothing_up():
    schedule = (
        "widths=3 num_microbatches=3 steps=2 seed=707247151 exit_delay=6 plan_delay=15 candidates=2 store_delay=2 "
        "kill:1@4 kill:2@14 late:s@28+10 back:s@31+2"
    )
    assert run_schedule(parse_schedule(schedule)).violation is None


def test_a_checkpoint_that_was_put_aside_is_written_again():
    """A copy flips, its only other one is lost: the job goes back to the checkpoint before the newest."""
    job = "widths=1,2 steps=8 checkpoint_every=1 retry_step=2 change_step=2 join_step=2 tied=1 accumulator_bits=48"
    schedule = parse_schedule(f"{job} seed=67663358 agents=3 disconnect:a2@184+150 flip:0@276")
    outcome = run_schedule(schedule)
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_parameters_of_which_some_have_arrived_when_the_layer_goes_have_not_changed_in_memory():
    schedule = (
        "widths=3,2 num_microbatches=3 seed=650015026 restart_delay=1 mid_action=2 replans=1 cut:1-2@37 kill:c@40 "
        "suspect:2@51"
    )
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")


@pytest.mark.parametrize(
    ("schedule", "rollbacks"),
    [
        ("widths=2,1 hang:2@0+15000", 0),
        ("widths=1,1 num_followers=0 hang:1@0+15000", 1),
        ("widths=2,1 hang:0@0+15000 hang:1@0+15000", 1),
        ("widths=2,1 kill:0@0 kill:1@0", 1),
        ("widths=2,1 hang:0@0+15000 hang:1@0+15000 kill:c@14", 1),
    ],
)
def test_workers_that_never_register_are_left_behind_and_what_they_held_is_made_again(schedule, rollbacks):
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")
    assert outcome.counts["returns to a checkpoint"] == rollbacks


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100_000, 10_000))
def test_a_hundred_thousand_seeded_schedules_have_no_violation(first):
    assert_clean(run_seeds(range(first, first + 10_000)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SPACES)
def test_all_schedules_of_small_jobs_have_no_violation(name):
    assert_clean(explore(SPACES[name]))


def test_a_schedule_decides_everything():
    for seed in (3, 4, 21):
        logs: list[list[str]] = [[], []]
        outcomes = [run_schedule(random_schedule(seed), log=log.append) for log in logs]
        assert outcomes[0] == outcomes[1]
        assert logs[0] == logs[1]
        assert len(logs[0]) > 30
        assert run_schedule(random_schedule(seed)) == outcomes[0], "watching changes nothing"


@pytest.mark.parametrize(
    ("schedule", "num_claims", "num_replaced"),
    [
        ("candidates=2 kill:h@20", 2, 0),
        ("candidates=2 kill:c@0", 2, 0),
        ("candidates=2 kill:c@1 late:s@1+30", 2, 0),
        ("candidates=2 kill:1@20 shut:c@20+90", 2, 1),
        ("candidates=2 kill:1@20 usurp:c@30+90", 2, 0),
        ("candidates=2 kill:1@20 lost:s@20+150", 1, 0),
        ("candidates=2 kill:1@20 mute:s@20+15", 1, 0),
    ],
)
def test_a_coordinator_is_followed_when_its_beat_stands_still_and_the_store_answers(schedule, num_claims, num_replaced):
    """Its host is lost; it is killed before it has written; it cannot reach the store, or is stopped, while others can.
    Nobody is elected while the store is gone."""
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")
    assert outcome.counts["coordinators followed by a candidate"] == num_claims - 1
    assert outcome.counts["coordinators that learned that they were replaced"] == num_replaced


@pytest.mark.parametrize(
    ("schedule", "ended", "seen"),
    [
        ("candidates=2 kill:1@20 back:s@18+10", "ended", "and the last one is not there"),
        ("candidates=2 kill:c@20 back:s@18+10", "ended", "a member has heard of"),
        ("candidates=2 kill:h@20 back:s@18+10", "ended", "a member has heard of"),
        ("candidates=2 back:s@18+10", "finished", ""),
    ],
)
def test_a_store_that_was_put_back_ends_the_job_before_anybody_follows_another_history(schedule, ended, seen):
    """Its coordinator finds the last entry missing; the next one hears it from a member. A job that has nothing more to
    write ends as it would have."""
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, ended)
    assert seen in outcome.reason
    assert outcome.counts["stores that were seen to have gone back"] == (ended == "ended")


@pytest.mark.parametrize(
    "faults", ["kill:a1@60", "disconnect:a1@60+40", "disconnect:a1@60+150 kill:a1@90", "kill:c@62 kill:a1@63"]
)
def test_a_joiner_is_started_by_one_incarnation_of_an_agent_whatever_happens_to_it(faults):
    outcome = run_schedule(parse_schedule(f"widths=2,1 steps=9 join_step=1 agents=2 {faults}"))
    assert (outcome.violation, outcome.ended) == (None, "finished")


def test_the_undisturbed_job_ends():
    outcome = run_schedule(Schedule())
    assert (outcome.violation, outcome.ended, outcome.fired) == (None, "finished", ())
    assert outcome.counts["jobs finished"] == 1


def test_every_kind_of_fault_strikes():
    space = SPACES["3-workers-1-fault"]._replace(conditions=SPACES["3-workers-1-fault"].conditions[:1])
    struck = set()
    for kind in ALL_KINDS:
        one = space._replace(kinds=((kind,),))
        summary = explore(one, parts=10, part=5)
        assert_clean(summary)
        assert summary.counts["schedules in which 1 faults struck"] == summary.num_schedules > 0
        struck.add(kind)
    assert struck == set(ALL_KINDS)


@pytest.mark.parametrize(("num_kills", "at_least"), [(1, 60), pytest.param(2, 1000, marks=pytest.mark.slow)])
def test_the_parts_of_a_space_are_the_whole(num_kills, at_least):
    job = JOB_OF_3._replace(steps=1, widths=(1, 1))
    space = SPACES["3-workers-2-faults"]._replace(job=job, kinds=(("kill",),) * num_kills)
    whole = explore(space)
    parts = [explore(space, part=part, parts=3) for part in range(3)]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert merged.num_schedules == whole.num_schedules > at_least
    assert merged.counts == whole.counts


def test_instants_at_one_time_differ_only_for_who_acted():
    #           0       1       2       3       4        5
    instants = [(0, 1), (0, 2), (0, 1), (3, 2), (3, -1), (3, 2)]
    assert strike_points(instants, {1}, 0) == [0, 1, 3]
    assert strike_points(instants, {2}, 0) == [0, 2, 3, 4]
    assert strike_points(instants, {-1}, 0) == [0, 3, 5]
    assert strike_points(instants, {-1}, 2) == [2, 3, 5]


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        ("widths=2,1 steps=14 respawns=1 kill:1@60", {"places taken again": 1, "decisions": 2}),
        ("widths=2,2 steps=9 agents=2 kill:a1@60", {"workers held for lost by: host": 1, "decisions": 1}),
        ("widths=2,2 steps=9 agents=2 detects=1 kill:a1@60", {"workers held for lost by: host": 1, "decisions": 1}),
        ("widths=2,1 steps=9 detects=1 hang:1@60+150", {"workers held for lost by: heartbeat": 1, "decisions": 1}),
        ("widths=2,2 steps=8 num_hosts=2 detects=1 isolate:1-3@99+150", {"workers held for lost by: host": 2}),
        ("widths=2,2 steps=8 num_hosts=2 detects=1 hang:1-3@99+150", {"workers held for lost by: heartbeat": 2}),
        ("widths=1,1 num_microbatches=1 steps=11 leave_step=2", {"jobs stopped because too few would stay": 0}),
        ("widths=1,1 num_microbatches=1 leave_step=2 leavers=2", {"jobs stopped because too few would stay": 1}),
        ("widths=2,1 steps=14 leave_step=1 drain_delay=20", {"workers held for lost by: drain": 1}),
        ("widths=2,1 steps=14 leave_step=1", {"workers held for lost by: drain": 0, "decisions": 1}),
        ("widths=2,2 steps=14 agents=2 notice:a1@60+400", {"workers held for lost by: host": 0, "decisions": 1}),
        ("widths=4,4 num_microbatches=4 steps=20 notice:1@40+150 notice:2@60+150", {"decisions": 1}),
        ("widths=1,1 num_microbatches=1 steps=14 join_step=1 notice:2@40+100", {"workers started to join": 1}),
    ],
)
def test_what_is_decided_about_members(schedule, counts):
    outcome = run_schedule(parse_schedule(schedule))
    assert (outcome.violation, outcome.ended) == (None, "finished")
    assert {what: outcome.counts[what] for what in counts} == counts
