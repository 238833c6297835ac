"""``elastic.hosts``: what is read from it, and what is refused."""

import pytest

from elaswave.config.load import load_config
from elaswave.config.rules import host_problems, host_sizes
from elaswave.errors import ConfigError
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.membership.joiners import JoinerHosts


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        (["a", "b"], {"a": 3, "b": 2}),
        (["rack-1/a=1", "rack-1/b=4"], {"rack-1/a": 1, "rack-1/b": 4}),
        (["a"], {"a": 5}),
        (["a", "b", "c", "d", "e"], dict.fromkeys("abcde", 1)),
    ],
)
def test_sizes(hosts, sizes):
    assert host_problems(hosts, 5) == []
    assert host_sizes(hosts, 5) == sizes


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        (["a b"], "'a b' is no host: write a label such as a or rack-1/a"),
        (["a=0"], "'a=0' is no host"),
        (["/a"], "'/a' is no host"),
        (["a=2", "b"], "some hosts have a number of workers and some have none"),
        (["a", "b", "a"], "host a is given 2 times"),
        (["r", "r/a"], "r is a host, and r/a a host in a domain of that name"),
        (["a=2", "b=2"], "the hosts have 4 workers, but the layout has 5"),
        (list("abcdef"), "6 hosts are given for 5 workers"),
    ],
)
def test_what_is_refused(hosts, problem):
    (found,) = host_problems(hosts, 5)
    assert problem in found


def test_a_configuration_has_its_hosts(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('[elastic]\nhosts = ["a", "b"]\n')
    config = load_config(file)
    assert config.hosts == {"a": 2, "b": 2}
    file.write_text(config.to_toml())
    assert load_config(file).hosts == config.hosts
    file.write_text('[elastic]\nhosts = ["a=1", "b=1"]\n')
    with pytest.raises(ConfigError, match="elastic.hosts: the hosts have 2 workers, but the layout has 4"):
        load_config(file)


def test_joiners_are_on_the_hosts_of_their_places():
    layout = make_layout(widths=[2, 1], layers_per_stage=[1, 1], num_microbatches=2, hosts={"a": 2, "b": 1})
    hosts = JoinerHosts(layout, {"a": 2, "b": 1})
    hosts.placed(3, 1)  # in the place of worker 1
    hosts.placed(4, 3)  # one more
    hosts.placed(5, 4)
    assert [hosts.of(worker) for worker in (3, 4, 5, 9)] == ["b", "b", "a", ""]
    alone = JoinerHosts(make_layout(widths=[2], layers_per_stage=[1], num_microbatches=2), ())
    alone.placed(2, 5)
    assert alone.of(2) == ""
