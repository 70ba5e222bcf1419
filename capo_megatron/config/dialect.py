"""The YAML that configs are written in: YAML 1.2's plain scalars, so that `1e-6` is a number and `no` is a word.

PyYAML speaks YAML 1.1, where `lr: 1e-6` is the text "1e-6", `off` is false, `012` is ten and a repeated key silently
wins over the first. Reader and writer share one table of scalars, so whatever is written reads back as it was.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from capo_megatron.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_SCALARS = (  # tag, pattern, the characters that such a scalar can start with
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)

_DIGITS = 1000  # no option needs 20, and Python refuses to read more than 4,300 of them


def parse(text: str, source: str) -> Any:
    """The mapping, list or scalar that `text` spells. Errors name `source` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: lists or mappings are nested too deeply. An option is nested 3 deep.") from error


def emit(tree: Any) -> str:
    """YAML text that `parse` reads back to an equal tree of mappings, lists and scalars."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)


class _Loader(yaml.SafeLoader):
    """Knows no tags beyond plain mappings, lists and scalars, and refuses a repeated key."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        self.flatten_mapping(node)
        return {str(key.value): self.construct_object(value, deep=True) for key, value in node.value}

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)

    def integer(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if len(text) > _DIGITS:
            raise yaml.constructor.ConstructorError(None, None, f"an integer of {len(text)} digits", node.start_mark)
        return int(text)

    def number(self, node: yaml.ScalarNode) -> float:
        return float(str(self.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))

    def unknown(self, node: yaml.Node) -> Any:
        raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not known here", node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would otherwise read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        unusual_break = any(char in data for char in "\r\x85\u2028\u2029")  # PyYAML loses these unless escaped
        return self.represent_scalar(_TAG + "str", data, style='"' if unusual_break else None)


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _name, _pattern, _starts in _SCALARS:
        _class.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _starts)

for _name, _constructor in (
    ("map", _Loader.mapping),
    ("seq", _Loader.sequence),
    ("str", yaml.SafeLoader.construct_yaml_str),
    ("null", yaml.SafeLoader.construct_yaml_null),
    ("bool", yaml.SafeLoader.construct_yaml_bool),
    ("int", _Loader.integer),
    ("float", _Loader.number),
):
    _Loader.add_constructor(_TAG + _name, _constructor)
_Loader.add_constructor(None, _Loader.unknown)
_Dumper.add_representer(str, _Dumper.text)
