"""The sections of the configuration: what they accept, and that every problem is named."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from elaswave.config.cluster import shape_of
from elaswave.config.load import build_config, load_config, resolve
from elaswave.config.reference import field_docstrings, render
from elaswave.config.rules import RULES
from elaswave.config.schema import (
    SECTIONS,
    BatchConfig,
    Config,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    NetConfig,
    OptimizerConfig,
    RunConfig,
)
from elaswave.config.values import expectation, toml_value
from elaswave.errors import ConfigError
from elaswave.planning.costs.analytic import multiplications


def problems_of(values: dict[str, Any], workers: int | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build_config(values, workers=workers)
    return caught.value.problems


def test_the_defaults_are_those_of_the_default_recipe() -> None:
    config = build_config({})
    assert (config.model.num_layers, config.model.hidden_size, config.model.context_length) == (4, 128, 64)
    assert (config.batch.num_microbatches, config.batch.microbatch_size, config.run.steps) == (8, 8, 150)
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.schedule) == (2e-3, 10, "cosine")
    assert (config.model.dropout, config.data.source, config.data.resolved_vocab_size) == (0.1, "python-docs", 256)
    assert (config.elastic.consistency, config.elastic.num_followers) == ("bitwise", "auto")
    assert (config.widths, config.layers_per_stage) == ((2, 2), (3, 3))


@pytest.mark.parametrize("struct", [*SECTIONS.values(), Config], ids=lambda struct: struct.__name__)
def test_every_key_has_a_docstring(struct: type[msgspec.Struct]) -> None:
    assert set(struct.__struct_fields__) <= field_docstrings(struct).keys()


def test_the_reference_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert page.read_text() == render(), "python -m elaswave.config.reference > docs/configuration.md"


def test_every_field_can_be_explained() -> None:
    for struct in SECTIONS.values():
        for field in msgspec.structs.fields(struct):
            assert expectation(field.type)


def test_a_section_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(hidden_size="wide", num_layers=0)  # type: ignore[arg-type]
    assert caught.value.problems == (
        "model.num_layers: got 0, expected a whole number, at least 1 and at most 1024",
        'model.hidden_size: got "wide", expected a whole number, at least 1',
    )


def test_a_section_has_its_fields_own_types() -> None:
    assert isinstance(ModelConfig(dropout=0).dropout, float)
    assert LayoutConfig(widths=[1, 3]).widths == (1, 3)  # type: ignore[arg-type]
    assert hash(LayoutConfig(widths=[1, 3])) == hash(LayoutConfig(widths=(1, 3)))  # type: ignore[arg-type]


def test_a_section_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(AttributeError):
        RunConfig().steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        RunConfig(3)  # type: ignore[misc]


def test_a_config_made_in_python_is_checked_across_sections() -> None:
    with pytest.raises(ConfigError, match="too few for equal bits"):
        Config(model=ModelConfig(context_length=1), batch=BatchConfig(microbatch_size=3))
    with pytest.raises(ConfigError, match="wider than batch.num_microbatches = 2"):
        Config(layout=LayoutConfig(widths=(3,)), batch=BatchConfig(num_microbatches=2))
    with pytest.raises(ConfigError, match="model: got a table, expected a ModelConfig"):
        Config(model={"hidden_size": 3})  # type: ignore[arg-type]


def test_msgspec_itself_refuses_what_it_decodes() -> None:
    """Configurations that travel between processes are checked where they arrive."""
    encoded = msgspec.json.encode(Config())
    assert msgspec.json.decode(encoded, type=Config) == Config()
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        msgspec.json.decode(encoded.replace(b'"hidden_size":128', b'"hidden_size":127'), type=Config)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(encoded.replace(b'"hidden_size"', b'"widht"'), type=Config)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model": {"hiden_size": 3}}, "model.hiden_size: unknown key; did you mean model.hidden_size?"),
        ({"modle": {"hidden_size": 3}}, "modle: unknown section; did you mean model?"),
        ({"hidden_size": 3}, "hidden_size: unknown section; did you mean model.hidden_size?"),
        ({"banana": {}}, "banana: unknown section; there are model, data,"),
        ({"data": {"banana": 1}}, "data.banana: unknown key; [data] has source, vocab_size, validation_fraction"),
        ({"model": 3}, "model: got 3, expected a table of keys, [model]"),
        ({"model": {"hidden_size": 3.5}}, "model.hidden_size: got 3.5, expected a whole number"),
        ({"model": {"hidden_size": True}}, "model.hidden_size: got true, expected a whole number"),
        ({"model": {"recompute": 1}}, "model.recompute: got 1, expected true or false"),
        ({"model": {"family": "bert"}}, 'model.family: got "bert", expected one of "gpt", "llama"'),
        ({"model": {"dtype": "fp16"}}, 'model.dtype: got "fp16", expected one of'),
        ({"model": {"dropout": 1.0}}, "model.dropout: got 1.0, expected a finite number, at least 0 and below 1"),
        ({"model": {"dropout": -0.1}}, "model.dropout: got -0.1, expected"),
        ({"model": {"hidden_size": {"a": 1}}}, "model.hidden_size: got a table, expected"),
        ({"model": {"rope_theta": 0}}, "model.rope_theta: got 0, expected a finite number, above 0"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: got nan, expected a finite number"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: got inf, expected a finite number"),
        ({"optimizer": {"betas": [0.9, float("nan")]}}, "optimizer.betas: got [0.9, nan], expected a list of 2 values"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas: got [0.9], expected a list of 2 values"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas: got [0.9, 1.0], expected"),
        ({"data": {"source": ""}}, 'data.source: got "", expected a non-empty string'),
        ({"data": {"source": "a\udcff"}}, "data.source: got "),
        (
            {"data": {"vocab_size": 5_000_000_000}},
            "data.vocab_size: got 5000000000, expected a whole number, at least 2 and at most",
        ),
        ({"layout": {"widths": []}}, "layout.widths: got [], expected a non-empty list"),
        ({"layout": {"widths": [2, 0]}}, "layout.widths: got [2, 0], expected"),
        ({"elastic": {"block_size": 48}}, "elastic.block_size: got 48, expected a whole number, at least 32 and a"),
        ({"run": {"seed": -1}}, "run.seed: got -1, expected a whole number, at least 0"),
        ({"run": {"seed": 2**63}}, "run.seed: got 9223372036854775808, expected a whole number, at least 0"),
        ({"run": {"steps": 0}}, "run.steps: got 0, expected"),
        ({"model": {"family": "x" * 1000}}, 'model.family: got "' + "x" * 59 + "..., expected"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(values)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model": {"num_heads": 3}}, "model.num_heads: 3 heads do not divide model.hidden_size = 128"),
        ({"model": {"num_kv_heads": 2}}, "model.num_kv_heads: only llama has grouped queries"),
        ({"model": {"family": "llama", "num_kv_heads": 3}}, "model.num_kv_heads: 3 heads do not divide"),
        ({"model": {"family": "llama", "num_kv_heads": 8}}, "model.num_kv_heads: 8 heads do not divide"),
        ({"model": {"intermediate_size": 256}}, "model.intermediate_size: fixed at 4 x model.hidden_size"),
        ({"model": {"family": "llama", "hidden_size": 12}}, "model.hidden_size: 3 elements per head (12 / 4) is odd"),
        ({"model": {"context_length": 3}, "batch": {"microbatch_size": 1}}, "batch.microbatch_size: 1 samples of"),
        ({"data": {"source": "/x/tokens.bin"}}, "data.vocab_size: unset, but /x/tokens.bin holds tokens"),
        ({"data": {"validation_fraction": 0}, "run": {"eval_every": 5}}, "data.validation_fraction: 0 leaves nothing"),
        ({"layout": {"widths": [2, 2], "stages": 2}}, "layout.stages: 2 is given beside layout.widths = [2, 2]"),
        ({"layout": {"stages": 9, "replicas": 1}}, "layout: 9 stages for a model of 6 layers"),
        ({"layout": {"stages": 7}}, "layout: 7 stages for a model of 6 layers"),
        ({"layout": {"widths": [1, 9]}}, "layout: a stage of width 9 is wider than batch.num_microbatches = 8"),
        ({"batch": {"num_microbatches": 1}}, "layout: a stage of width 2 is wider than batch.num_microbatches = 1"),
        ({"layout": {"layers": [1, 1]}}, "layout.layers: [1, 1] adds up to 2, but the model has 6 layers"),
        ({"layout": {"layers": [6]}}, "layout.layers: [6] is for 1 stages, but there are 2"),
        ({"elastic": {"min_workers": 5}}, "elastic.min_workers: 5 is more than the 4 workers of the layout"),
        (
            {"device": {"kind": "emulated", "model": "gpt-5"}, "model": {"num_layers": 40}},
            'device.model: "gpt-5" is not described; choose one of gpt2',
        ),
        (
            {"device": {"kind": "emulated", "name": "abacus"}, "model": {"num_layers": 40}},
            'device.name: "abacus" is not described; choose one of',
        ),
        ({"device": {"kind": "emulated"}}, "model.num_layers: 4, but device.model = llama-2-13b has 40 blocks"),
        ({"device": {"speeds": [1, 0.5]}}, "device.speeds: 2 speeds for the 4 workers of the layout"),
        ({"device": {"frequency": "emulated"}}, "device.frequency: emulated levels need device.kind"),
        ({"device": {"quota": 0.5}}, 'device.quota: a share of a core is set by device.frequency = "cgroup"'),
        ({"device": {"frequency": "cgroup", "quota": 1.5}}, "device.quota: "),
        (
            {"device": {"kind": "emulated", "frequency": "cgroup"}, "model": {"num_layers": 40}},
            'device.frequency: cgroup acts on real devices; emulated ones take "emulated" or "none"',
        ),
    ],
)
def test_values_that_do_not_go_together_are_named(values: dict[str, Any], problem: str) -> None:
    (found,) = problems_of(values)
    assert found.startswith(problem)


def test_every_rule_reads_keys_that_exist() -> None:
    keys = Config().flat().keys() | {"widths"}
    for rule in RULES:
        assert set(rule.keys) <= keys


def test_every_problem_is_listed() -> None:
    problems = problems_of(
        {
            "model": {"num_heads": 3, "dropout": 2, "typo": 1},
            "layout": {"widths": [9, 1], "layers": [2, 2, 2]},
            "elastic": {"min_workers": 11},
            "optimizer": {"name": "lion"},
            "nonsense": {},
        }
    )
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "elastic.min_workers",
        "layout",
        "layout.layers",
        "model.dropout",
        "model.num_heads",
        "model.typo",
        "nonsense",
        "optimizer.name",
    ]


def test_a_rule_is_silent_when_a_key_it_reads_is_bad_itself() -> None:
    (problem,) = problems_of({"model": {"num_heads": 0}})
    assert problem.startswith("model.num_heads: got 0")
    # The layout is still judged by what is known: without the number of layers, and without that of micro-batches.
    assert len(problems_of({"model": {"num_layers": 0}, "layout": {"widths": [9]}})) == 2
    assert len(problems_of({"batch": {"num_microbatches": 0}, "layout": {"widths": [1] * 9}})) == 2
    (problem,) = problems_of({"model": {"num_layers": 0}, "layout": {"widths": [1, 1], "layers": [1, 1]}})
    assert problem.startswith("model.num_layers")
    (problem,) = problems_of({"layout": {"widths": "wide", "layers": [1, 1]}})
    assert problem.startswith("layout.widths")
    assert len(problems_of({"model": {"num_layers": 0}, "batch": {"num_microbatches": 0}})) == 2


@pytest.mark.parametrize(
    ("layout", "workers", "widths"),
    [
        ({}, None, (2, 2)),
        ({}, 1, (1,)),
        ({}, 2, (1, 1)),
        ({}, 3, (3,)),
        ({}, 6, (3, 3)),
        ({"stages": 1, "replicas": 4}, None, (4,)),
        ({"stages": 4, "replicas": 1}, 4, (1, 1, 1, 1)),
        ({"widths": [1, 3]}, 4, (1, 3)),
        ({"widths": [2, 1, 2]}, None, (2, 1, 2)),
    ],
)
def test_the_layout_is_written_out(layout: dict[str, Any], workers: int | None, widths: tuple[int, ...]) -> None:
    config = build_config({"layout": layout}, workers=workers)
    assert config.widths == widths
    assert sum(config.layers_per_stage) == 6 and len(config.layers_per_stage) == len(widths)
    assert config.layout.stages is None and config.layout.replicas is None
    assert resolve(config) == config
    assert resolve(config, sum(widths)) == config


@pytest.mark.parametrize("layout", [{"stages": 2, "replicas": 2}, {"widths": [2, 2]}])
def test_workers_must_match_a_given_layout(layout: dict[str, Any]) -> None:
    (problem,) = problems_of({"layout": layout}, workers=3)
    assert problem.startswith("--workers: 3 is given, but")


def test_a_huge_number_of_workers_is_refused_at_once() -> None:
    (problem,) = problems_of({}, workers=2 * 10**9)
    assert "wider than" in problem


def test_given_layers_are_kept() -> None:
    assert build_config({"layout": {"layers": [5, 1]}}).layers_per_stage == (5, 1)


def test_resolving_checks_what_was_left_open() -> None:
    config = Config(batch=BatchConfig(num_microbatches=2))
    assert resolve(config).widths == (2, 2)
    with pytest.raises(ConfigError, match="wider than batch.num_microbatches = 2"):
        resolve(config, 6)


def test_an_unresolved_layout_has_no_widths() -> None:
    with pytest.raises(AssertionError):
        _ = Config().widths
    with pytest.raises(AssertionError):
        _ = Config().layers_per_stage


def test_costs_follow_the_sizes() -> None:
    def costs(**sizes: Any) -> tuple[float, ...]:
        return multiplications(shape_of(Config(model=ModelConfig(**sizes))))

    assert costs(hidden_size=64, context_length=16) == (64.0, *[12.0 * 64 * 64 + 2 * 16 * 64] * 4, 64.0 * 256)
    wide = costs(family="llama", num_kv_heads=4, intermediate_size=512)
    narrow = costs(family="llama", num_kv_heads=1, intermediate_size=512)
    assert wide[1] - narrow[1] == 2 * 128 * 3 * 32
    assert costs(family="llama")[1] > 0


def test_a_large_vocabulary_moves_layers_away_from_the_head() -> None:
    values = {"data": {"source": "/x.bin", "vocab_size": 50304}, "layout": {"widths": [1, 1]}}
    assert build_config(values).layers_per_stage == (5, 1)


def test_the_vocabulary_follows_from_the_source() -> None:
    assert DataConfig().resolved_vocab_size == 256
    assert DataConfig(source="x.bin", vocab_size=1000).resolved_vocab_size == 1000


def test_unset_keys_are_left_out() -> None:
    values = Config().to_dict()
    assert values["layout"] == {"schedule": "1f1b"}
    assert "num_kv_heads" not in values["model"]
    assert Config().flat()["layout.widths"] is None
    assert OptimizerConfig(betas=[0, 0.5]) == OptimizerConfig(betas=(0.0, 0.5))  # type: ignore[arg-type]


def test_only_configuration_values_become_toml() -> None:
    with pytest.raises(TypeError, match="holds no dict"):
        toml_value({"a": 1})


@pytest.mark.parametrize(
    ("net", "seen"),
    [
        ({"bind": "127.0.0.1"}, 'net.bind: of TCP only, but net.transport = "unix"'),
        ({"tls": "required", "keys": "k"}, "net.tls: of TCP only"),
        ({"transport": "tcp", "bind": "localhost"}, "net.bind: localhost is no numeric address"),
        ({"transport": "tcp", "bind": "0.0.0.0", "trusted": True}, "net.advertise: unset, but nobody can dial"),
        ({"transport": "tcp", "bind": "::", "advertise": "::", "trusted": True}, "net.advertise: :: is no host"),
        ({"transport": "tcp", "advertise": "node-1:70"}, "net.advertise: node-1:70 is no host that can be dialled"),
        ({"transport": "tcp", "bind": "127.0.0.1", "interface": "lo"}, "net.interface: lo, but net.bind = 127.0.0.1"),
        ({"transport": "tcp", "tls": "required"}, "net.keys: unset, but net.tls"),
        ({"transport": "tcp", "keys": "k"}, 'net.keys: k, but net.tls = "off"'),
        ({"transport": "tcp", "bind": "10.0.0.5"}, "other machines reach net.bind = 10.0.0.5.*net.trusted = true"),
        ({"transport": "tcp", "bind": "0.0.0.0", "advertise": "n"}, "other machines reach net.bind = 0.0.0.0"),
        ({"transport": "tcp", "ports": "70"}, 'net.ports: got "70", expected ports as "FIRST-LAST"'),
    ],
)
def test_addresses_that_do_not_go_together(net, seen):
    with pytest.raises(ConfigError, match=seen):
        NetConfig(**net)


@pytest.mark.parametrize(
    ("ports", "seen"),
    [
        ("9-7", "9-7 is no range of ports"),
        ("0-70", "0-70 is no range of ports"),
        ("65530-65536", "is no range of ports"),
    ],
)
def test_ports_that_are_none(ports, seen):
    with pytest.raises(ConfigError, match=seen):
        load_config(None, ["net.transport=tcp", f"net.ports={ports}"])
    assert load_config(None, ["net.transport=tcp", "net.ports=7000-7000"]).net.ports == "7000-7000", "of any host"


TLS = "control.store_ca=ca.pem"


@pytest.mark.parametrize(
    ("store", "given", "is_open"),
    [
        ("10.0.0.5:2379", [], True),
        ("127.0.0.1:2379,10.0.0.5", [], True),
        ("node-1.example:2379", [], True),
        ("[2001:db8::1]:2379", [], True),
        ("0.0.0.0:2379", [], True),
        ("10.0.0.5:2379", ["net.transport=tcp", "net.tls=required", "net.keys=k"], True),
        ("10.0.0.5:2379", ["net.trusted=true"], False),
        ("10.0.0.5:2379", [TLS], False),
        ("127.0.0.1:2379,localhost,[::1]:2379,[::1]", [], False),
    ],
)
def test_a_store_on_other_machines_needs_tls(store, given, is_open):
    overrides = [f"control.store=etcd://{store}", *given]
    if is_open:
        with pytest.raises(ConfigError, match="control.store_ca: unset, but control.store names .* net.trusted = true"):
            load_config(None, overrides)
    else:
        assert load_config(None, overrides).control.store.endswith(store)


def test_addresses_that_go_together():
    assert NetConfig(transport="tcp", bind="127.0.0.2").trusted is False
    assert NetConfig(transport="tcp", bind="10.0.0.5", trusted=True).tls == "off"
    assert NetConfig(transport="tcp", bind="::", advertise="node-1.example.", tls="required", keys="k").advertise
    assert NetConfig(transport="tcp", interface="eth0").bind is None
