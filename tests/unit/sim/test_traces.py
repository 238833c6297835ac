"""Scenarios read from traces: each form, which is recognised, and what is wrong with a line."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sim.test_failures import walk

from elaswave.errors import DataError, UsageError
from elaswave.sim.cluster.failures import Scenario
from elaswave.sim.cluster.traces import FORMATS, read_trace
from elaswave.sim.cluster.traces.formats import read_rates
from elaswave.sim.cluster.traces.history import timestamp_s


def happened(scenario: Scenario) -> list[tuple[float, str, int]]:
    """Seconds, kind and number of workers of every change."""
    return [(each.at_s, each.event.kind, len(each.event.workers)) for each in scenario.changes]


def sizes(scenario: Scenario) -> list[int]:
    """How many workers are there after every change."""
    now = len(scenario.initial)
    return [now := now + (number if kind == "joined" else -number) for _, kind, number in happened(scenario)]


# --------------------------------------------------------------------------------------------------------------- events

TRACE = """# spot instances
1000,add,a
1000,add,b

2000,add,c
3000,remove,a
3000,remove,c
3000,add,d
5000,add,a
"""


def test_a_trace():
    scenario = read_trace(TRACE.splitlines(), name="small", workers_per_node=2)
    assert (scenario.initial, scenario.nodes, scenario.duration_s) == ((0, 1, 2, 3), (0, 0, 1, 1), 4.0)
    assert [(each.at_s, each.event.kind, each.event.workers, each.nodes) for each in scenario.changes] == [
        (1.0, "joined", (4, 5), (2, 2)),
        (2.0, "lost", (0, 1, 4, 5), ()),
        (2.0, "joined", (6, 7), (3, 3)),
        (4.0, "joined", (8, 9), (0, 0)),
    ]
    assert scenario.num_workers_max == 6
    assert scenario.counts == {"joined": 3, "lost": 1}
    assert scenario.mtbf_s == 4.0
    assert scenario.source == "trace small"
    walk(scenario)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,add,a\n5,add", "trace t, line 2 has 2 fields"),
        ("0,add,a\n\n1.5,add,b", r"trace t, line 3 has the time '1.5'; needed are milliseconds"),
        ("-1,add,a", "line 1 has the time '-1'"),
        ("0,add,a\n1" + 5000 * "0" + ",remove,a", "line 2 has the time '1000.*at most 15 digits"),
        ("9,add,a\n8,add,b", "line 2 goes back in time, from 9 to 8 ms"),
        ("0,added,a", "line 1 says 'added'; needed is add or remove"),
        ("0,add,", "line 1 names no node"),
        ("0,add,a\n1,add,a", "line 2 adds a, which is there already"),
        ("0,remove,a", "line 1 removes a, which is not there"),
        ("# nothing", "trace t has no line"),
    ],
)
def test_malformed_traces(lines, message):
    with pytest.raises(DataError, match=message):
        read_trace(lines.splitlines(), name="t")


@pytest.mark.parametrize("bad", [{"workers_per_node": 0}, {"nodes_per_rack": 0}])
def test_a_trace_of_nodes_without_workers(bad):
    with pytest.raises(ValueError, match="0 .*at least 1 is needed"):
        read_trace(["0,add,a"], **bad)


def test_nodes_of_a_trace_share_racks():
    scenario = read_trace(TRACE.splitlines(), nodes_per_rack=3)
    assert scenario.racks == (0, 0, 0, 1)
    assert read_trace(TRACE.splitlines()).racks == ()


# ---------------------------------------------------------------------------------------------------------------- polls

POLLS = """2021-12-11, 11:11:30, 5
2021-12-11, 11:13:10, 5
2021-12-11, 11:14:50, 2
2021-12-11, 11:24:50, 4
2021-12-12, 11:11:30, 4
"""


def test_a_poll_log():
    """As Bamboo's of Google Cloud."""
    scenario = read_trace(POLLS.splitlines(), name="gcloud", workers_per_node=2)
    walk(scenario)
    assert (len(scenario.initial), scenario.nodes) == (10, (0, 0, 1, 1, 2, 2, 3, 3, 4, 4))
    assert happened(scenario) == [(200.0, "lost", 6), (800.0, "joined", 4)]
    assert scenario.changes[1].nodes == (5, 5, 6, 6), "machines that come are new ones"
    lost = scenario.changes[0].event.workers
    assert all(worker ^ 1 in lost for worker in lost), "both workers of a machine go"
    assert (scenario.duration_s, scenario.source) == (86_400.0, "trace gcloud")


