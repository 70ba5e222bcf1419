"""One rollout ahead: the next step's responses are sampled in a thread of their own while this step trains.

The main thread gives the engine new weights only after `finish`, so that a rollout is of one set of weights from its
first token to its last, those before the step that trains meanwhile. What the thread gathers goes through a Team of its
own: collectives of two threads would meet in one another's places.

PyTorch keeps the mode of gradients, inference and autocasting, the device and the stream per thread: the sampling
thread begins with the defaults, with the number of threads that was set for the process, and with a stream of its own
on a GPU. The generators of random numbers belong to the process; the engines draw from none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from capo_megatron.errors import CheckpointError, RolloutError
from capo_megatron.rollout.collect import Collected
from capo_megatron.seams import PromptSource
from capo_megatron.types import Grade, RolloutBatch, Verdict

_PATIENCE_S = 5.0  # for a thread to give up: a rank ends at the next token, unless it waits for another one's share
_TENSORS = ("tokens", "response_mask", "segment", "group", "gradable", "truncated", "sampler_logprobs")


class _Abandoned(RolloutError):
    """Raised inside a thread whose rollout nobody wants any more."""


class Ahead:
    """A queue of one rollout: being sampled, or sampled and not yet trained on."""

    def __init__(self, step: int = 0, rollout: Collected | None = None) -> None:
        """With the `rollout` that a checkpoint held for the step that follows `step` steps, if it held one."""
        self._step, self._rollout = step, rollout
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # an interrupted join would take a thread that lives for one that has ended
        self._failure: BaseException | None = None
        self._seconds = 0.0

    def start(self, step: int, sample: Callable[[], Collected]) -> None:
        """Begin to sample for the step that follows `step` steps. Raises RolloutError if one is there already."""
        if self._rollout is not None or self._thread is not None:
            raise RolloutError(f"rollout.async_steps: the rollout of step {self._step} is not trained on yet.")
        self._step, self._failure = step, None
        self._done.clear()
        self._thread = threading.Thread(target=self._run, args=(sample, _stream()), name="rollout ahead", daemon=True)
        self._thread.start()

    def _run(self, sample: Callable[[], Collected], stream: Any) -> None:
        started = time.perf_counter()
        try:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                self._rollout = sample()
            if stream is not None:
                stream.synchronize()
        except BaseException as error:  # whatever it is, the main thread has to know
            self._failure = error
        finally:
            self._seconds = time.perf_counter() - started
            self._done.set()

    def finish(self) -> dict[str, float]:
        """Wait until nothing is being sampled; how long that took in its thread, and how much of it nobody waited for.

        Raises what the sampling raised: a CapoError on every rank, since `collect` agrees on it. On processors that
        training has to share with it, a step gets shorter by less than is "overlapped".
        """
        if self._thread is None:
            return {}
        started = time.perf_counter()
        self._done.wait()
        waited = time.perf_counter() - started
        self._thread = None
        if self._failure is not None:
            raise self._failure
        return {"seconds/ahead": self._seconds, "seconds/overlapped": max(0.0, self._seconds - waited)}

    def take(self, step: int) -> Collected | None:
        """The rollout for the step that follows `step` steps; None if nothing was sampled ahead."""
        self.finish()
        rollout, self._rollout = self._rollout, None
        if rollout is not None and self._step != step:
            raise RolloutError(f"rollout.async_steps: the rollout of step {self._step} was kept for step {step}.")
        return rollout

    def close(self) -> None:
        """Give up what is being sampled, within seconds. Nothing that a run needs is lost: a checkpoint has it."""
        thread, self._thread, self._rollout = self._thread, None, None
        if thread is None or self._done.is_set():
            return
        # As an error that `collect` passes on: ranks that wait for this one's share give up with it.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Abandoned))
        self._done.wait(_PATIENCE_S)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON values, tensors) from which `restored` makes the rollout again; both empty if there is none."""
        self.finish()
        return ({}, {}) if self._rollout is None else packed(self._rollout)


def packed(rollout: Collected) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON values, tensors). Problems go by their ids: the source of problems has the rest."""
    batch = rollout.batch
    values = {
        "problems": [problem.id for problem in batch.problems],
        "policy_version": batch.policy_version,
        "progress": batch.progress,
        "texts": rollout.texts,
        "grades": [[grade.verdict.value, grade.reward, grade.extracted, dict(grade.extra)] for grade in rollout.grades],
        "sampled": rollout.sampled,
        "offered": rollout.offered,
        "dropped": rollout.dropped,
        "rounds": rollout.rounds,
        "seconds": dict(rollout.seconds),
    }
    tensors = {name: getattr(batch, name).contiguous() for name in _TENSORS}
    return values, tensors | {f"rewards.{name}": value.contiguous() for name, value in batch.rewards.items()}


def restored(values: Mapping[str, Any], tensors: Mapping[str, Tensor], prompts: PromptSource) -> Collected:
    """What was `packed`. Raises CheckpointError if a part is missing, DataError if a problem is unknown."""
    lacking = sorted(set(_TENSORS) - tensors.keys())
    if lacking:
        raise CheckpointError(f"the rollout sampled ahead lacks its {', '.join(lacking)}: the checkpoint is damaged.")
    batch = RolloutBatch(
        problems=tuple(prompts.find(values["problems"])),
        rewards={
            name.removeprefix("rewards."): value for name, value in tensors.items() if name.startswith("rewards.")
        },
        policy_version=values["policy_version"],
        progress=values["progress"],
        **{name: tensors[name] for name in _TENSORS},
    )
    return Collected(
        batch=batch,
        texts=list(values["texts"]),
        grades=[Grade(Verdict(verdict), *rest) for verdict, *rest in values["grades"]],
        sampled=values["sampled"],
        offered=values["offered"],
        dropped=values.get("dropped", 0),  # which the first checkpoints of this program do not say
        rounds=values["rounds"],
        seconds=values["seconds"],
    )


def _stream() -> torch.cuda.Stream | None:
    """A stream for the thread, behind what the main thread has started on the GPU, e.g. copying weights."""
    if not torch.cuda.is_available():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream
