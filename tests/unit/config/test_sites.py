"""Workers at several sites: what a configuration says of them, the layout that OP-Fence gives them, and their links."""

from pathlib import Path

import msgspec
import pytest

from elaswave.blocks.placement import make_blocks, place_blocks
from elaswave.blocks.survival import survival_of
from elaswave.channel.slow_dial import slow_control_of
from elaswave.config.cluster import (
    PACED_SHARE,
    cluster_of,
    configured_sites,
    control_delays_s,
    emulated_costs,
    labels_of,
    sites_that_may_part,
)
from elaswave.config.load import far_job, load_config
from elaswave.config.schema import Config
from elaswave.config.values import OwnModel
from elaswave.errors import ConfigError
from elaswave.fences import coded_bytes
from elaswave.planning.programs.layout import make_layout
from elaswave.worker.links import site_links

FILE = "examples/far_apart/four_regions_small.toml"
EXAMPLE = Path("examples/far_apart/gpt2.toml")
AT_SITES = [f"sites.network={FILE}"]


def test_without_a_file_all_workers_are_at_one_place() -> None:
    config = load_config()
    assert configured_sites(config) is None and site_links(config, 0) is None
    assert cluster_of(config).network is None


def test_op_fence_gives_a_run_without_a_layout_its_stages_sites_speeds_and_fences() -> None:
    config = load_config(EXAMPLE)
    widths, places = config.widths, config.sites.of_workers
    assert places is not None and len(places) == sum(widths) == 6
    assert sorted(places) == ["london", "oregon", "oregon", "tokyo", "virginia", "virginia"]
    assert config.device.speeds is not None
    assert {place for place, speed in zip(places, config.device.speeds, strict=True) if speed > 1} == {"oregon"}
    ends = [sum(config.layers_per_stage[: stage + 1]) for stage in range(len(widths) - 1)]
    names = ["embedding", *(f"block.{index}" for index in range(12))]
    of_stage = [set(places[sum(widths[:stage]) : sum(widths[: stage + 1])]) for stage in range(len(widths))]
    expected = [
        f"{names[end - 1]}:int8" for end, before, after in zip(ends, of_stage, of_stage[1:]) if len(before | after) > 1
    ]
    assert list(config.model.fences) == expected != []


def test_what_was_planned_is_kept_when_a_configuration_is_read_again(tmp_path: Path) -> None:
    config = load_config(EXAMPLE)
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml") == config
    given = load_config(None, [*AT_SITES, "layout.widths=[1, 2]"])
    assert given.widths == (1, 2) and given.sites.of_workers is None and not given.model.fences
    sites = configured_sites(given)
    assert sites is not None
    assert [sites.network.sites[sites.site_of(worker)] for worker in (0, 1, 2, 3, 7)] == [
        "oregon", "oregon", "virginia", "virginia", "oregon",
    ]  # fmt: skip


def test_a_given_schedule_is_kept_and_one_that_is_not_planned_refused() -> None:
    assert load_config(EXAMPLE, ["layout.schedule=gpipe"]).layout.schedule == "gpipe"
    with pytest.raises(ConfigError, match="OP-Fence does not plan zero-bubble; give one of 1f1b, gpipe"):
        load_config(EXAMPLE, ["layout.schedule=zero-bubble"])


def test_rates_and_delays_are_those_of_the_run() -> None:
    config = load_config(None, [*AT_SITES, "layout.widths=[2, 2]", "sites.rate=0.01", "sites.delay=0.5"])
    cluster = cluster_of(config)
    link = cluster.link_between(0, 2)
    assert link.latency_s == pytest.approx(0.0335) and link.bandwidth_bytes_per_s == pytest.approx(790e4 / 8)
    assert cluster_of(config, [0, 9]).network is cluster.network  # so that who joins fits into the cluster


def test_emulated_costs_carry_the_bytes_of_the_runs_own_model() -> None:
    config = load_config(EXAMPLE)
    layers = emulated_costs(config).layers
    fence = ["embedding", *(f"block.{index}" for index in range(12))].index(config.model.fences[0].rpartition(":")[0])
    assert layers[fence].boundary_bytes == coded_bytes("int8", (64 * 64,), 4)
    assert {layer.boundary_bytes for layer in far_job(config, "int8").costs[0].layers[:-1]} == {64 * 64 * 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([*AT_SITES, "layout.widths=[4, 4]"], "has 6 workers, and the layout 8; give a smaller layout"),
        ([*AT_SITES, "layout.widths=[1]", 'sites.of_workers=["rome"]'], "has no site 'rome'; there are oregon, virg"),
        (["sites.network=nowhere.toml", "layout.widths=[1]"], "nowhere.toml"),
        (["sites.codec=int7"], 'sites.codec: got "int7", expected one of none, bf16, int8, int4, topkR'),
    ],
)
def test_what_cannot_be_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)