def test_which_machines_go_is_drawn():
    lines = ["2021-12-11, 11:00:00, 40", "2021-12-11, 11:01:00, 20"]
    one, again, two = (read_trace(lines, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.changes != two.changes
    newest = set(range(20, 40))
    assert 0 < len(newest & set(one.changes[0].event.workers)) < 20


def test_polls_that_overlap():
    """Lines as Bamboo's v100x1-east1c.txt begins: each poll is written with the minute before and after it."""
    lines = ["2021-12-10, 13:07:45, 80", "2021-12-10, 13:08:45, 80", "2021-12-10, 13:09:45, 80",
             "2021-12-10, 13:08:45, 70", "2021-12-10, 13:09:45, 70", "2021-12-10, 13:10:45, 70",
             "2021-12-10, 13:09:45, 60", "2021-12-10, 13:10:45, 60", "2021-12-10, 13:11:45, 60"]  # fmt: skip
    scenario = read_trace(lines)
    assert happened(scenario) == [(60.0, "lost", 10), (120.0, "lost", 10)]
    assert (sizes(scenario), scenario.duration_s) == ([70, 60], 240.0)


def test_a_log_that_begins_without_machines():
    scenario = read_trace(["2021-12-11, 11:00:00, 0", "2021-12-11, 11:01:00, 2"])
    assert (scenario.initial, happened(scenario)) == ((), [(60.0, "joined", 2)])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("2021-13-11, 11:00:00, 4", "trace t, line 1 has no time: '2021-13-11, 11:00:00, 4'; needed are date, time"),
        ("2021-12-11, 11:00:00, 4\n2021-12-11, 11:01:00", "line 2 has the count ''; needed is a whole number"),
        ("2021-12-11, 11:00:00, -4", "line 1 has the count '-4'"),
        ("2021-12-11, 11:00:00, 9999999", "line 1 has the count '9999999'.* at most 1,000,000"),
        ("2021-12-11, 11:00:00, 4\n\n2021-12-11, 10:00:00, 4", "line 3 goes back in time, by 3600 s: '2021"),
    ],
)
def test_malformed_poll_logs(lines, message):
    with pytest.raises(DataError, match=message):
        read_trace(lines.splitlines(), name="t")


@given(st.datetimes(datetime(1970, 1, 1), datetime(2400, 1, 1)))
def test_dates_are_counted_as_the_calendar_does(when):
    exact = when.replace(microsecond=0)
    assert timestamp_s(exact.isoformat(sep=" ")) == exact.replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("text", ["2023-02-29 00:00:00", "2023-04-31 00:00:00", "2023-01-00 00:00:00",
                                  "2023-01-01 24:00:00", "1969-12-31 00:00:00", "2023-1-1 00:00:00"])  # fmt: skip
def test_dates_that_are_none(text):
    assert timestamp_s(text) is None


# --------------------------------------------------------------------------------------------------------------- philly

PHILLY_CPU = """time,machine_id,cpu_util
2017-10-03 00:00:00 PDT,m1,31.8
2017-10-03 00:01:00 PDT,m1,NA
2017-10-03 00:02:00 PDT,m1,NA
2017-10-03 00:03:00 PDT,m1,1.5
2017-10-03 00:00:00 PDT,m2,NA
2017-10-03 00:01:00 PDT,m2,2.0
2017-10-03 00:05:00 PDT,m2,2.0
"""


def test_philly_says_when_servers_were_offline():
    scenario = read_trace(PHILLY_CPU.splitlines(), workers_per_node=2)
    walk(scenario)
    assert scenario.initial == (0, 1)
    assert happened(scenario) == [(60.0, "lost", 2), (60.0, "joined", 2), (180.0, "joined", 2)]
    assert [change.nodes for change in scenario.changes] == [(), (1, 1), (0, 0)], "m1 comes back in its node"
    assert scenario.duration_s == 300.0
    memory = [line.replace("31.8", "528272672.0,2030730.6") for line in PHILLY_CPU.splitlines()[1:2]]
    assert read_trace(memory).initial == (0,)


