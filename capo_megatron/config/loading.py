"""YAML file + dotted overrides -> RunConfig, and back. Every mistake is one line that names the option."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from capo_megatron.algorithms import DapoConfig, SurrogateConfig
from capo_megatron.config import options as schema
from capo_megatron.config.dialect import emit, parse
from capo_megatron.config.sections import DataConfig, RolloutConfig, RunConfig
from capo_megatron.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Override:
    """`path=value` from the command line."""

    path: tuple[str, ...]
    value: Any

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def load(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a YAML file (None: an empty one), with `key.key=value` overrides applied in order.

    Values of overrides are YAML (`data.train=[a.jsonl, b.jsonl]`); a mapping sets the options it names and leaves the
    others alone. An override of `algorithm.kind` that differs from the file's keeps the file's `algorithm` options that
    mean the same to both algorithms (see `_carries_over`), and a warning says which were dropped. A response budget
    that the algorithm needs and is not given is `rollout.max_tokens`, see `resolve`.

    Raises ConfigError with one line per mistake.
    """
    tree = {} if path is None else _read(path)
    path = path or Path("command line")
    given = [_parse_override(text) for text in overrides]
    tree = _apply(_switch_algorithm(tree, given, path), given)
    return _validate(tree, given, path)


def around_model(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration for sampling from and evaluating a bare Hugging Face directory, with overrides applied.

    It writes to runs/<name of the directory>, computes in the dtype of the weights, and gives prompt and response half
    of the model's positions each, if those are few. A tokenizer without chat tokens gets the plain template, and a
    task that is named is graded by its own reward. Raises ConfigError.
    """
    described = _described(directory)
    tree: dict[str, Any] = {
        "output": f"runs/{directory.resolve().name}",
        "model": {"path": str(directory)},
        "eval": {"every": 0},
        "data": {},
        "rollout": {},
    }
    dtype = described.get("dtype", described.get("torch_dtype"))
    if dtype in ("float32", "bfloat16"):
        tree["model"]["dtype"] = dtype
    positions = described.get("max_position_embeddings")
    if isinstance(positions, int) and positions < DataConfig.max_prompt_tokens + RolloutConfig.max_tokens:
        tree["data"]["max_prompt_tokens"] = tree["rollout"]["max_tokens"] = max(1, positions // 2)
    if not _has_chat_tokens(directory):
        tree["data"]["template"] = "plain"
    given = [_parse_override(text) for text in overrides]
    task = next((str(override.value) for override in reversed(given) if override.path == ("data", "task")), None)
    if task is not None:
        tree["reward"] = {"kind": "reasoning_gym" if task.startswith("reasoning_gym/") else "task"}
    return _validate(_apply(tree, given), given, directory)


def _described(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        what = "no such file" if directory.is_dir() else "the folder does not exist"
        raise ConfigError(f"{path}: {what}. Point to a Hugging Face model directory.")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Download it again.") from error
    if not isinstance(described, dict):
        raise ConfigError(f"{path}: got {schema.show(described)}, expected an object. Download it again.")
    return described


def _has_chat_tokens(directory: Path) -> bool:
    files = [directory / name for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")]
    return any(b"<|im_start|>" in file.read_bytes() for file in files if file.is_file())


def dump(config: RunConfig) -> str:
    """YAML text with every option, which `load` reads back to an equal object."""
    return emit(json.loads(json.dumps(asdict(config))))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the config cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the config is not UTF-8 text (byte {error.start}).") from error
    tree = parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: got {schema.show(tree)}, expected `section: options` pairs at the top level.")
    return tree


# --- overrides ------------------------------------------------------------------------------------------------------


def _parse_override(text: str) -> _Override:
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"{text!r}: not an override. Write option=value, e.g. train.lr=1e-6. (command line)")
    return _Override(path, _parse_value(key.strip(), value.strip()))


def _parse_value(key: str, text: str) -> Any:
    """YAML for numbers, flags, `[...]`, `{...}` and quoted text; any other text is taken as it stands."""
    structured = text.startswith(("[", "{", '"', "'"))
    try:
        value = parse(text, "value")
    except ConfigError as error:
        if structured:
            raise ConfigError(f"{key}: {str(error).partition(': ')[2]} Got {text!r}. (command line)") from error
        return text
    return value if structured or not isinstance(value, str | list | dict) else text


def _switch_algorithm(tree: dict[str, Any], overrides: Sequence[_Override], path: Path) -> dict[str, Any]:
    section = tree.get("algorithm")
    if not isinstance(section, Mapping):
        return tree
    before = section.get("kind", schema.DEFAULT_ALGORITHM)
    after = _wanted_algorithm(overrides, before)
    if after == before or after not in list(schema.algorithms()):  # an unknown one is refused later, without a warning
        return tree
    old = schema.algorithm_defaults(before) if before in list(schema.algorithms()) else {}
    new = schema.algorithm_defaults(after)
    kept = {key: value for key, value in section.items() if key != "kind" and _carries_over(key, value, old, new)}
    dropped = [f"algorithm.{key}" for key in section if key != "kind" and key not in kept]
    if dropped:
        _log.warning("algorithm.kind=%s replaces %s of %s: %s not used.", after, before, path, ", ".join(dropped))
    return {**tree, "algorithm": {"kind": after, **kept}}


# What makes no sense without another option's value goes where that option goes.
_GOES_WITH = {"length": "reduction", "reference_decay": "mask"}


def _carries_over(key: str, value: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether an option of one algorithm holds for another, given the defaults of both.

    It does if the other has it, too, with the same default: an algorithm with a default of its own, such as GSPO's
    clips, means something else by it. Where the value is that default, there is nothing to lose.
    """
    needed = _GOES_WITH.get(key, key)
    same = all(name in old and name in new and old[name] == new[name] for name in (key, needed))
    return same or (key in new and value == new[key])


def _wanted_algorithm(overrides: Sequence[_Override], default: Any) -> Any:
    wanted = default
    for override in overrides:
        if override.path == ("algorithm", "kind"):
            wanted = override.value
        elif override.path == ("algorithm",) and isinstance(override.value, Mapping):
            wanted = override.value.get("kind", wanted)
    return wanted


def _apply(tree: dict[str, Any], overrides: Sequence[_Override]) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for override in overrides:
        _set(tree, override, override.path, override.value)
    return tree


def _set(tree: dict[str, Any], override: _Override, path: tuple[str, ...], value: Any) -> None:
    if isinstance(value, Mapping) and schema.is_section(path):
        for key, item in value.items():
            _set(tree, override, (*path, key), item)
        return
    node = tree
    for depth, key in enumerate(path[:-1], start=1):
        if node.get(key) is None:
            node[key] = {}
        if not isinstance(node[key], dict):
            parent = ".".join(path[:depth])
            got = schema.show(node[key])
            raise ConfigError(f"{override.dotted}: {parent} is {got}, which has no options. Set {parent} as a whole.")
        node = node[key]
    node[path[-1]] = value


# --- validation -----------------------------------------------------------------------------------------------------


@cache
def _adapter() -> TypeAdapter[RunConfig]:
    """Made on first use: it looks up the algorithms that other packages install, which may import this one."""
    return TypeAdapter(RunConfig)


def _validate(tree: dict[str, Any], overrides: Sequence[_Override], path: Path) -> RunConfig:
    kind = _algorithm_kind(tree, overrides, path)
    if isinstance(tree.get("algorithm"), dict):
        tree = {**tree, "algorithm": {"kind": kind, **tree["algorithm"]}}
    try:
        config = _adapter().validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        lines = schema.explain(error.errors(include_url=False), kind)
        raise ConfigError("\n".join(f"{line} ({_origin(at, overrides, path)})" for at, line in lines)) from error
    oversized = list(schema.oversized(tree))
    if oversized:
        raise ConfigError("\n".join(f"{line} ({_origin(at, overrides, path)})" for at, line in oversized))
    return resolve(config)


def resolve(config: RunConfig) -> RunConfig:
    """The config with the response budget of its algorithm: `rollout.max_tokens`, where one is needed and not given."""
    algorithm: Any = config.algorithm
    budget = config.rollout.max_tokens
    if isinstance(algorithm, SurrogateConfig) and algorithm.reduction == "constant-length" and algorithm.length is None:
        algorithm = replace(algorithm, length=budget)
    if isinstance(algorithm, DapoConfig) and algorithm.overlong_buffer > 0 and algorithm.max_length is None:
        algorithm = replace(algorithm, max_length=budget)
    return replace(config, algorithm=algorithm)


def _algorithm_kind(tree: Mapping[str, Any], overrides: Sequence[_Override], path: Path) -> str:
    section = tree.get("algorithm", {})
    if isinstance(section, str):
        raise ConfigError(
            f"algorithm: got {section!r}, expected a section of options. Write algorithm.kind={section}. "
            f"({_origin('algorithm', overrides, path)})"
        )
    kind = section.get("kind", schema.DEFAULT_ALGORITHM) if isinstance(section, Mapping) else schema.DEFAULT_ALGORITHM
    if not isinstance(kind, str) or kind not in schema.algorithms():
        guess = schema.did_you_mean(str(kind), schema.algorithms())
        known = ", ".join(schema.algorithms())
        origin = _origin("algorithm.kind", overrides, path)
        raise ConfigError(f"algorithm.kind: no such algorithm {schema.show(kind)}.{guess} Known: {known}. ({origin})")
    return kind


def _origin(dotted: str, overrides: Sequence[_Override], path: Path) -> str:
    dotted = dotted.partition("[")[0]
    for override in overrides:
        if f"{dotted}.".startswith(f"{override.dotted}.") or f"{override.dotted}.".startswith(f"{dotted}."):
            return "command line"
    return str(path)
