"""Workers at several sites: what a configuration says of them, the layout that OP-Fence gives them, and their links."""

from pathlib import Path

import msgspec
import pytest

from elaswave.config.devices import cluster_of, emulated_costs
from elaswave.config.far_layout import far_job
from elaswave.config.load import load_config
from elaswave.config.own import OwnModel
from elaswave.config.schema import Config
from elaswave.config.sites import sites_of
from elaswave.errors import ConfigError
from elaswave.fences import coded_bytes
from elaswave.worker.process import emulated_links

FILE = "examples/far_apart/four_regions_small.toml"
EXAMPLE = Path("examples/far_apart/gpt2.toml")
AT_SITES = [f"sites.network={FILE}"]


def test_without_a_file_all_workers_are_at_one_place() -> None:
    config = load_config()
    assert sites_of(config) is None and emulated_links(config, 0) is None
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
    sites = sites_of(given)
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
    links = emulated_links(config, 0)
    assert links is not None
    near, far, own = (links._path_to(peer) for peer in (1, 2, 0))
    assert own is None and near is not None and far is not None
    assert (near.latency_s, far.latency_s) == (0.005, 0.067) and near.site != far.site


def test_sites_may_change_when_a_run_goes_on() -> None:
    config = load_config(None, [*AT_SITES, "layout.widths=[1, 2]"])
    other = msgspec.structs.replace(config.sites, rate=0.5)
    assert load_config(None, ["sites.rate=0.5"], base=config).sites == other