def test_no_value_is_offline():
    """As in copies of Philly's logs that pandas has written."""
    assert read_trace(PHILLY_CPU.replace("NA", "").splitlines()) == read_trace(PHILLY_CPU.splitlines())


def test_days_of_philly_are_in_any_order():
    """As in the published log: each server's days follow each other as they happen to lie."""
    in_order = PHILLY_CPU.splitlines()[1:5] + [
        "2017-10-04 00:00:00 PDT,m1,NA",
        "2017-10-04 00:01:00 PDT,m1,3.0",
        "2017-10-09 00:00:00 PDT,m1,3.0",
    ]
    scenario = read_trace(in_order)
    assert happened(scenario) == [
        (60.0, "lost", 1), (180.0, "joined", 1), (86_400.0, "lost", 1), (86_460.0, "joined", 1)
    ]  # fmt: skip
    assert read_trace([in_order[6], *in_order[4:6], *in_order[:4]]) == scenario
    assert read_trace([*in_order[4:6], in_order[6], *in_order[:4]]) == scenario


def test_philly_says_when_gpus_were_offline():
    lines = ["2017-11-05 01:59:00 PDT,m29,60.8,99.3,100.0,NA,NA,NA,NA,NA,",
             "2017-11-05 01:00:00 PST,m29,60.8,NA,0.0,NA,NA,NA,NA,NA,"]  # fmt: skip
    scenario = read_trace(lines)
    assert (scenario.initial, scenario.nodes) == ((0, 1, 2), (0, 0, 0)), "a GPU that is never online is not there"
    assert happened(scenario) == [(60.0, "lost", 1)], "summer time ends in between"
    with pytest.raises(DataError, match="line 1 is of single GPUs, each of which is a worker; leave out workers per"):
        read_trace(lines, workers_per_node=8)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("2017-10-03 00:08:00 CET,m29,1.0", "line 1 has the time '2017-10-03 00:08:00 CET'; needed is one as 2017"),
        ("2017-10-33 00:08:00 PDT,m29,1.0", "line 1 has the time '2017-10-33 00:08:00 PDT'; needed is"),
        ("2017-10-03 24:08:00 PDT,m29,1.0", "line 1 has the time '2017-10-03 24:08:00 PDT'; needed is"),
        ("2017-10-03 00:08:00 PDT,m29", "line 1 has 2 fields: .* needed are 3 to 10"),
        (
            "2017-10-03 00:08:00 PDT,m29,1.0\n2017-10-03 00:09:00 PDT,m29,1.0,2.0",
            "line 2 has 4 fields: .* 3, as before",
        ),
        ("2017-10-03 00:08:00 PDT,,1.0", "line 1 names no server"),
        ("2017-10-03 00:08:00 PDT,m29,busy", "line 1 says 'busy'; needed is a number, or NA"),
        ("time,machine_id,cpu_util", "trace t has no line"),
    ],
)
def test_malformed_logs_of_philly(lines, message):
    with pytest.raises(DataError, match=message):
        read_trace(lines.splitlines(), name="t")


# -------------------------------------------------------------------------------------------------------------- alibaba

ALIBABA = """0,1,add,,64,0.69,1.0
0,2,add,,64,0.69,1.0
0,3,add,,64,0.69,1.0
40000,2,softerror,agent check failed,64,0.69,1.0
50000,3,harderror,disk,64,0.69,1.0
50000,3,harderror,disk,64,0.69,1.0
60000,2,softerror,agent check failed,64,0.69,1.0
70000,3,add,,64,0.69,1.0
70000,1,add,,64,0.69,1.0
"""


def test_alibaba_tells_of_machines_that_fail():
    scenario = read_trace(ALIBABA.splitlines())
    walk_kinds = [(40_000.0, "drained", 1), (50_000.0, "lost", 1), (70_000.0, "joined", 1)]
    assert (scenario.initial, happened(scenario), scenario.duration_s) == ((0, 1, 2), walk_kinds, 70_000.0)
    assert scenario.changes[2].nodes == (2,)


