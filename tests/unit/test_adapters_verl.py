"""CAPO in verl: against recorded signatures, and against the source of verl 0.9.1 where it is installed.

verl is read, not imported: without a GPU its dependencies are of no use (`make test-trl` installs it without them).
"""

import ast
import importlib.util
import inspect
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from capo_megatron import adapters
from capo_megatron.adapters import CapoOptions, MissingTrainerError, verl
from capo_megatron.algorithms.equations import capo_advantage, capo_noise_mask, sequence_logprob_mean
from capo_megatron.errors import ConfigError

# verl.trainer.ppo.ray_trainer.compute_advantage, and what it hands to a registered estimator.
COMPUTE_ADVANTAGE = ["data", "adv_estimator", "gamma", "lam", "num_repeat", "norm_adv_by_std_in_grpo", "config"]
HANDED = ["token_level_rewards", "response_mask", "config", "index", "reward_baselines"]
# Fields of the batch that PPOTrainer._compute_advantage (verl/trainer/ppo/v1/trainer_base.py) reads.
BATCH = ["uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"]


def source(module):
    """The syntax tree of a module of the installed verl."""
    try:
        if version("verl") != verl.VERL:
            pytest.skip(f"verl {version('verl')} is installed, the adapter is for {verl.VERL}")
    except PackageNotFoundError:
        pytest.skip("verl is not installed")
    root = Path(importlib.util.find_spec("verl").origin).parent
    return ast.parse((root / module).read_text())


def function(tree, name):
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def compiled(node, names):
    """A function of verl's, taken out of its module."""
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    code = compile(ast.fix_missing_locations(ast.Module([future, node], [])), "verl", "exec")
    exec(code, names)
    return names[node.name]


def data(old=True, reference=True):
    random = torch.Generator().manual_seed(5)
    mask = (torch.arange(5) < torch.randint(1, 6, (12, 1), generator=random)).long()
    scores = torch.zeros(12, 5)
    scores[:, 0] = torch.randint(0, 2, (12,), generator=random).float()
    batch = {"response_mask": mask, "token_level_scores": scores, "token_level_rewards": scores - 5.0}
    if old:
        batch["old_log_probs"] = -torch.rand(12, 5, generator=random)
    if reference:
        batch["ref_log_prob"] = -2 * torch.rand(12, 5, generator=random)
    uids = np.array([f"prompt-{row % 3}" for row in range(12)], dtype=object)  # groups are not adjacent
    return SimpleNamespace(batch=batch, non_tensor_batch={"uid": uids})


def expected(rows, options):
    mask = rows.batch["response_mask"]
    own, reference = (sequence_logprob_mean(rows.batch[n], mask)[0] for n in ("old_log_probs", "ref_log_prob"))
    correct = rows.batch["token_level_scores"].sum(1) > 0.5
    keep = capo_noise_mask(reference, correct, options.ref_high, options.ref_low)
    assert 0 < keep.sum() < len(keep)
    return (capo_advantage(own, correct, torch.arange(12) % 3, options.tau) * keep)[:, None] * mask


OPTIONS = CapoOptions(tau=0.4, ref_high=2.5, ref_low=2.5)


