"""The example configs are valid, and there is one per algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from capo_megatron.algorithms import ALGORITHMS, build
from capo_megatron.assemble import describe
from capo_megatron.config import load
from capo_megatron.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPARED = sorted((EXAMPLES / "algorithms").glob("*.yaml"))


@pytest.mark.parametrize("path", [*COMPARED, *EXAMPLES.glob("*.yaml")], ids=lambda path: path.name)
def test_an_example_is_a_valid_config(path: Path) -> None:
    config = load(path)
    config.check(8 if path in COMPARED else 2)
    build(config.algorithm)


@pytest.mark.parametrize("kind", list(ALGORITHMS))
def test_the_quickstarts_config_takes_any_algorithm(kind: str, tmp_path: Path) -> None:
    needed = ["data.perturbations=[typo, typo]"] if kind == "scapo" else []
    config = load(EXAMPLES / "quickstart.yaml", [f"output={tmp_path / 'run'}", f"algorithm.kind={kind}", *needed])
    assert config.algorithm.kind == kind
    assert describe(config, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["kind=scapo"], r"no problem has any\. Set data\.perturbations=\[typo, typo\]\.$"),
        (["kind=simko", "top_k=18"], r"^algorithm\.top_k=18: the model has 17 tokens\. Lower it\.$"),
    ],
)
def test_what_the_quickstarts_config_lacks_for_an_algorithm_is_said(
    options: list[str], message: str, tmp_path: Path
) -> None:
    config = load(EXAMPLES / "quickstart.yaml", [f"output={tmp_path}", *(f"algorithm.{text}" for text in options)])
    with pytest.raises(ConfigError, match=message):
        describe(config, 1)


def test_every_algorithm_has_an_example_of_its_name() -> None:
    assert {path.stem for path in COMPARED} == set(ALGORITHMS)
    assert all(load(path).algorithm.kind == path.stem for path in COMPARED)


def test_examples_of_algorithms_differ_in_the_algorithm_and_what_it_needs_alone() -> None:
    plain = load(EXAMPLES / "algorithms" / "grpo.yaml")
    for path in COMPARED:
        config = load(path)
        data = replace(config.data, perturbations=())
        assert replace(config, output=plain.output, algorithm=plain.algorithm, data=data) == plain, path.name
