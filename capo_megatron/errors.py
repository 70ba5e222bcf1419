"""Errors that a user can act on. Everything else that escapes is a bug.

The command line turns a `CapoError` into one line on stderr and exit code 2; any other exception keeps its traceback
and exits with 1. A message says what is wrong, the value got, what is allowed and what to do, and starts with the
config path, file or tensor it speaks of.
"""


class CapoError(Exception):
    """Base of all errors caused by input, files or environment rather than by a bug."""


class ConfigError(CapoError):
    """An option is unknown, out of range, or contradicts another."""


class DataError(CapoError):
    """A problem file, tokenizer or task cannot be used."""


class ShapeError(CapoError):
    """A tensor handed to a public type or function has the wrong shape, dtype or content (e.g. NaN)."""


class RolloutError(CapoError):
    """The rollout engine failed, or its weights do not match the policy's."""


class RewardError(CapoError):
    """The grading workers cannot be started or a user's reward function broke its contract."""


class CheckpointError(CapoError):
    """A checkpoint or weight file is missing, damaged, or belongs to another model."""


class TrainingError(CapoError):
    """Training cannot go on, e.g. too many steps with a non-finite loss in a row."""
