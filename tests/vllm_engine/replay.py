"""A training run whose responses are recorded, or replayed from a record by the transformers engine.

python -m tests.vllm_engine.replay record|replay RECORD CONFIG
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capo_megatron.cli import main
from capo_megatron.mcore.runtime import Runtime
from capo_megatron.model import Model
from capo_megatron.seams import RolloutEngine, SamplingParams
from capo_megatron.types import Problem, Sample

Record = dict[str, list[list[list[int]]]]


def engine_with(wrapped: Any, record: Record, replay: bool) -> Any:
    """The engine, whose `generate` writes to the record, or says what stands there with its own log-probs."""
    generate = wrapped.generate

    def recorded(problems: Sequence[Problem], samples: int, params: SamplingParams) -> list[list[Sample]]:
        key = json.dumps([[problem.id for problem in problems], samples, params.seed, params.max_tokens])
        if not replay:
            found: list[list[Sample]] = generate(problems, samples, params)
            record[key] = [[list(sample.ids) for sample in group] for group in found]
            return found
        return [
            [said(wrapped, problem, tuple(ids), params) for ids in group]
            for problem, group in zip(problems, record[key], strict=True)
        ]

    wrapped.generate = recorded
    return wrapped


def said(engine: Any, problem: Problem, ids: tuple[int, ...], params: SamplingParams) -> Sample:
    logprobs = tuple(engine.logprobs([(problem.prompt_ids, ids)], params.temperature)[0])
    ended = ids[-1] in params.stop_ids
    return Sample(ids, logprobs, engine.decode(ids[:-1] if ended else ids), not ended, engine.version)


if __name__ == "__main__":
    mode, record_path, config = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    record: Record = json.loads(record_path.read_text()) if mode == "replay" else {}
    build = Model.engine

    def engine(self: Model, team: Runtime) -> RolloutEngine:
        return engine_with(build(self, team), record, mode == "replay")  # type: ignore[no-any-return]

    Model.engine = engine  # type: ignore[method-assign]
    code = main(["train", *config])
    if mode == "record":
        record_path.write_text(json.dumps(record))
    raise SystemExit(code)