def test_alibabas_lines_are_sorted_by_time():
    """The published server_event.csv goes back in time, where an agent has reported late."""
    lines = ALIBABA.splitlines()
    assert read_trace([*lines[:3], *lines[:2:-1]]) == read_trace(lines)
    assert read_trace(["0,1,add", "5,1,harderror", "5,1,add"]).counts == {"lost": 1, "joined": 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,1,add,,64\n5,2", "line 2 has 2 fields: '5,2'; needed are seconds,machine,add"),
        ("0,1,add\nx,2,add", "line 2 has the time 'x'; needed are seconds"),
        ("0,1,add\n1,1,reboot", "line 2 says 'reboot'; needed is add, softerror or harderror"),
        ("0,1,add\n1,,add", "line 2 names no machine"),
    ],
)
def test_malformed_traces_of_alibaba(lines, message):
    with pytest.raises(DataError, match=message):
        read_trace(lines.splitlines(), name="t")


# ----------------------------------------------------------------------------------------------------------------- acme

ACME = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
1,u1,4,32,128,Other,NODE_FAIL,a,b,c,86400,1,2764800.0
2,u1,1,8,128,Other,COMPLETED,a,b,c,86400,1,691200.0
3,u1,1,0,8,Other,NODE_FAIL,a,b,c,100,1,0.0
"""


def test_acme_says_how_often_jobs_met_a_crash():
    rates = read_rates(ACME.splitlines(), name="seren.csv")
    assert rates.losses_per_worker_day == pytest.approx(1 / 40)
    assert rates.whole_nodes
    assert "1 jobs ended by the crash of a node in 40 GPU days" in rates.source


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpu_time", "gpu_hours", "trace t, line 1 lacks the columns gpu_time"),
        ("691200.0", "many", "trace t, line 3 has the gpu_time 'many'; needed is a number"),
        ("8,128,Other", "-8,128,Other", "trace t, line 3 has the gpu_num '-8'"),
        ("128,Other,NODE_FAIL", "128,Other,FAILED", "trace t has 0 jobs that ended as NODE_FAIL in 40 GPU days"),
    ],
)
def test_malformed_traces_of_acme(old, new, message):
    with pytest.raises(DataError, match=message):
        read_rates(ACME.replace(old, new).splitlines(), name="t")


# ---------------------------------------------------------------------------------------------------------------- which

FIRST_LINES = {
    "events": "0,add,node1",
    "polls": "2021-12-11, 11:11:30, 55",
    "philly": "2017-10-03 00:08:00 PDT,m29,60.8,99.366666667,100.0,63.333333333,100.0,100.0,100.0,100.0,",
    "alibaba-2017": "0,1,add,,64,0.69,1.0",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_form_is_recognised_by_its_first_line_and_by_no_other(name):
    first = FIRST_LINES[name]
    assert [other for other, known in FORMATS.items() if known.begins.match(first)][0] == name
    assert read_trace(["# a comment", "", first]) == read_trace([first], trace_format=name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('[{"status": "Pass", "vc": "ee9e8c"}]', "trace t looks like Philly's cluster_job_log, which says when jobs"),
        ("m31,8, 24GB", "trace t looks like Philly's cluster_machine_list, in which nothing happens"),
        (
            ACME.splitlines()[0],
            "Acme's trace of jobs, which says that a node crashed.*give it as --rate FILE",
        ),
        ("m_1932,0,1,2,96,100,USING", "Alibaba's trace of 2018, whose machine_meta does not say what a machine's"),
        ("4b3f04b66a525d2df903eb16,8cb3bec23d14d,58540f191766,Terminated,1,2", "Alibaba's trace of GPUs of 2020"),
        ("PAR1\x15\x04", "is Parquet, as Alibaba's trace of GPUs of 2026"),
        ("what;is;this", "trace t, line 1 is of no known form: 'what;is;this'; known are lines of date, time, count"),
    ],
)
def test_traces_that_say_nothing_of_machines_are_refused_by_name(line, message):
    with pytest.raises(DataError, match=message):
        read_trace([line], name="t")


def test_a_form_that_is_given_says_what_is_wrong():
    with pytest.raises(DataError, match="line 1 has no time"):
        read_trace(["0,add,a"], trace_format="polls")
    with pytest.raises(UsageError, match="no format 'excel' of traces; choose one of polls, philly, alibaba-2017, ev"):
        read_trace(["0,add,a"], trace_format="excel")
    with pytest.raises(DataError, match="has no line; needed are lines of date, time, count, as 2021"):
        read_trace([], trace_format="polls")