def test_a_scripts_own_model_keeps_its_layout() -> None:
    own = OwnModel((10, 10), "float32", has_optimizer=False, grad_clip=0.0)
    config = load_config(None, AT_SITES, own=own)
    assert config.widths == (2, 2) and config.sites.of_workers is None


def test_a_workers_links_are_those_from_its_site() -> None:
    config: Config = load_config(None, [*AT_SITES, "layout.widths=[1, 1, 1, 1]"])
    links = site_links(config, 0)
    assert links is not None
    near, far, own = (links._path_to(peer) for peer in (1, 2, 0))
    assert own is None and near is not None and far is not None
    assert (near.latency_s, far.latency_s) == (0.005, 0.067) and near.site != far.site


def test_who_has_joined_is_where_its_label_says() -> None:
    """Worker 4 would be in Tokyo, as the fifth of the file; it has taken the place of one in London."""
    config: Config = load_config(None, [*AT_SITES, "layout.widths=[1, 1, 1, 1]"])
    sites, links = configured_sites(config), site_links(config, 0)
    assert sites is not None and links is not None
    layout = make_layout(widths=[2], layers_per_stage=[1], num_microbatches=2, labels={0: "oregon", 4: "london/a"})
    before = links._path_to(4)
    links.use_layout(layout)
    after = links._path_to(4)
    assert before is not None and after is not None
    assert (before.latency_s, after.latency_s) == (0.096, 0.136)
    cluster = cluster_of(config, [0, 4], layout.domain_of)
    assert cluster.site is not None and cluster.site.tolist() == [0, sites.network.sites.index("london")]


def test_a_worker_runs_at_its_site_and_on_the_hosts_of_that() -> None:
    settings = [*AT_SITES, "layout.widths=[1, 1, 1]", 'sites.of_workers=["oregon", "oregon", "london"]']
    assert labels_of(load_config(None, settings)) == {0: "oregon", 1: "oregon", 2: "london"}
    hosts = 'elastic.hosts=["oregon/a", "oregon/b", "london/a"]'
    assert labels_of(load_config(None, [*settings, hosts])) == {0: "oregon/a", 1: "oregon/b", 2: "london/a"}
    counted = 'elastic.hosts=["oregon/a=2", "london/a=1"]'
    assert labels_of(load_config(None, [*settings, counted])) == {0: "oregon/a", 1: "oregon/a", 2: "london/a"}
    with pytest.raises(ConfigError, match="b is at none of the sites of the workers"):
        load_config(None, [*settings, 'elastic.hosts=["oregon/a", "oregon/b", "b"]'])
    with pytest.raises(ConfigError, match="the hosts of oregon have no room for its 2 workers"):
        load_config(None, [*settings, 'elastic.hosts=["oregon/a=1", "london/a=2"]'])
    with pytest.raises(ConfigError, match="control.hosts: .*: name the hosts with elastic.hosts, as SITE/HOST"):
        load_config(None, [*settings, "control.hosts=2"])


@pytest.mark.parametrize("setting", ["sites.copies=inside", "sites.coordinator=london"])
def test_what_is_said_of_sites_needs_their_network(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting.partition('=')[0]}: .* needs sites.network, the file"):
        load_config(None, [setting])


