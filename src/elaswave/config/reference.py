"""The reference of the configuration as Markdown, made from the sections' own docstrings, so that it cannot go stale.

python -m elaswave.config.reference > docs/configuration.md
"""

import ast
import inspect
from collections.abc import Iterator

import msgspec

from elaswave.config import schema
from elaswave.config.values import expectation, toml_value

_INTRODUCTION = """\
# The configuration

A TOML file with one table per section, below the line `format = 2`. Every key may be left out; `elaswave train
--print-config` prints a complete file. `--set section.key=value` is stronger than the file. A configuration with
problems is refused with all of them listed, and exit code 2. This page is made from the source:
`python -m elaswave.config.reference`.

## Format

The configurations that a run saves carry the number: `config.toml`, and those in `result.json`, `events.jsonl`,
checkpoints and exports. Without it they are of an older version, in which some keys had other names, and are refused. A
person's file may leave it out, and means format 2 then. Another number is refused.

## Layout

`layout.stages` x `layout.replicas` and `layout.widths` are two ways to say how many workers each stage has; a file, or
a command line, uses one of them, and a command line may replace what the file says. "NxM" means N stages of M replicas.

- Nothing given: 2 stages x 2 replicas. `--workers N` alone: the largest number of stages, at most 2, that divides N.
- `--workers N` beside a layout must equal its number of workers. `stages` or `replicas` alone is completed by
  `--workers`, or else by 2.
- Workers are numbered stage by stage from 0. Micro-batch m runs on worker m modulo width of each stage.
- A stage cannot be wider than `batch.num_microbatches`; there cannot be more stages than layers, embedding and head
  included; `layout.layers` adds up to the number of layers.
- Each block of state has an owner and `elastic.num_followers` followers (at most the number of workers - 1) that apply
  every update, in the owner's stage as far as that has workers, further ones outside. With `"auto"` all others of the
  stage follow, as far as memory goes.

The layout does not change the result.

## Terms of other frameworks

The [glossary](glossary.md#keys-of-other-frameworks) has what torchtitan, Lightning and Megatron-LM call these keys.
"""


def render() -> str:
    """Renders the whole page."""
    tables = (_section(name, struct) for name, struct in schema.SECTIONS.items())
    return "\n".join([_INTRODUCTION, *tables])


def field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Maps each field's name to the docstring under that field of a struct, as one line."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    return dict(_documented_fields(definition))


def _documented_fields(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node, following in zip(definition.body, definition.body[1:]):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _section(name: str, struct: type[msgspec.Struct]) -> str:
    meanings = field_docstrings(struct)
    lines = [
        f"## `[{name}]`",
        "",
        _marked(inspect.getdoc(struct) or ""),
        "",
        "| key | takes | default | meaning |",
        "|---|---|---|---|",
    ]
    for field in msgspec.structs.fields(struct):
        default = "unset" if field.default is None else f"`{toml_value(field.default)}`"
        takes = expectation(field.type).replace('"', "`")
        lines.append(f"| `{field.name}` | {takes} | {default} | {_marked(meanings[field.name])} |")
    return "\n".join([*lines, ""])


def _marked(text: str) -> str:
    """Returns the text with code marked as Markdown does, not as docstrings do."""
    return text.replace("``", "`")


if __name__ == "__main__":
    print(render(), end="")