def theirs(
    data: Any,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Any:
    """The recorded signature."""
    return (adv_estimator, num_repeat, config)


def test_the_recorded_signatures_are_those_of_the_release():
    trainer = source("trainer/ppo/ray_trainer.py")
    compute = function(trainer, "compute_advantage")
    assert [argument.arg for argument in compute.args.args] == COMPUTE_ADVANTAGE
    names = {node.value for node in ast.walk(compute) if isinstance(node, ast.Constant)}
    assert set(HANDED) | {"uid", "advantages", "returns"} <= names
    fields = [
        [item.value for item in node.elts]
        for node in ast.walk(function(source("trainer/ppo/v1/trainer_base.py"), "_compute_advantage"))
        if isinstance(node, ast.List) and all(isinstance(item, ast.Constant) for item in node.elts)
    ]
    assert BATCH in fields
    assert "use_kl_loss" in ast.unparse(function(source("trainer/ppo/utils.py"), "need_reference_policy"))
    assert "VERL_USE_EXTERNAL_MODULES" in ast.unparse(source("__init__.py"))


def test_the_wrapped_modules_are_those_that_hold_the_function():
    root = Path(importlib.util.find_spec("verl").origin).parent if source("__init__.py") else Path()
    holders = set()
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "compute_advantage" not in text:
            continue
        imported = [
            alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
        if "compute_advantage" in imported or "def compute_advantage(" in text:
            holders.add(".".join(["verl", *path.relative_to(root).with_suffix("").parts]))
    assert holders == set(verl._HOLDERS)


def test_verls_own_registry_and_function_run_with_ours():
    core, trainer = source("trainer/ppo/core_algos.py"), source("trainer/ppo/ray_trainer.py")
    enumeration = next(n for n in ast.walk(core) if isinstance(n, ast.ClassDef) and n.name == "AdvantageEstimator")
    names: dict[str, Any] = {"ADV_ESTIMATOR_REGISTRY": {}}
    exec("from __future__ import annotations\nfrom enum import Enum", names)
    for node in (enumeration, function(core, "register_adv_est"), function(core, "get_adv_estimator_fn")):
        compiled(node, names)
    estimator = verl.Estimator(OPTIONS)
    names["register_adv_est"]("capo")(estimator)
    algorithms = SimpleNamespace(get_adv_estimator_fn=names["get_adv_estimator_fn"])
    scope = {"core_algos": algorithms, "AdvantageEstimator": names["AdvantageEstimator"]}
    compute = compiled(function(trainer, "compute_advantage"), scope)
    with pytest.raises(ConfigError, match="got no old_log_probs"):  # this is why there is a wrapper
        compute(data(), adv_estimator="capo", config={})
    rows = verl.HandingOver(compute, estimator)(data(), adv_estimator="capo", config={})
    torch.testing.assert_close(rows.batch["advantages"], expected(rows, OPTIONS), rtol=0, atol=1e-6)


def test_advantages_come_from_the_logprobs_in_the_batch():
    assert list(inspect.signature(theirs).parameters) == COMPUTE_ADVANTAGE
    inspect.signature(verl.Estimator(OPTIONS)).bind(**dict.fromkeys(HANDED))
    compute = verl.HandingOver(theirs, verl.Estimator(OPTIONS))
    assert compute(data(), adv_estimator="rloo", num_repeat=4, config="c") == ("rloo", 4, "c")
    rows = data()
    assert compute(rows, adv_estimator="capo", gamma=1.0, lam=1.0, num_repeat=4, config={}) is rows
    torch.testing.assert_close(rows.batch["advantages"], expected(rows, OPTIONS), rtol=0, atol=1e-6)
    assert torch.equal(rows.batch["advantages"], rows.batch["returns"])


def test_what_is_missing_is_named():
    compute = verl.HandingOver(theirs, verl.Estimator(OPTIONS))
    with pytest.raises(ConfigError, match="old_log_probs"):
        compute(data(old=False), adv_estimator="capo")
    with pytest.raises(ConfigError, match="use_kl_loss=True"):
        compute(data(reference=False), adv_estimator="capo")
    with pytest.raises(ConfigError, match="use_kl_in_reward"):
        compute(data(), adv_estimator="capo", config={"use_kl_in_reward": True})


def test_register_reaches_every_module_that_holds_the_function(monkeypatch):
    monkeypatch.setattr(adapters, "version", lambda name: verl.VERL)
    registry: dict[str, Any] = {}
    core = ModuleType("verl.trainer.ppo.core_algos")
    core.ADV_ESTIMATOR_REGISTRY = registry
    core.register_adv_est = lambda name: lambda made: registry.__setitem__(name, made)
    packages = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1")
    holders = [ModuleType(name) for name in verl._HOLDERS[:2]]
    for module in (core, *holders, *map(ModuleType, packages)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for holder in holders:
        holder.compute_advantage = theirs
    verl.register(CapoOptions(tau=0.5))
    verl.register(OPTIONS)
    assert registry["capo"].options is OPTIONS
    for holder in holders:
        assert holder.compute_advantage == verl.HandingOver(theirs, registry["capo"])


def test_without_verl_register_says_what_to_install():
    if importlib.util.find_spec("verl"):
        pytest.skip("verl is installed")
    with pytest.raises(MissingTrainerError, match=r"pip install verl==0\.9\.1"):
        verl.register()