@pytest.mark.parametrize("copies", ["outside", "inside"])
def test_copies_are_where_a_run_asks_for_them(copies: str) -> None:
    """Two workers in each of two sites; the layout says it to all members."""
    at = 'sites.of_workers=["oregon", "oregon", "tokyo", "tokyo"]'
    config = load_config(None, [*AT_SITES, "layout.widths=[2, 2]", at, f"sites.copies={copies}"])
    layout = make_layout(
        widths=[2, 2], layers_per_stage=[1, 1], num_microbatches=2, labels=labels_of(config), copies=config.sites.copies
    )
    placement = place_blocks(layout.with_followers(1), make_blocks([40, 40], 5), scatter_width=2)
    crosses = {owner // 2 != follower // 2 for owner, (follower,) in zip(placement.owner, placement.followers)}
    assert crosses == {copies == "outside"}
    survival = survival_of(placement, layout)
    assert survival is not None and survival.num_sites == 2
    if copies == "outside":
        assert survival.describe_domains() == "survives the loss of any one of 2 sites"
    else:
        assert survival.describe_domains() == (
            "survives the loss of none of 2 sites (site oregon: 8 of 16 blocks have all copies there, as sites.copies "
            "asks for: without it the job goes back to the last checkpoint; site tokyo: 8 of 16 blocks have all copies "
            "there, as sites.copies asks for: without it the job goes back to the last checkpoint)"
        )


def test_heartbeats_of_other_sites_may_come_later() -> None:
    """By the latency and by what else a worker may say, also where its link has become a hundred times as slow."""
    config = load_config(None, [*AT_SITES, "layout.widths=[1]", "sites.coordinator=oregon", "sites.rate=0.001"])
    assert control_delays_s(load_config(None, [*AT_SITES, "layout.widths=[1]"])) == {}
    delays_s = control_delays_s(config)
    assert delays_s[0] == 0.0 and len(delays_s) == 4
    london_s = 0.136 + 100 * 16384 / (420e6 / 8)
    assert delays_s[3] == pytest.approx(london_s)  # of the file's rate: these messages are as large as ever
    with pytest.raises(ConfigError, match="sites.coordinator: .* has no site 'oslo'"):
        load_config(None, [*AT_SITES, "layout.widths=[1]", "sites.coordinator=oslo"])


def test_sites_may_change_when_a_run_goes_on() -> None:
    config = load_config(None, [*AT_SITES, "layout.widths=[1, 2]"])
    other = msgspec.structs.replace(config.sites, rate=0.5)
    assert load_config(None, ["sites.rate=0.5"], base=config).sites == other


def test_a_link_may_be_slower_one_way(tmp_path: Path) -> None:
    """Frames and control messages take the way that they go."""
    file = tmp_path / "uneven.toml"
    site = "[sites.{}]\nworkers = 1\nbandwidth_mbit_per_s = 2000\ndelay_ms = 5\n"
    link = 'between = ["oslo", "quito"]\nbandwidth_mbit_per_s = 100\ndelay_ms = 120\nback_bandwidth_mbit_per_s = 20\n'
    file.write_text('source = "a test"\n' + site.format("oslo") + site.format("quito") + "[[links]]\n" + link)
    config = load_config(None, [f"sites.network={file}", "layout.widths=[1, 1]", "sites.coordinator=oslo"])
    forth, back = (site_links(config, worker) for worker in (0, 1))
    assert forth is not None and back is not None
    there, here = forth._path_to(1), back._path_to(0)
    assert there is not None and here is not None
    assert (there.bandwidth_bytes_per_s, here.bandwidth_bytes_per_s) == (100e6 / 8, 20e6 / 8)
    control = slow_control_of(config, 1)
    assert control is not None
    assert [path.bandwidth_bytes_per_s for path in control._paths] == [20e6 / 8, 100e6 / 8]


REAL = [*AT_SITES, "sites.links=real", "net.transport=tcp"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["sites.links=real"], 'sites.links: "real" needs sites.network, the file with sites and links'),
        ([*AT_SITES, "sites.links=real"], 'net.transport is "unix"; set net.transport=tcp'),
        ([*REAL, "sites.rate=0.5"], "sites.rate: 0.5 changes emulated links only"),
        ([*REAL, "sites.delay=2"], "sites.delay: 2 changes emulated links only"),
        (["sites.codec=int8"], 'sites.codec: "int8" needs sites.network'),
        (["sites.rate=0.5"], "sites.rate: 0.5 needs sites.network"),
        (["sites.use_all=true"], "sites.use_all needs sites.network"),
        (['sites.of_workers=["oslo"]'], "sites.of_workers needs sites.network"),
        ([*AT_SITES, "sites.links=slow"], 'expected one of "emulated", "real"'),
    ],
)
def test_keys_of_sites_that_cannot_be(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, keys)
    assert said in str(raised.value)


def test_real_links_are_paced_below_their_rates_and_nothing_is_emulated() -> None:
    config = load_config(None, [*REAL, "sites.coordinator=tokyo", "layout.widths=[2, 2]"])
    sites, emulated = configured_sites(config), configured_sites(load_config(None, [*AT_SITES, "layout.widths=[2, 2]"]))
    assert sites is not None and emulated is not None and sites.are_real
    ratio = sites.network.bandwidth_bytes_per_s / emulated.network.bandwidth_bytes_per_s
    assert ratio.tolist() == [[pytest.approx(PACED_SHARE)] * 4] * 4
    assert sites_that_may_part(config) == () and slow_control_of(config, 0) is None
    assert control_delays_s(config)[0] > 0, "heartbeats still come over the link"
    links = site_links(config, 0)
    assert links is not None and links.emulated is None and links.paced is not None and not links.has_frames
    assert far_job(config, "none").cluster.network is sites.network
