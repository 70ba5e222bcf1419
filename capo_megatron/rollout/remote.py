"""An engine in processes of its own, on other devices or machines, as the trainer sees it.

    capo-megatron engine CONFIG --nproc 8 --listen 0.0.0.0:29600       where it samples, before or after
    capo-megatron train  CONFIG --nproc 8                              where it trains

An engine server is any number of ranks behind one address, each of which holds the very engine that a colocated run
would have: so whatever makes that one safe holds here, too, and the trainer needs no vLLM. Trainer and server know of
each other only an address and a secret. They start in any order; each is a plain torchrun job, may have its own number
of ranks, and survives the other: a server waits for the next run. A server that dies ends the run with an error, since
its weights are gone; the same commands continue from the newest checkpoint, with the tokens that an uninterrupted run
would have sampled.

Each server belongs to as many neighbouring trainer ranks. They make the same calls, which it works on once. The first
of them sends it the weights (see `transfer`); the rest only help to gather them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from capo_megatron.agreement import gather_or_raise
from capo_megatron.config import SeparateConfig
from capo_megatron.errors import ConfigError, RolloutError
from capo_megatron.rollout.channel import Line, secret
from capo_megatron.rollout.requests import PromptAndResponse, Tokenizer
from capo_megatron.rollout.transfer import Group, host_store, send
from capo_megatron.seams import SamplingParams, Sketch, Team
from capo_megatron.types import Problem, Sample


class RemoteEngine:
    """`seams.RolloutEngine` on an engine server."""

    def __init__(
        self,
        options: SeparateConfig,
        identity: Mapping[str, Any],
        tokenizer: Tokenizer,
        team: Team,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """An engine without weights: `load_weights` comes before anything else. Collective over all of `team`.

        `identity` is what the server's engine has to be of: JSON values. Raises RolloutError if a server is not there
        in time, ConfigError if it is of something else, or the trainer ranks cannot be dealt out to the servers.
        """
        servers, mates = options.servers, team.size // max(1, len(options.servers))
        if not servers or team.size % len(servers):
            raise ConfigError(
                f"rollout.separate.servers: the {team.size} trainer ranks cannot be dealt out evenly to "
                f"{len(servers)} servers. Use a divisor."
            )
        index = team.rank // mates
        self.share = (index, len(servers))
        self._leads = team.rank % mates == 0
        self._tokenizer, self._bucket_bytes = tokenizer, bucket_bytes
        self._group: Group | None = None
        session = team.gather(uuid.uuid4().hex)[0]
        self._line = Line(servers[index], secret(), session, options.silence_s, options.limit_s)
        found = gather_or_raise(team, lambda: self._open(options, identity, mates))
        store = host_store(options.silence_s) if self._leads else None
        ports = team.gather(None if store is None else store.port)
        first = index * mates
        (here, theirs), port = found[first], ports[first]
        backend = options.backend or ("nccl" if device.type == theirs["device"] == "cuda" else "gloo")
        place = device if backend == "nccl" else torch.device("cpu")
        joining = self._line.start("join", host=here, port=port, backend=backend, patience_s=options.silence_s)

        def join() -> None:
            if store is not None:
                self._group = Group(store, 0, 1 + theirs["ranks"], backend, place, options.silence_s)
            joining.result()

        gather_or_raise(team, join)

    def _open(self, options: SeparateConfig, identity: Mapping[str, Any], mates: int) -> tuple[str, dict[str, Any]]:
        """(this machine's address, what the server says of itself)."""
        here = self._line.reach(options.wait_s)
        return here, self._line.call("open", clients=mates, identity=dict(identity))

    @property
    def version(self) -> int:
        """Of the weights that the server says it holds, -1 before the first load and after one that failed."""
        return int(self._line.status()["version"])

    def load_weights(self, hf: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send the server every weight, in buckets, and call the result `version`.

        All or nothing, as with the engine that it holds. The iterator is always read to its end, since producing a
        tensor may be collective. Raises RolloutError.
        """
        loading = self._line.start("load", version=version)
        weights = iter(hf)
        if self._group is not None:
            try:
                send(self._group, weights, self._bucket_bytes, loading.over)
            except RolloutError:
                self._group.close()  # or the server would wait for more
        for _ in weights:
            pass
        loading.result()  # which knows better than the sender what went wrong, or that all weights have come

    def forget(self) -> None:
        """Empty the prefix caches."""
        self._line.call("forget")

    def sleep(self) -> None:
        """Nothing: it has its memory to itself."""

    def wake(self) -> None:
        """Nothing: it does not sleep."""

    def generate(self, problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        """For each problem its responses, as the engine that the server holds gives them. Raises what it raises."""
        asked = [[problem.id, list(problem.prompt_ids)] for problem in problems]
        groups = self._line.call("generate", problems=asked, samples=samples, params=asdict(params))
        return [
            [Sample(tuple(ids), tuple(logprobs), text, cut, version) for ids, logprobs, text, cut, version in group]
            for group in groups
        ]

    def logprobs(self, sequences: Sequence[PromptAndResponse], temperature: float) -> list[list[float]]:
        """The log-probs by the server's first engine, to which its others are near: else RolloutError."""
        asked = [[list(prompt), list(response)] for prompt, response in sequences]
        found: list[list[float]] = self._line.call("logprobs", sequences=asked, temperature=temperature)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def sketches(self) -> dict[str, Sketch]:
        """What the server's first engine holds of every weight, to which its others are equal: else RolloutError."""
        return {name: (a, b, size) for name, (a, b, size) in self._line.call("sketches").items()}
