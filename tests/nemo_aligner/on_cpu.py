"""The real NeMo-Aligner 0.7.0 on a CPU: CUDA calls led to the CPU, and a model of one table.

What is replaced: the generation of the stock actor (by sampling from the table, seeded by prompt and turn), the
offloading and recomputation switches around it, NeMo's gradient all-reduce, and two GPU packages (see conftest.py). All
else, fit() included, is the release's own code.
"""

import multiprocessing
from collections import Counter
from pathlib import Path

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from nemo_aligner.data.nlp.builders import build_dataloader, collate_with_pad_to_max_batch
from nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor import MegatronGPTReinforceActorModel
from nemo_aligner.utils.batch_iterators import DefaultBatchIterator
from nemo_aligner.utils.utils import retrieve_model_state_dict_in_cpu
from omegaconf import OmegaConf
from torch.overrides import TorchFunctionMode

from capo_megatron.adapters.nemo_aligner import CapoActor, CapoTrainer
from capo_megatron.adapters.nemo_aligner_prompts import KeepPromptIds, Prompts, Verifier
from capo_megatron.types import Grade, Problem, Verdict

VOCABULARY, EOS, LONGEST = 12, 0, 4


class CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def start_ranks(rank, ranks, meeting):
    """Join a gloo group of `ranks` data-parallel ranks and lead CUDA calls of this process to the CPU."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    CudaIsCpu().__enter__()
    gather = torch.distributed.all_gather_into_tensor
    # Gloo takes no tensor of zero dimensions, as NCCL does.
    torch.distributed.all_gather_into_tensor = lambda out, part, group=None: gather(out, part.reshape(-1), group=group)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()


def on_ranks(function, ranks, folder):
    """What `function()` returns on each of `ranks` forked ranks. NeMo takes long to import, hence no new processes."""
    folder = Path(folder) / f"{function.__name__}-{ranks}"
    folder.mkdir()

    def body(rank):
        start_ranks(rank, ranks, folder / "meeting")
        torch.save(function(), folder / str(rank))

    processes = [multiprocessing.get_context("fork").Process(target=body, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks, "see the traceback above"
    return [torch.load(folder / str(rank)) for rank in range(ranks)]


class Tokens:
    eos_id = EOS
    vocab_size = VOCABULARY

    def ids_to_text(self, ids):
        return " ".join(map(str, ids))


class EvenFirst:
    """Correct if the first token is even; a response that says 7 cannot be judged."""

    def grade(self, problems, responses):
        grades = []
        for text in responses:
            right = bool(text) and int(text.split()[0]) % 2 == 0
            verdict = Verdict.TIMEOUT if "7" in text.split() else Verdict.CORRECT if right else Verdict.WRONG
            grades.append(Grade(verdict, float(verdict is Verdict.CORRECT)))
        return grades

    def close(self):
        pass


class Table(torch.nn.Module):
    """Logits [b, s, V] that depend on the token before."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.config = ModelParallelConfig()
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor):
        pass

    def forward(self, tokens, position_ids, attention_mask, labels=None):
        return self.weight[tokens]


def sample(actor, batch):
    """In the place of the stock `infer`: up to LONGEST tokens, the same for a prompt whoever samples it."""
    prompts, lengths = batch["text"], batch["length"]
    tokens, ends = prompts.clone(), lengths + LONGEST
    for row, prompt_id in enumerate(batch["prompt_ids"].tolist()):
        generator = torch.Generator().manual_seed(1000 * prompt_id + actor.turns[prompt_id])
        actor.turns[prompt_id] += 1
        for place in range(int(lengths[row]), int(lengths[row]) + LONGEST):
            probabilities = actor.model.weight[tokens[row, place - 1]].softmax(0)
            tokens[row, place] = torch.multinomial(probabilities, 1, generator=generator)
            if tokens[row, place] == EOS:
                ends[row] = place + 1
                tokens[row, place + 1 :] = EOS
                break
    width = int(ends.max())
    ended = tokens[torch.arange(len(ends)), ends - 1] == EOS
    return {
        "response_tokens": tokens[:, :width],
        "response_lengths": ends,
        "prompt_lengths": lengths,
        "is_end": ended,
    }


