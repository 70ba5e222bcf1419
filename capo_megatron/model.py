"""The model of a run: its shape, tokenizer and weights, and how it becomes a policy and an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from capo_megatron.config import PrecisionConfig, RunConfig
from capo_megatron.data import check_tokenizer, make_task, stop_ids, tokenizer_for
from capo_megatron.errors import CheckpointError
from capo_megatron.mcore.checkpoint import DistCheckpointStore
from capo_megatron.mcore.model import DTYPES, check_layout
from capo_megatron.mcore.policy import MegatronPolicy
from capo_megatron.mcore.runtime import Runtime
from capo_megatron.rollout import vllm
from capo_megatron.rollout.remote import RemoteEngine
from capo_megatron.rollout.transformers import TransformersEngine
from capo_megatron.seams import RolloutEngine, SamplingParams
from capo_megatron.warmup import Base, Say
from capo_megatron.weights.checkpoint import open_checkpoint
from capo_megatron.weights.shape import ModelShape, hf_config, read_shape
from capo_megatron.weights.sources import RandomSource, WeightSource, check_source, identity


@dataclass(frozen=True)
class Model:
    """A model that has been accepted, but not built: what it looks like, where it starts from, how it is sampled."""

    config: RunConfig
    shape: ModelShape
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    base: Base | None  # what the warm-up makes of the start, where the config asks for one

    @classmethod
    def accept(cls, config: RunConfig) -> Model:
        """The model that `config` names. Raises ConfigError, DataError or CheckpointError; writes nothing."""
        shape = shape_of(config)
        check_layout(shape, config.parallel, config.precision)
        if config.rollout.in_fp8:
            vllm.check_fp8_shape(shape, config.rollout.vllm.tensor)
        tokenizer = tokenizer_for(config.model, config.data)
        check_tokenizer(tokenizer, shape.vocab_size)
        base = Base.of(config, shape, tokenizer) if config.warmup is not None else None
        return cls(config, shape, tokenizer, _sampling(config, tokenizer), base)

    def check_weights(self) -> None:
        """Raise CheckpointError or ConfigError unless the weights that there are belong to this model."""
        sources = [self._start()]
        if self.base is not None and self.base.is_made():
            sources = [self.base.weights()]
        if self.config.model.reference is not None:
            sources.append(_weights_at(self.config.model.reference))
        for source in sources:
            check_source(self.shape, source)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def weights(self, team: Runtime, say: Say) -> WeightSource:
        """What training starts from: a directory, seeded random weights, or what the warm-up makes of these."""
        if self.base is None:
            return self._start()
        self.base.make(self._start(), team, say)
        return self.base.weights()

    def policy(
        self, team: Runtime, weights: WeightSource, optimizer_steps: int, averaged_reference: bool = False
    ) -> MegatronPolicy:
        """The model as a policy, with its reference: frozen, or the start of a moving average."""
        policy = self._bare_policy(team, optimizer_steps, averaged_reference, self.config.precision)
        policy.load(self._reference(weights))
        policy.freeze_reference()
        if self.config.model.reference is not None:
            policy.load(weights)
        return policy

    def reference_identity(self, weights: WeightSource | None = None) -> str:
        """By which a checkpoint knows the frozen reference again; "" while a warm-up has still to make it.

        `weights` are those that training starts from; default: those that there are.
        """
        if weights is None and self.base is not None and self.config.model.reference is None:
            weights = self.base.weights() if self.base.is_made() else None
            if weights is None:
                return ""
        return identity(self.shape, self._reference(weights or self._start()))

    def _reference(self, weights: WeightSource) -> WeightSource:
        reference = self.config.model.reference
        return weights if reference is None else _weights_at(reference)

    def engine(self, team: Runtime) -> RolloutEngine:
        """The configured engine for this shape, without weights; the ranks share the problems. Collective."""
        rollout = self.config.rollout
        if rollout.placement == "separate":
            bucket = rollout.vllm.bucket_mib * 2**20
            return RemoteEngine(rollout.separate, self.engine_identity(), self.tokenizer, team, bucket, team.device)
        return self.local_engine(team)

    def engine_identity(self) -> dict[str, Any]:
        """In what a trainer and its engine servers have to agree: JSON values."""
        config = self.config
        return {
            "model": self.shape.identity(),
            "model.dtype": config.model.dtype,
            "rollout.engine": config.rollout.engine,
            "rollout.vllm.weights": config.rollout.vllm.weights,
        }

    def local_engine(self, team: Runtime) -> RolloutEngine:
        """The engine of these very ranks. Collective."""
        dtype, rollout = self.config.model.dtype, self.config.rollout
        if rollout.engine == "vllm":
            return vllm.VllmEngine(
                self.shape, self.tokenizer, dtype, rollout.vllm, team.rank, team.size, rollout.retries
            )
        described = hf_config(self.shape, dtype)
        config = AutoConfig.for_model(described.pop("model_type"), **described)
        share = (team.rank, team.size)
        return TransformersEngine(config, self.tokenizer, DTYPES[dtype], rollout.batch_size, share)

    def trained_engine(self, team: Runtime, step: int | None) -> tuple[RolloutEngine, int]:
        """An engine with the weights of a checkpoint (None: the newest), and its step. Raises CheckpointError."""
        policy = self._bare_policy(team)
        found = DistCheckpointStore(Path(self.config.output), team).load(policy, step)
        if found is None:
            raise CheckpointError(
                f"{self.config.output}: no checkpoint in it yet. Train first, or use the model before training: --base."
            )
        return self._loaded_engine(team, policy), found[0]

    def base_engine(self, team: Runtime, say: Say) -> RolloutEngine:
        """An engine with the weights that training starts from."""
        policy = self._bare_policy(team)
        policy.load(self.weights(team, say))
        return self._loaded_engine(team, policy)

    def _start(self) -> WeightSource:
        config = self.config
        return _weights_at(config.model.path) if config.model.path else RandomSource(self.shape, config.seed)

    def _bare_policy(
        self,
        team: Runtime,
        optimizer_steps: int = 1,
        averaged_reference: bool = False,
        precision: PrecisionConfig | None = None,
    ) -> MegatronPolicy:
        """Without `precision` it only carries weights to an engine, for which no TransformerEngine is needed."""
        config = self.config
        return MegatronPolicy(
            self.shape,
            team,
            config.train,
            dtype=DTYPES[config.model.dtype],
            total_steps=optimizer_steps,
            temperature=config.rollout.temperature,
            distributed_optimizer=config.parallel.distributed_optimizer,
            averaged_reference=averaged_reference,
            precision=precision,
        )

    def _loaded_engine(self, team: Runtime, policy: MegatronPolicy) -> RolloutEngine:
        engine = self.engine(team)
        engine.load_weights(policy.hf_weights(), policy.version)
        return engine


def _weights_at(path: str) -> WeightSource:
    """The weights of a Hugging Face directory, or of a converted one; checked against its manifest as they are read."""
    return open_checkpoint(path).checked()


def shape_of(config: RunConfig) -> ModelShape:
    """The model's shape, with the run's own number of positions if it sets one."""
    model = config.model
    if model.shape is not None:
        shape = ModelShape.of(model.shape)
    else:
        assert model.path is not None, "RunConfig.check requires one of both"
        shape = read_shape(model.path)
    return replace(shape, max_position_embeddings=model.max_position_embeddings or shape.max_position_embeddings)


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
