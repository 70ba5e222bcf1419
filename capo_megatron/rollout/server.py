"""An engine server: the ranks that work on what `remote.RemoteEngine` asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from capo_megatron.agreement import gather_or_raise
from capo_megatron.errors import CapoError, ConfigError, RolloutError
from capo_megatron.rollout.channel import Call, Desk
from capo_megatron.rollout.collect import share_of
from capo_megatron.rollout.requests import few
from capo_megatron.rollout.sketch import differing
from capo_megatron.rollout.transfer import Group, Received, reach_store
from capo_megatron.seams import RolloutEngine, SamplingParams, Team
from capo_megatron.types import Problem

_IDLE_S = 2.0  # after which rank 0 shows the others that it is there


class EngineServer:
    """The engines of a server's ranks. All ranks do what rank 0 is asked for."""

    def __init__(
        self,
        engine: RolloutEngine,
        team: Team,
        device: torch.device,
        identity: Mapping[str, Any],
        tolerance: float,
        rounding: float,
    ) -> None:
        """`tolerance` and `rounding` are by how much engines may differ from each other: see `proof.Probe`."""
        self._engine, self._team, self._device, self._identity = engine, team, device, dict(identity)
        self._tolerance, self._rounding = tolerance, rounding
        self._group: Group | None = None
        self._work: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "join": self._join,
            "load": self._load,
            "forget": self._forget,
            "generate": self._generate,
            "logprobs": self._logprobs,
            "sketches": self._sketches,
        }

    def serve(self, desk: Desk | None, ended: Callable[[], bool] = lambda: False) -> None:
        """Work until `ended`. Rank 0 has the desk. Collective.

        A CapoError is the answer to a call; anything else ends the server, which its caller notices at once.
        """
        while True:
            call = desk.take(_IDLE_S) if desk is not None else None
            # Also without a call, now and then: the others would take silence for the loss of rank 0.
            order = (call.name, call.arguments) if call is not None else "end" if desk and ended() else None
            order = self._team.gather(order)[0]
            if order == "end":
                return
            if order is not None:
                self._answer(desk, call, *order)

    def _answer(self, desk: Desk | None, call: Call | None, name: str, arguments: Mapping[str, Any]) -> None:
        if desk is not None and name == "load":
            desk.status["version"] = -1
        try:
            value = self._work[name](**arguments)
        except CapoError as error:
            if call is not None:
                call.fail(error)
            return
        if desk is not None and call is not None:
            if name == "load" and call.session == desk.status["session"]:
                desk.status["version"] = self._engine.version
            call.succeed(value)

    # --- what can be asked for, each on all ranks ---------------------------------------------------------------------

    def _open(self, clients: int, identity: Mapping[str, Any]) -> dict[str, Any]:
        if self._group is not None:
            self._group.close()
            self._group = None
        for name, ours in self._identity.items():
            if (theirs := identity.get(name)) != ours:
                raise ConfigError(f"it was started with {name} {ours}, the trainer has {theirs}. Give both one config.")
        return {"device": self._device.type, "ranks": self._team.size}

    def _join(self, host: str, port: int, backend: str, patience_s: float) -> None:
        place = self._device if backend == "nccl" else torch.device("cpu")

        def join() -> Group:
            store = reach_store(host, port, patience_s)
            return Group(store, 1 + self._team.rank, 1 + self._team.size, backend, place, patience_s)

        def keep() -> None:
            self._group = join()

        gather_or_raise(self._team, keep)

    def _load(self, version: int) -> int:
        gather_or_raise(self._team, lambda: self._receive(version))
        return version

    def _receive(self, version: int) -> None:
        if self._group is None:
            raise RolloutError("no trainer has joined it.")
        weights = Received(self._group)
        try:
            self._engine.load_weights(weights, version)
        except RolloutError as error:
            raise RolloutError(f"{weights.fault} {error}".strip()) from error

    def _forget(self) -> None:
        self._engine.forget()

    def _generate(self, problems: Sequence[Any], samples: int, params: Mapping[str, Any]) -> list[Any]:
        sampling = SamplingParams(**{**params, "stop_ids": tuple(params["stop_ids"])})
        asked = [Problem(name, "", tuple(prompt), "") for name, prompt in problems]
        mine = [asked[index] for index in share_of(len(asked), self._engine.share)]
        parts = gather_or_raise(
            self._team, lambda: (self._engine.share, self._engine.generate(mine, samples, sampling))
        )
        groups = [group for _, found in sorted(dict(parts).items()) for group in found]
        return [
            [[sample.ids, sample.logprobs, sample.text, sample.truncated, sample.version] for sample in group]
            for group in groups
        ]

    def _logprobs(self, sequences: Sequence[Any], temperature: float) -> list[list[float]]:
        found = gather_or_raise(self._team, lambda: self._engine.logprobs(sequences, temperature))
        flat = torch.tensor([[value for row in rows for value in row] for rows in found], dtype=torch.float64)
        gaps = (flat - flat[0]).abs().median(dim=1).values.exp() - 1 if flat.numel() else torch.zeros(len(found))
        if wrong := [rank for rank, gap in enumerate(gaps.tolist()) if not gap <= self._tolerance]:
            raise RolloutError(
                f"its engines do not agree: on rank {wrong[0]} probabilities of the same tokens differ by a factor of "
                f"{1 + float(gaps[wrong[0]]):.4g} in the median from those on rank 0. Sampling would not follow the "
                "policy on all of them."
            )
        return found[0]

    def _sketches(self) -> dict[str, Any]:
        found = gather_or_raise(self._team, self._engine.sketches)
        for rank, held in enumerate(found):
            if wrong := differing(found[0], held, self._rounding):
                raise RolloutError(f"its ranks 0 and {rank} hold different weights: {few(wrong)}. Start it again.")
        return dict(found[0])
