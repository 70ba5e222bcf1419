"""Rules that span sections of a RunConfig, and the arithmetic of its batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capo_megatron.config.sections import ModelConfig, RunConfig

_REWARDS = ("math_verify", "exact", "reasoning_gym", "task")


def mistakes(config: RunConfig, world_size: int, training: bool = True) -> Iterator[str]:
    """One line for every rule that `config` breaks when `world_size` ranks train, or only sample and evaluate."""
    yield from _model(config)
    yield from _layout(config, world_size)
    yield from _engine(config, world_size)
    yield from _precision(config)
    yield from _data(config)
    yield from _positions(config)
    if training:
        yield from _problems(config)
        yield from _batches(config, world_size)
        yield from _sampling(config)
        yield from _schedule(config)


def _model(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.path is None and model.shape is None:
        yield "model: neither path nor shape is given. Set model.path to a Hugging Face folder, or model.shape."
    if model.path is not None and model.shape is not None:
        yield f"model: both path ({model.path}) and shape are given. Keep one; a path brings its own shape."
    if model.shape is not None and model.path is None and model.tokenizer is None and config.data.train:
        yield "model.tokenizer: missing. Problem files need a tokenizer, and model.shape brings none."


def _layout(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    block = parallel.tensor * parallel.pipeline
    if world_size % block:
        yield (
            f"parallel.tensor={parallel.tensor} x parallel.pipeline={parallel.pipeline} takes a multiple of {block} "
            f"ranks, got {world_size}. Start {block * max(1, round(world_size / block))} ranks, or change the layout."
        )
    if parallel.virtual > 1 and parallel.pipeline == 1:
        yield f"parallel.virtual={parallel.virtual} needs parallel.pipeline > 1, got 1. Use parallel.virtual=1."
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence=true needs parallel.tensor > 1, got 1. Use parallel.sequence=false."


def _engine(config: RunConfig, world_size: int) -> Iterator[str]:
    if config.rollout.vllm.weights == "fp8" and config.rollout.engine != "vllm":
        yield f"rollout.vllm.weights=fp8: belongs to rollout.engine=vllm, got {config.rollout.engine}. Remove it."
    if config.rollout.in_fp8 and config.model.dtype != "bfloat16":
        yield f"rollout.vllm.weights=fp8: needs model.dtype=bfloat16, got {config.model.dtype}."
    if config.rollout.placement == "separate":
        yield from _servers(config, world_size)
        return
    if config.rollout.separate.servers:
        yield (
            f"rollout.separate.servers: {', '.join(config.rollout.separate.servers)} are named, and rollout.placement="
            "colocated uses none. Set rollout.placement=separate, or remove them."
        )
    tensor = config.rollout.vllm.tensor
    if config.rollout.engine == "vllm" and world_size % tensor:
        yield (
            f"rollout.vllm.tensor={tensor} does not divide the {_count(world_size, 'rank')}, each of which belongs to "
            "one engine. Use a divisor."
        )
    if config.rollout.engine == "vllm" and tensor > 1 and config.rollout.async_steps:
        yield (
            f"rollout.async_steps=1 with rollout.vllm.tensor={tensor}: the ranks of an engine would talk to each other "
            "while they train, and a GPU runs two such conversations in an order of its own: they can wait for each "
            "other for ever. Use rollout.vllm.tensor=1, or rollout.async_steps=0."
        )


def _servers(config: RunConfig, world_size: int) -> Iterator[str]:
    servers = config.rollout.separate.servers
    if not servers:
        yield (
            "rollout.separate.servers: missing. rollout.placement=separate needs the host:port of every engine server."
        )
    elif len(set(servers)) < len(servers):
        yield f"rollout.separate.servers: {', '.join(servers)}: one is named twice. Name each once."
    elif world_size % len(servers):
        yield (
            f"rollout.separate.servers: {_count(len(servers), 'server')} for {_count(world_size, 'trainer rank')}, "
            "which are dealt out evenly. A server may have any number of ranks: put several engines behind one."
        )
    for server in servers:
        host, colon, port = server.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16) or "/" in server or "@" in server:
            yield f"rollout.separate.servers: got {server!r}, expected host:port, e.g. node1:29600."


def _precision(config: RunConfig) -> Iterator[str]:
    precision, unset = config.precision, type(config.precision)()
    if precision.fp8 is None:
        for name in ("format", "first_last_bf16", "param_gather"):
            if getattr(precision, name) != getattr(unset, name):
                yield f"precision.{name}: belongs to FP8, and precision.fp8 is null. Set precision.fp8, or remove it."
    elif config.model.dtype != "bfloat16":
        yield f"precision.fp8={precision.fp8}: needs model.dtype=bfloat16, got {config.model.dtype}."
    if precision.fp8 != "delayed":
        for name in ("amax_history", "margin"):
            if (value := getattr(precision, name)) != getattr(unset, name):
                got = precision.fp8 or "null"
                yield f"precision.{name}={value}: belongs to precision.fp8=delayed, got {got}. Remove it."
    elif any(precision.first_last_bf16):
        yield (
            f"precision.first_last_bf16={list(precision.first_last_bf16)}: precision.fp8=delayed updates the scales of "
            "all layers together and takes no layer out. Use tensorwise, blockwise or mxfp8."
        )
    elif precision.param_gather:
        yield (
            "precision.param_gather=true: with precision.fp8=delayed the weights' own scales would depend on earlier "
            "steps, and a reference pass could not give them back bit for bit. Use tensorwise, blockwise or mxfp8."
        )
    if precision.param_gather and not config.parallel.distributed_optimizer:
        yield (
            "precision.param_gather=true: it is the distributed optimizer that gathers, got "
            "parallel.distributed_optimizer=false. Set it to true."
        )


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.task is not None and data.train:
        yield f"data: both task ({data.task}) and train ({', '.join(data.train)}) are given. Keep one."
    if data.task_options and data.task is None:
        yield f"data.task_options: got {data.task_options}, but there is no data.task that could use them."
    if data.validation and data.validation_size:
        yield f"data.validation_size={data.validation_size}: data.validation already names files. Keep one of the two."
    if data.perturbed_column is not None and data.perturbations:
        yield f"data: both perturbed_column ({data.perturbed_column}) and perturbations are given. Keep one."
    if data.perturbed_column is not None and data.task is not None:
        yield f"data.perturbed_column: the task {data.task} has no columns. Use data.perturbations."
    if config.reward.kind not in _REWARDS and ":" not in config.reward.kind:
        yield f"reward.kind: got {config.reward.kind!r}, expected {', '.join(_REWARDS)}, or package.module:function."
    named = getattr(config.algorithm, "reward", "reward")  # a user's function may give any
    given = ("reward", "correct", *(["score"] if config.reward.kind == "reasoning_gym" else []))
    if ":" not in config.reward.kind and named not in given:
        yield f"algorithm.reward={named}: no such reward. reward.kind={config.reward.kind} gives {', '.join(given)}."
    if config.reward.kind == "task" and data.task is None:
        yield "reward.kind=task: needs a data.task to score for, got none. Use math_verify or exact with problem files."
    if config.reward.kind == "reasoning_gym" and not (data.task or "").startswith("reasoning_gym/"):
        yield f"reward.kind=reasoning_gym: needs data.task=reasoning_gym/<name>, got {data.task or 'no task'}."
    if config.warmup is not None and data.task is None:
        yield "warmup: needs a data.task, whose demonstrations it learns, got none. Remove the warmup section."


def _problems(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.task is None and not data.train:
        yield "data: neither task nor train is given. Set data.train to problem files, or data.task to a task's name."
    if config.eval.every and not data.validation and not data.validation_size:
        yield (
            f"eval.every={config.eval.every}: there are no validation problems. Set data.validation_size (240 in the "
            "paper) or data.validation, or eval.every=0."
        )


def _batches(config: RunConfig, world_size: int) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    if rollout.samples < 2:
        yield (
            f"rollout.samples={rollout.samples}: {config.algorithm.kind} compares the responses to one problem with "
            "each other. Use 2 or more."
        )
    if rollout.prompts % train.minibatches:
        near = max(1, round(rollout.prompts / train.minibatches)) * train.minibatches
        yield (
            f"rollout.prompts={rollout.prompts} does not divide into train.minibatches={train.minibatches} equal "
            f"mini-batches of whole groups. Use rollout.prompts={near}, or another train.minibatches."
        )
    rows, replicas = rollout.prompts * rollout.samples // train.minibatches, _replicas(config, world_size)
    if rows < replicas:
        yield (
            f"train.minibatches={train.minibatches} leaves {rows} responses to a mini-batch (rollout.prompts="
            f"{rollout.prompts} x rollout.samples={rollout.samples}), too few for {replicas} data-parallel ranks. "
            "Use fewer mini-batches."
        )
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    if longest > train.micro_batch_tokens:
        yield (
            f"train.micro_batch_tokens={train.micro_batch_tokens} cannot hold one sequence of up to {longest} tokens "
            f"(data.max_prompt_tokens={config.data.max_prompt_tokens} + rollout.max_tokens={rollout.max_tokens}). "
            f"Use {longest} or more."
        )


def _sampling(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if (rollout.top_p < 1 or rollout.top_k > 0) and not rollout.accept_truncated_sampling:
        yield (
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: tokens would be sampled from a truncated "
            "distribution while the log-probs that are trained on are of the whole one, which biases every ratio. Use "
            "top_p=1 and top_k=0, or say rollout.accept_truncated_sampling=true."
        )
    if config.eval.temperature == 0 and config.eval.samples > 1:
        yield f"eval.temperature=0 gives eval.samples={config.eval.samples} equal responses per problem. Use samples=1."


def _positions(config: RunConfig) -> Iterator[str]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
    positions = _of_model(config.model)
    if positions is not None and prompt + response > positions:
        yield (
            f"data.max_prompt_tokens={prompt} + rollout.max_tokens={response} = {prompt + response} tokens exceed the "
            f"model's {positions} positions. Lower them, or set model.max_position_embeddings."
        )


def _of_model(model: ModelConfig) -> int | None:
    """Positions the model was made for; None where only reading the weights could tell, which is not done here."""
    if model.max_position_embeddings is not None:
        return model.max_position_embeddings
    if model.shape is not None:
        return model.shape.max_position_embeddings
    try:
        described = json.loads((Path(model.path or "") / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # whoever loads the model says what is wrong with it
        return None
    positions = described.get("max_position_embeddings") if isinstance(described, dict) else None
    return positions if isinstance(positions, int) else None


def _schedule(config: RunConfig) -> Iterator[str]:
    train, warmup = config.train, config.warmup
    if train.min_lr > train.lr:
        yield f"train.min_lr={train.min_lr:g} is above train.lr={train.lr:g}. Lower it."
    total = train.steps * train.minibatches * train.epochs
    decay, origin = (train.lr_decay_steps, "train.lr_decay_steps") if train.lr_decay_steps else (total, "the whole run")
    if train.lr_warmup_steps >= decay:
        yield (
            f"train.lr_warmup_steps={train.lr_warmup_steps} must be below the {decay} optimizer steps of {origin}. "
            f"Set train.lr_warmup_steps={decay // 10}, for example."
        )
    if warmup is not None and warmup.min_lr > warmup.lr:
        yield f"warmup.min_lr={warmup.min_lr:g} is above warmup.lr={warmup.lr:g}. Lower it."
    if warmup is not None and warmup.lr_warmup_steps >= warmup.steps:
        yield (
            f"warmup.lr_warmup_steps={warmup.lr_warmup_steps} must be below warmup.steps={warmup.steps}. "
            f"Set warmup.lr_warmup_steps={warmup.steps // 10}, for example."
        )


# --- arithmetic -----------------------------------------------------------------------------------------------------


def _replicas(config: RunConfig, world_size: int) -> int:
    return max(1, world_size // (config.parallel.tensor * config.parallel.pipeline))


def describe_batch(config: RunConfig, world_size: int) -> list[str]:
    """What one step does, in numbers, as lines for a person. Assumes that `check` has passed."""
    rollout, train, parallel = config.rollout, config.train, config.parallel
    replicas, responses = _replicas(config, world_size), rollout.prompts * rollout.samples
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    rows, updates = responses // train.minibatches, train.minibatches * train.epochs
    share = -(-rows // replicas)
    fitting = min(share, train.micro_batch_tokens // longest)
    layout = f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x data {replicas}"
    batches = f"{_count(train.minibatches, 'mini-batch')} x {_count(train.epochs, 'epoch')}"
    most = _count(-(-share // fitting), "micro-batch")
    return [
        f"layout        {_count(world_size, 'rank')} = {layout}",
        f"rollout       {_count(rollout.prompts, 'prompt')} x {rollout.samples} samples = {responses:,} responses a "
        f"step, at most {rollout.max_tokens:,} tokens each",
        *_placed(config, world_size),
        f"updates       {batches} = {_count(updates, 'optimizer step')} per rollout, {updates * train.steps:,} in all",
        f"mini-batch    {_count(rows, 'sequence')}, at most {rows * longest:,} tokens",
        f"data rank     {_count(share, 'sequence')} of a mini-batch, at most {share * longest:,} tokens",
        f"micro-batch   at most {train.micro_batch_tokens:,} tokens: {fitting:,} or more sequences, "
        f"at most {most} per data rank",
    ]


def _placed(config: RunConfig, world_size: int) -> Iterator[str]:
    separate = config.rollout.separate
    if config.rollout.placement == "separate":
        bucket, carried = config.rollout.vllm.bucket_mib, separate.backend or "nccl (gloo without GPUs)"
        yield (
            f"engines       {config.rollout.engine} at {', '.join(separate.servers)}, each for "
            f"{_count(world_size // len(separate.servers), 'trainer rank')}; weights by {carried} in buckets of "
            f"{bucket:,} MiB"
        )


def _count(number: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"
