"""Any valid configuration survives being written and read, whatever its values."""

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elaswave.config.load import build_config, load_config, resolve
from elaswave.config.schema import Config, DataConfig, ElasticConfig, ModelConfig, OptimizerConfig, RunConfig
from elaswave.config.values import toml_document
from elaswave.errors import ConfigError

fractions = st.floats(0, 1, exclude_max=True)
positive = st.floats(0, 1e300, exclude_min=True)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
path = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    head_width = 2 * draw(st.integers(1, 8))
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    llama = draw(st.booleans())
    model = ModelConfig(
        family="llama" if llama else "gpt",
        num_layers=draw(st.integers(2, 9)),
        hidden_size=num_heads * head_width,
        num_heads=num_heads,
        num_kv_heads=draw(st.sampled_from([None, num_kv_heads])) if llama else None,
        intermediate_size=draw(st.none() | st.integers(1, 999)) if llama else None,
        rope_theta=draw(positive),
        dropout=draw(fractions),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        recompute=draw(st.booleans()),
    )
    config = Config(
        model=model,
        data=DataConfig(source="/" + draw(path) + ".txt", vocab_size=draw(st.none() | st.integers(2, 65536))),
        optimizer=OptimizerConfig(
            lr=draw(st.floats(0, 1e300)), eps=draw(positive), betas=(draw(fractions), draw(fractions))
        ),
        elastic=ElasticConfig(block_size=32 * draw(st.integers(1, 1000))),
        run=RunConfig(seed=draw(st.integers(0, 2**63 - 1)), skip_nonfinite=draw(st.booleans())),
    )
    return resolve(config, draw(st.sampled_from([None, 1, 2, 4, 7])))


@given(configs())
def test_a_configuration_survives_toml(config: Config) -> None:
    document = tomllib.loads(config.to_toml())
    assert document.pop("format") == 2
    read = Config(**{name: type(getattr(config, name))(**values) for name, values in document.items()})
    assert read == config
    assert resolve(config) == config


@given(configs())
def test_a_configuration_survives_loading(config: Config) -> None:
    # Paths are written out when they are read for the first time; after that they stay.
    once = build_config(config.to_dict())
    assert build_config(tomllib.loads(once.to_toml())) == once
    assert load_config(base=once) == once


@given(st.dictionaries(st.sampled_from(["a", "b"]), st.dictionaries(st.sampled_from(["x", "y"]), text)))
def test_any_text_survives_toml(sections: dict[str, dict[str, str]]) -> None:
    assert tomllib.loads(toml_document(sections)) == {name: values for name, values in sections.items() if values}


json_like: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
sections = st.sampled_from([*Config().flat(), "model.x", "x.y"])


@given(st.dictionaries(sections, json_like, max_size=4), st.none() | st.integers(-1, 20))
def test_whatever_is_written_is_read_or_refused_with_reasons(values: dict[str, Any], workers: int | None) -> None:
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    try:
        config = build_config(nested, workers=workers)
    except ConfigError as error:
        assert error.problems and all(error.problems)
    else:
        assert resolve(config) == config
