"""CAPO in NeMo-Aligner 0.7.0. Legacy, contract-tested, never run end to end.

NeMo-Aligner is unmaintained since May 2025. Its entry script for REINFORCE names its classes and takes no others, so
this one does the same with CAPO's. It runs in NeMo-Aligner's own environment, with this repository on PYTHONPATH:

    export PYTHONPATH=/path/to/this/repository NEMO_ALIGNER_CONF=/opt/NeMo-Aligner/examples/nlp/gpt/conf
    mpirun -np 8 python examples/nemo_aligner/train_capo_actor.py pretrained_checkpoint.restore_from_path=actor.nemo \
        model.data.problems.train=train.jsonl model.data.problems.validation=val.jsonl

`verifier` needs pydantic 2 in that environment; without it, hand `Verifier` a RewardFunction of your own.
"""

from functools import partial
from typing import Any

import torch
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo_aligner.data.nlp.builders import build_dataloader, collate_with_pad_to_max_batch
from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.batch_iterators import get_batch_iterator_cls
from nemo_aligner.utils.distributed import Timer
from nemo_aligner.utils.train_script_utils import (
    CustomLoggerWrapper,
    add_custom_checkpoint_callback,
    extract_optimizer_scheduler_from_ptl_model,
    init_distributed,
    init_peft,
    init_using_ptl,
    resolve_and_create_trainer,
    retrieve_custom_trainer_state_dict,
    temp_pop_from_config,
)
from nemo_aligner.utils.utils import load_and_override_model_config, load_from_nemo, retrieve_model_state_dict_in_cpu
from omegaconf import OmegaConf

from capo_megatron.adapters.nemo_aligner import CapoActor, CapoTrainer
from capo_megatron.adapters.nemo_aligner_prompts import KeepPromptIds, Prompts, Verifier, read_problems
from capo_megatron.adapters.nemo_aligner_step import StepOptions

# The stock configuration computes with these.
OmegaConf.register_new_resolver("multiply", lambda x, y: x * y, replace=True)
OmegaConf.register_new_resolver("int_div", lambda x, y: x // y, replace=True)
OmegaConf.register_new_resolver("subtract", lambda x, y: x - y, replace=True)


def load_actor(cfg: Any, trainer: Any, keep_initial_policy: bool) -> Any:
    """The actor from its .nemo file, with a copy of its weights on the CPU where the noise mask needs one."""
    path = cfg.pretrained_checkpoint.restore_from_path
    actor = load_from_nemo(CapoActor, cfg.model, trainer, strict=True, restore_path=path)
    init_peft(actor, cfg.model)
    actor.init_policy_state_dict = None
    if keep_initial_policy and cfg.model.peft.peft_scheme == "none":  # adapters are switched off instead
        amp_o2 = cfg.model.get("megatron_amp_O2", False)
        actor.init_policy_state_dict = retrieve_model_state_dict_in_cpu(actor, megatron_amp_O2=amp_o2)
    return actor


def load_prompts(cfg: Any, tokenizer: Any) -> tuple[list[Any], Prompts, Prompts]:
    """All problems, and the prompts of training and validation as places in that list."""
    limit = cfg.model.encoder_seq_length - cfg.model.reinforce.length_params.max_length
    files = cfg.model.data.problems
    train = read_problems(files.train, tokenizer.text_to_ids, limit)
    problems = train + read_problems(files.validation, tokenizer.text_to_ids, limit)
    return problems, Prompts(problems, range(len(train))), Prompts(problems, range(len(train), len(problems)))


def make_verifier(cfg: Any, problems: list[Any], tokenizer: Any) -> Verifier:
    """The verifier that `verifier` describes."""
    from capo_megatron.config import RewardConfig
    from capo_megatron.rewards import build_reward

    options = OmegaConf.to_container(cfg.verifier, resolve=True)
    end_strings = cfg.model.reinforce.sampling_params.end_strings
    return Verifier(build_reward(RewardConfig(**options)), problems, tokenizer, end_strings)


def loader_builders(cfg: Any, collate: Any, train: Prompts, validation: Prompts) -> tuple[Any, Any]:
    """Functions of the number of consumed prompts that make the data loaders."""
    sizes = cfg.model.reinforce
    common = partial(build_dataloader, cfg=cfg, collate_fn=collate, load_gbs=False)
    return (
        partial(common, dataset=train, mbs=sizes.rollout_micro_batch_size, gbs=sizes.num_rollout_samples),
        partial(
            common,
            dataset=validation,
            mbs=sizes.val_rollout_micro_batch_size,
            gbs=sizes.num_val_samples,
            use_random_sampler=False,
        ),
    )


@hydra_runner(config_path=".", config_name="capo_actor")
def main(cfg: Any) -> None:
    cfg.model = load_and_override_model_config(cfg.pretrained_checkpoint.restore_from_path, cfg.model)
    OmegaConf.resolve(cfg)
    options = StepOptions.of(OmegaConf.to_container(cfg.trainer.capo))
    with temp_pop_from_config(cfg.trainer, "capo"):  # Lightning's trainer would not know it
        trainer = resolve_and_create_trainer(cfg, "reinforce")
    exp_manager(trainer, cfg.exp_manager)
    logger = CustomLoggerWrapper(trainer.loggers)
    actor = load_actor(cfg, trainer, options.needs_reference)
    state = retrieve_custom_trainer_state_dict(trainer) if trainer.ckpt_path is not None else None
    init_distributed(trainer, actor, cfg.model.get("transformer_engine", False))

    problems, train, validation = load_prompts(cfg, actor.tokenizer)
    longest = cfg.model.reinforce.length_params.max_length
    stock_collate = collate_with_pad_to_max_batch(
        longest, actor.tokenizer.eos_id, cfg, generate_masks_and_position_ids=False
    )
    collate = KeepPromptIds(stock_collate)
    train_builder, validation_builder = loader_builders(cfg, collate, train, validation)

    # Lightning sets the schedule up by a data loader of optimizer steps; prompts are not loaded from it.
    rows_per_rank = cfg.model.global_batch_size // parallel_state.get_data_parallel_world_size()
    init_using_ptl(trainer, actor, torch.utils.data.DataLoader(dataset=train, batch_size=rows_per_rank), train)
    del actor._train_dl
    optimizer, scheduler = extract_optimizer_scheduler_from_ptl_model(actor)
    logger.log_hyperparams(OmegaConf.to_container(cfg))
    verifier = make_verifier(cfg, problems, actor.tokenizer)
    capo_trainer = CapoTrainer(
        cfg=cfg.trainer.reinforce,
        model=actor,
        optimizer=optimizer,
        scheduler=scheduler,
        train_dataloader_builder=train_builder,
        val_dataloader_builder=validation_builder,
        collate_fn=collate,
        rm=verifier,
        batch_iterator_cls=get_batch_iterator_cls(cfg.trainer.reinforce.get("batch_iterator", {})),
        logger=logger,
        ckpt_callback=add_custom_checkpoint_callback(trainer, actor),
        run_timer=Timer(cfg.exp_manager.get("max_time_per_run")),
        capo=options,
    )
    if state is not None:
        capo_trainer.load_state_dict(state)
    try:
        capo_trainer.fit()
    finally:
        verifier.close()


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn", force=True)
    main()
