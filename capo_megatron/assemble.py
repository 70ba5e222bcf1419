"""From a `RunConfig` to the parts of a run, in the order in which mistakes are cheapest to find.

Nothing is written before the config, the layout, the tokenizer, the problems and the weights have been accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2Config

from capo_megatron.algorithms import build as build_algorithm
from capo_megatron.config import RunConfig, dump
from capo_megatron.data import ShuffledSource, check_tokenizer, load_data, make_task, stop_ids, tokenizer_for
from capo_megatron.mcore import runtime
from capo_megatron.mcore.checkpoint import DistCheckpointStore
from capo_megatron.mcore.hf_files import DirectorySource, WeightSource, hf_config, save_hf
from capo_megatron.mcore.hf_weights import RandomSource
from capo_megatron.mcore.model import DTYPES, ModelShape, check_layout, read_shape
from capo_megatron.mcore.policy import MegatronPolicy
from capo_megatron.mcore.runtime import Runtime
from capo_megatron.rewards import build_reward
from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.runlog import RunLog
from capo_megatron.seams import SamplingParams
from capo_megatron.trainer import Parts, train
from capo_megatron.warmup import is_made, sign, train_config, warm_up

Say = Callable[[str], None]


def run_training(config: RunConfig, say: Say) -> int:
    """Train as configured, on the ranks that were started; the step reached. `say` shows a line to the user."""
    with ranks(config) as team:
        model = load_model(config, team, say)
        problems = load_data(config.data, model.tokenizer, config.seed)
        policy = model.policy(config.train.steps * config.train.minibatches * config.train.epochs)
        _say_once(say, team, _describe(config, model, policy, len(problems.train), problems.dropped))
        output = Path(config.output)
        log = RunLog(output, config.log, dump(config), team.rank, config.train.steps)
        store = DistCheckpointStore(output, team, config.checkpoint.keep)
        reward = build_reward(config.reward)
        try:
            parts = Parts(
                policy=policy,
                engine=model.engine(),
                reward=reward,
                prompts=ShuffledSource(problems.train, config.seed, config.data.shuffle),
                validation=problems.validation,
                algorithm=build_algorithm(config.algorithm),
                store=store,
                log=log,
                team=team,
                sampling=model.sampling,
                pad_id=model.pad_id,
            )
            return train(config, parts)
        finally:
            reward.close()
            log.close()


@contextmanager
def ranks(config: RunConfig) -> Iterator[Runtime]:
    """The started ranks of a run whose config they all accept."""
    config.check(runtime.world_size())
    check_layout(shape_of(config), config.parallel)
    build_algorithm(config.algorithm)
    team = runtime.start(config.parallel, config.seed)
    try:
        yield team
    finally:
        team.stop()


def shape_of(config: RunConfig) -> ModelShape:
    """The model's shape, with the run's own number of positions if it sets one."""
    model = config.model
    if model.shape is not None:
        shape = ModelShape.of(model.shape)
    else:
        assert model.path is not None, "RunConfig.check requires one of both"
        shape = read_shape(model.path)
    return replace(shape, max_position_embeddings=model.max_position_embeddings or shape.max_position_embeddings)


@dataclass(frozen=True)
class Model:
    """A model before training: what it looks like, where its weights are, and how it is sampled."""

    config: RunConfig
    team: Runtime
    shape: ModelShape
    tokenizer: PreTrainedTokenizerBase
    weights: WeightSource
    sampling: SamplingParams

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def policy(self, optimizer_steps: int = 1) -> MegatronPolicy:
        """The model as a policy with its weights and its frozen reference."""
        config = self.config
        policy = MegatronPolicy(
            self.shape,
            self.team,
            config.train,
            dtype=DTYPES[config.model.dtype],
            total_steps=optimizer_steps,
            temperature=config.rollout.temperature,
            distributed_optimizer=config.parallel.distributed_optimizer,
        )
        reference = config.model.reference
        policy.load(self.weights if reference is None else DirectorySource(Path(reference)))
        policy.freeze_reference()
        if reference is not None:
            policy.load(self.weights)
        return policy

    def engine(self) -> TransformersEngine:
        """An engine of this shape, without weights; the ranks share the problems."""
        config = Qwen2Config(**hf_config(self.shape, self.config.model.dtype))
        share = (self.team.rank, self.team.size)
        dtype = DTYPES[self.config.model.dtype]
        return TransformersEngine(config, self.tokenizer, dtype, self.config.rollout.batch_size, share)


def load_model(config: RunConfig, team: Runtime, say: Say) -> Model:
    """The model of a run, warmed up first where the config says so. Collective."""
    shape = shape_of(config)
    tokenizer = tokenizer_for(config.model, config.data)
    check_tokenizer(tokenizer, shape.vocab_size)
    weights = _weights(config, team, shape, tokenizer, say)
    return Model(config, team, shape, tokenizer, weights, _sampling(config, tokenizer))


def _sampling(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    rollout = config.rollout
    task_stop = make_task(config.data, tokenizer, config.seed).stop if config.data.task else ()
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=stop_ids(tokenizer, (*rollout.stop, *task_stop)),
        seed=config.seed,
    )


# --- the base model -----------------------------------------------------------------------------------------------------


def base_directory(config: RunConfig) -> Path:
    """Where the warm-up keeps its model: runs of one parent folder share it."""
    assert config.warmup is not None
    return Path(config.output).parent / config.warmup.path


def _weights(
    config: RunConfig, team: Runtime, shape: ModelShape, tokenizer: PreTrainedTokenizerBase, say: Say
) -> WeightSource:
    """The weights that training starts from: a directory's, a warm-up's, or seeded random ones."""
    start = DirectorySource(Path(config.model.path)) if config.model.path else RandomSource(shape, config.seed)
    if config.warmup is None:
        return start
    directory = base_directory(config)
    recipe = {
        "seed": config.seed,
        "model": asdict(config.model),
        "warmup": asdict(config.warmup),
        "task": config.data.task,
        "task_options": config.data.task_options,
    }
    if not team.gather(is_made(directory, recipe))[0]:
        _make_base(config, team, shape, tokenizer, start, directory, recipe, say)
    return DirectorySource(directory)


def _make_base(
    config: RunConfig,
    team: Runtime,
    shape: ModelShape,
    tokenizer: PreTrainedTokenizerBase,
    start: WeightSource,
    directory: Path,
    recipe: dict[str, Any],
    say: Say,
) -> None:
    warmup = config.warmup
    assert warmup is not None
    optimisation = train_config(warmup, config.train)
    policy = MegatronPolicy(shape, team, optimisation, dtype=DTYPES[config.model.dtype], total_steps=warmup.steps)
    policy.load(start)
    began = time.monotonic()

    def progress(step: int, loss: float) -> None:
        if step % max(1, warmup.steps // 10) == 0:
            left = (time.monotonic() - began) / step * (warmup.steps - step)
            _say_once(say, team, f"warm-up {step}/{warmup.steps}  loss {loss:.3f}  {left:.0f} s left")

    warm_up(warmup, policy, make_task(config.data, tokenizer, config.seed), tokenizer, progress)
    weights = policy.hf_weights()
    if team.rank == 0:
        save_hf(directory, shape, weights)
        tokenizer.save_pretrained(str(directory))
        sign(directory, recipe)
    else:
        for _ in weights:  # every rank takes part in gathering every tensor
            pass
    team.barrier()


def _say_once(say: Say, team: Runtime, text: str) -> None:
    if team.rank == 0:
        say(text)


def _describe(config: RunConfig, model: Model, policy: MegatronPolicy, problems: int, dropped: Any) -> str:
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    return (
        f"{config.algorithm.kind}: {problems} problems{f' (left out: {left_out})' if left_out else ''}, "
        f"{model.shape.num_hidden_layers} layers, {model.team.size} ranks, output {config.output}"
    )