class TableActor(CapoActor):
    """CapoActor around a Table. Its constructor would need a .nemo file and CUDA."""

    def __init__(self, cfg):
        torch.nn.Module.__init__(self)
        self._cfg, self.tokenizer, self.model = cfg, Tokens(), Table()
        self.with_distributed_adam = self.use_mcore_dist_optim = self.use_peft = self.megatron_amp_O2 = False
        self.distributed_adam_offload_manager, self.to_offload_adam_states = None, False
        self.with_megatron_fused_adam, self.mcore_gpt, self.inference_params = False, True, None
        self.forward_micro_batch_size = cfg.reinforce.forward_micro_batch_size
        self.init_policy_state_dict = retrieve_model_state_dict_in_cpu(self, megatron_amp_O2=False)
        self.turns, self._signs = Counter(), []

    def prepare_for_inference(self):
        pass

    def finish_inference(self):
        pass

    def prepare_for_training_step(self):
        pass

    def finish_training_step(self):
        torch.distributed.all_reduce(self.model.weight.grad)
        self.model.weight.grad /= parallel_state.get_data_parallel_world_size()


class Log:
    """A logger, checkpoint callback, scheduler and timer that remember metrics."""

    def __init__(self):
        self.metrics = []

    def log_metrics(self, metrics, step=None, prefix=""):
        self.metrics.append({f"{prefix}{name}": value for name, value in metrics.items()})

    def log_table(self, *_, **__):
        pass

    def custom_save(self, **_):
        pass

    def step(self):
        pass

    def start_time(self):
        pass

    def finalize(self):
        pass

    def is_finished(self):
        return False


def configuration(gbs, mbs, prompts=4, samples=4, steps=2):
    return OmegaConf.create(
        {
            "trainer": {
                "reinforce": {
                    "max_epochs": 1,
                    "max_steps": steps,
                    "val_check_interval": steps,
                    "save_interval": steps,
                    "gradient_clip_val": 0.0,
                    "initial_policy_kl_penalty": 0,
                    "use_absolute_kl": True,
                    "num_rollouts_per_prompt": samples,
                    "rollout_batch_seq_length": None,
                    "model_gbs": gbs,
                    "model_mbs": mbs,
                }
            },
            "model": {
                "seed": 1,
                "micro_batch_size": mbs,
                "global_batch_size": gbs,
                "data": {"num_workers": 0},
                "reinforce": {"num_rollout_samples": prompts, "forward_micro_batch_size": 2},
                "capo": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
            },
        }
    )


def make_trainer(capo, gbs, mbs, prompts=4, samples=4, steps=2, rollout_mbs=2):
    """The real constructor, over 12 problems whose prompts are 1 to 3 tokens long and partly equal."""
    cfg = configuration(gbs, mbs, prompts, samples, steps)
    problems = [Problem(str(i), "", tuple([3, 5, 8][: 1 + i % 3]), "") for i in range(12)]
    collate = KeepPromptIds(collate_with_pad_to_max_batch(LONGEST, EOS, cfg, generate_masks_and_position_ids=False))

    def builder(consumed_samples):
        return build_dataloader(
            cfg,
            Prompts(problems, range(12)),
            consumed_samples,
            mbs=rollout_mbs,
            gbs=prompts,
            collate_fn=collate,
            load_gbs=False,
            use_random_sampler=False,  # which deals other prompts to another number of ranks
        )

    MegatronGPTReinforceActorModel.infer = sample
    ranks = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, gbs, mbs, ranks)
    actor, log = TableActor(cfg.model), Log()
    optimizer = torch.optim.SGD(actor.model.parameters(), lr=0.5)
    verifier = Verifier(EvenFirst(), problems, actor.tokenizer)
    return CapoTrainer(
        cfg.trainer.reinforce,
        actor,
        optimizer,
        log,
        builder,
        builder,
        collate,
        verifier,
        DefaultBatchIterator,
        log,
        log,
        log,
        capo=capo,
    )
