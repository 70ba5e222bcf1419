"""RunLog: everything that a run writes for people: metrics.jsonl, samples/, the resolved config, console, trackers."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from capo_megatron.agreement import on_first_rank
from capo_megatron.config import LogConfig
from capo_megatron.runlog.console import PlainDisplay, make_display
from capo_megatron.runlog.files import append_line, hold, keep_rows, make_folder, to_json, write_text
from capo_megatron.runlog.provenance import provenance
from capo_megatron.runlog.trackers import Tracker, make_trackers, require_packages
from capo_megatron.seams import Rollout, Team
from capo_megatron.types import Signals

_REMEMBERED = 20  # steps over which the time left is averaged
_LARGEST = 700.0  # nats; exp of more is infinite


@dataclass
class Phase:
    """A phase under way. Set `tokens` when they are known, at the latest before it ends."""

    tokens: int = 0


class RunLog:
    """Implements `seams.Logger`. Rank 0 writes, the others keep time and learn of its failures.

    In `output`:

        metrics.jsonl        one JSON object a step: step, time (Unix seconds), every metric; null where not finite
        samples/             step_000012.jsonl: some responses of a step with verdict, reward, advantage
        resolved.yaml        the whole configuration; an earlier, different one is kept as resolved.1.yaml, ...
        versions.json        versions, git revision and command of the latest start
        tensorboard/         if asked
        .lock                the process that writes here: a second run is refused while it lives

    Nothing is written before `resume_from` or the first record: a start that is refused leaves an earlier run as it
    was. `resume_from`, `step` and `samples` are collective and raise CapoError on every rank if the folder or the disk
    refuses; the constructor raises ConfigError if a tracker's package is missing.
    """

    def __init__(self, output: Path, config: LogConfig, resolved: str, team: Team, total_steps: int) -> None:
        self._output, self._config, self._resolved = Path(output), config, resolved
        self._team, self._total = team, total_steps
        self._active = team.rank == 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens: defaultdict[str, int] = defaultdict(int)
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._trackers: list[Tracker] = []
        self._display: PlainDisplay | None = None
        self._lock: IO[bytes] | None = None
        self._begun = self._continues = False
        on_first_rank(team, lambda: require_packages(config))
        if self._active:
            self._display = make_display(config.console, total_steps)
        self._last: float | None = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the live display and the trackers. Nothing is lost without it, but the terminal looks better."""
        if self._display is not None:
            self._display.close()
        for tracker in self._trackers:
            tracker.close()
        if self._lock is not None:
            self._lock.close()

    # --- seams.Logger -------------------------------------------------------------------------------------------------

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics, with the seconds and tokens/s of the phases since the last call."""
        row = {name: float(value) for name, value in metrics.items()} | self._times()
        if not self._continues:  # what an earlier start logged from here on was not saved by any checkpoint
            self.resume_from(step - 1)
        on_first_rank(self._team, lambda: self._record(step, row))

    def samples(self, step: int, rollout: Rollout, signals: Signals, advantages: Tensor) -> None:
        """Write the first `LogConfig.samples` responses of a step, siblings together, with what they earned.

        Behind them stands the response on whose tokens engine and policy agree least, if it is not among them.
        """
        count = min(self._config.samples, len(rollout.texts))

        def write() -> None:
            self._begin()
            make_folder(self._output / "samples")
            shown = list(dict.fromkeys([*range(count), int(_engine_gap(rollout, signals).argmax())]))
            rows = [_sample(row, rollout, signals, advantages) for row in shown]
            path = self._output / "samples" / f"step_{step:06d}.jsonl"
            write_text(path, "".join(f"{to_json(row)}\n" for row in rows))

        if count:
            on_first_rank(self._team, write)

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """Time a block; its seconds and tokens/s join the metrics of the step. Repeated names add up."""
        phase, started = Phase(tokens), time.perf_counter()
        if self._last is None:  # the first step begins with the first phase, not with building the model
            self._last = started
        if self._display is not None:
            self._display.phase(name)
        try:
            yield phase
        finally:
            self._seconds[name] += time.perf_counter() - started
            self._tokens[name] += phase.tokens

    def warn(self, text: str) -> None:
        """Tell the person who watches."""
        if self._display is not None:
            self._display.warn(text)

    def resume_from(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which a run that died had logged but not saved. All or nothing."""
        self._continues = True

        def drop() -> None:
            self._begin()
            keep_rows(self._output / "metrics.jsonl", lambda row: _step(row) <= step)

        on_first_rank(self._team, drop)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make the folder and note what this start was made with, once."""
        if self._begun:
            return
        make_folder(self._output)
        self._lock = hold(self._output)
        self._write_start(self._resolved)
        self._trackers = make_trackers(self._config, self._output, self._resolved)
        self._begun = True

    def _record(self, step: int, row: Mapping[str, float]) -> None:
        append_line(self._output / "metrics.jsonl", to_json({"step": step, "time": round(time.time(), 3), **row}))
        for tracker in self._trackers:
            tracker.step(step, row)
        if self._display is not None:
            self._display.step(step, row, row["seconds/step"], self._left(step, row["seconds/step"]))

    def _write_start(self, resolved: str) -> None:
        path = self._output / "resolved.yaml"
        if path.is_file() and path.read_bytes() != resolved.encode():
            taken = len(list(self._output.glob("resolved.*.yaml")))
            path.replace(self._output / f"resolved.{taken + 1}.yaml")
        write_text(path, resolved)
        write_text(self._output / "versions.json", json.dumps(provenance(), indent=2) + "\n")

    def _times(self) -> dict[str, float]:
        """Seconds and tokens/s of the phases and of the whole step since the last call, which starts anew."""
        now = time.perf_counter()
        self._seconds["step"], self._last = now - (self._last or now), now
        self._tokens["step"] = self._tokens["rollout"]
        found = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        found |= {
            f"tokens_per_second/{name}": self._tokens[name] / seconds
            for name, seconds in self._seconds.items()
            if self._tokens[name] and seconds > 0
        }
        self._seconds.clear()
        self._tokens.clear()
        return found

    def _left(self, step: int, seconds: float) -> float | None:
        if step == 0:
            return None
        self._recent.append(seconds)
        return sum(self._recent) / len(self._recent) * (self._total - step)


def _step(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int) else float("inf")


def _sample(row: int, rollout: Rollout, signals: Signals, advantages: Tensor) -> dict[str, Any]:
    batch, grade = rollout.batch, rollout.grades[row]
    group = int(batch.group[row])
    problem, mask = batch.problems[group], batch.response_mask[row]
    tokens = int(mask.sum())
    return {
        "problem": problem.id,
        "sample": int((batch.group[:row] == group).sum()),
        "verdict": grade.verdict.value,
        "reward": _short(batch.rewards["reward"][row]),
        "advantage": _short(advantages[row][mask].sum() / max(tokens, 1)),
        "mean_logprob": _short(signals.old_logprobs[row][mask].sum() / max(tokens, 1)),
        "engine_gap": _short(_engine_gap(rollout, signals)[row].exp()),
        "tokens": tokens,
        "truncated": bool(batch.truncated[row]),
        "extracted": grade.extracted,
        "answer": problem.answer,
        "prompt": problem.prompt,
        "response": rollout.texts[row],
    }


def _engine_gap(rollout: Rollout, signals: Signals) -> Tensor:
    """[N] the largest distance in nats between the log-probs of policy and engine, of a response's tokens."""
    batch = rollout.batch
    gap = (signals.old_logprobs - batch.sampler_logprobs).abs().masked_fill(~batch.response_mask, 0.0)
    return gap.double().nan_to_num(nan=_LARGEST).clamp_max(_LARGEST).amax(dim=1)


def _short(value: Tensor) -> float:
    return float(f"{float(value):.6g}")
