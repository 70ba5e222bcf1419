"""The configuration: what is refused and how it is said, which rules span sections, what survives a round trip."""

import logging
import math
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capo_megatron.algorithms import AlgorithmConfig, CapoConfig, GrpoConfig, GspoConfig, build
from capo_megatron.config import RunConfig, describe_batch, dump, load, options, sections
from capo_megatron.config.dialect import emit, parse
from capo_megatron.config.loading import resolve
from capo_megatron.errors import ConfigError

MINIMAL = """
output: runs/test
model: {path: model}
data: {train: [train.jsonl], validation_size: 240}
"""


@pytest.fixture
def config_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def loaded(config_file):
    return lambda *overrides, text=MINIMAL: load(config_file(text), overrides)


def refusal(action, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*arguments)
    return str(caught.value)


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_sparse_file_takes_every_other_value_from_the_defaults(loaded):
    config = loaded()
    assert config.model.path == "model"
    assert config.data.train == ("train.jsonl",)
    assert config.rollout == sections.RolloutConfig()
    assert config.algorithm.kind == options.DEFAULT_ALGORITHM


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(loaded):
    config = loaded("train.lr=3", "train.lr=1e-7", "data.train=[a.jsonl, b.jsonl]", "model={dtype: float32}")
    assert config.train.lr == 1e-7
    assert config.data.train == ("a.jsonl", "b.jsonl")
    assert (config.model.dtype, config.model.path) == ("float32", "model"), "a mapping sets only what it names"


def test_overrides_create_an_absent_section_and_null_removes_one(loaded):
    assert loaded("warmup.steps=7").warmup.steps == 7
    assert loaded("warmup=null", text=MINIMAL + "warmup: {steps: 7}").warmup is None


def test_plain_text_of_an_override_needs_no_quotes(loaded):
    for text in ("Think: then answer #1", "@home", "a, b", "- dash", "don't"):
        assert loaded(f"data.system_prompt={text}").data.system_prompt == text
    assert loaded('data.system_prompt="12"').data.system_prompt == "12"
    assert loaded("data.system_prompt=x=y").data.system_prompt == "x=y"


def test_numbers_and_words_mean_what_they_look_like(loaded):
    text = MINIMAL + "train: {lr: 1e-6, micro_batch_tokens: 16_384}\nreward: {kind: no}\n"
    config = loaded(text=text)
    assert config.train.lr == 1e-6
    assert config.train.micro_batch_tokens == 16384
    assert config.reward.kind == "no"


def test_values_in_task_options_keep_their_types(loaded):
    given = loaded("data.task_options={a: 1, b: 1.5, c: true, d: word, e: [1, 2], f: [0.5, 1]}").data.task_options
    assert given == {"a": 1, "b": 1.5, "c": True, "d": "word", "e": [1, 2], "f": [0.5, 1.0]}
    assert [type(given[key]) for key in "abcd"] == [int, float, bool, str]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tensr=2", "parallel.tensr: no such option. Did you mean parallel.tensor? (command line)"),
        ("lr=2", "lr: no such option. Did you mean train.lr or warmup.lr? (command line)"),
        ("qqqq.zzzz=1", "qqqq: no such option. Known: output, model, seed, parallel, precision, data, rollout,"),
        (
            "eval.zzzz=1",
            "eval.zzzz: no such option. Known: eval.every, eval.samples, eval.temperature, eval.at_",
        ),
        ("algorithm=papo", "algorithm: got 'papo', expected a section of options. Write algorithm.kind=papo. (command"),
        ("seed=99999999999999999999999", "seed: got 99999999999999999999999, expected an integer >= 0 and <= 42"),
        (
            "train.steps=99999999999999999999999",
            "train.steps: got 99999999999999999999999, expected an integer from -2**63",
        ),
        ("seed=4294967296", "seed: got 4294967296, expected an integer >= 0 and <= 4294967295. (command line)"),
        (f"seed={'9' * 5000}", "seed: got '999"),
        (f"data.task_options={{a: [{'9' * 30}]}}", "data.task_options.a[0]: got 999999999999999999999999999999, exp"),
        (
            "algorithm.beta=-1e300",
            "algorithm.beta: got -1e+300, expected a number from -3.4e+38 to 3.4e+38, as",
        ),
        ("train.lr=1e300", "train.lr: got 1e+300, expected a number > 0 and <= 1. (command line)"),
        ("train.lr=2", "train.lr: got 2, expected a number > 0 and <= 1. (command line)"),
        ("data.task_size=3000000", "data.task_size: got 3000000, expected an integer > 0 and <= 1000000. (command"),
        ("data.train=" + "[" * 5000, "data.train: "),
        ("train.lr=fast", "train.lr: got 'fast', expected a number > 0 and <= 1. (command line)"),
        ("train.lr=.nan", "train.lr: got nan, expected a finite number > 0 and <= 1. (command line)"),
        ("train.lr=.inf", "train.lr: got inf, expected a finite number > 0 and <= 1. (command line)"),
        ("train.steps=0", "train.steps: got 0, expected an integer > 0. (command line)"),
        ("train.steps=2.5", "train.steps: got 2.5, expected an integer > 0. (command line)"),
        ("train.steps=true", "train.steps: got true, expected an integer > 0. (command line)"),
        ("parallel.sequence=1", "parallel.sequence: got 1, expected true or false. (command line)"),
        ("rollout.top_p=1.5", "rollout.top_p: got 1.5, expected a number > 0 and <= 1. (command line)"),
        ("model.dtype=fp16", "model.dtype: got 'fp16', expected 'float32' or 'bfloat16'. (command line)"),
        ("output=7", "output: got 7, expected text that is not empty. (command line)"),
        ("data.train=a.jsonl", "data.train: got 'a.jsonl', expected a list [...] of texts. (command line)"),
        ("data.train=[a.jsonl, 3]", "data.train[1]: got 3, expected text that is not empty. (command line)"),
        ("train.betas=[0.9]", "train.betas[1]: missing, and it has no default; expected a list of 2 values"),
        ("train.betas=[0.9, 1]", "train.betas[1]: got 1, expected a number >= 0 and < 1. (command line)"),
        ("train=5", "train: got 5, expected a section of options. (command line)"),
        ("data.task_options={a: null}", "data.task_options.a: got null, expected a number or an integer or text"),
        ("algorithm.kind=cpao", "algorithm.kind: no such algorithm 'cpao'. Did you mean capo? Known: capo"),
        ("train.lr", "'train.lr': not an override. Write option=value, e.g. train.lr=1e-6. (command line)"),
        ("=3", "'=3': not an override."),
        ("train..lr=3", "'train..lr=3': not an override."),
        (
            "train.lr=[1",
            "train.lr: not valid YAML: expected ',' or ']', but got '<stream end>'. Got '[1'. (command line)",
        ),
        (
            "data.train.0=a",
            "data.train.0: data.train is ['train.jsonl'], which has no options. Set data.train as a whole.",
        ),
    ],
)
def test_a_wrong_override_is_named_in_one_line(loaded, override, message):
    said = refusal(loaded, override)
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output: [", "{path}:1: not valid YAML: "),
        ("output: a\n  bad: : b\n", "{path}:2: not valid YAML: mapping values are not allowed here."),
        (MINIMAL + "train: {lr: 1, lr: 2}", "{path}:5: not valid YAML: 'lr' is given twice."),
        pytest.param(MINIMAL + "seed: " + "9" * 5000, "{path}:5: not valid YAML: an integer of 5000 digits.", id="9"),
        pytest.param("output: " + "[" * 5000, "{path}: lists or mappings are nested too deeply.", id="deep"),
        (MINIMAL + "seed: !!python/name:os.system x", "{path}:5: not valid YAML: the tag tag:yaml.org,2002:python"),
        ("- a\n- b\n", "{path}: got ['a', 'b'], expected `section: options` pairs at the top level."),
        (MINIMAL + "parallel: {tensr: 2}", "parallel.tensr: no such option. Did you mean parallel.tensor? ({path})"),
        ("model: {path: m}", "output: missing, and it has no default; expected text that is not empty. ({path})"),
        (
            MINIMAL + "algorithm: grpo",
            "algorithm: got 'grpo', expected a section of options. Write algorithm.kind=grpo.",
        ),
        (MINIMAL + "algorithm: {kind: [1]}", "algorithm.kind: no such algorithm [1]."),
        (MINIMAL + "algorithm: 3", "algorithm: got 3, expected a section of options. ({path})"),
    ],
)
def test_a_wrong_file_is_named_in_one_line_with_its_place(config_file, text, message):
    path = config_file(text)
    said = refusal(load, path)
    assert said.startswith(message.format(path=path))
    assert "\n" not in said


def test_every_mistake_is_reported_at_once_one_line_each(loaded):
    said = refusal(loaded, "train.lr=-1", "train.stps=3", "rollout.samples=x").splitlines()
    assert sorted(line.partition(":")[0] for line in said) == ["rollout.samples", "train.lr", "train.stps"]


def test_an_absent_unreadable_or_binary_file_is_named(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"output: \xff\xfe")
    assert "No such file" in refusal(load, tmp_path / "absent.yaml")
    assert "Is a directory" in refusal(load, tmp_path)
    assert refusal(load, binary) == f"{binary}: the config is not UTF-8 text (byte 8)."


def test_an_empty_file_lists_what_must_be_given(config_file):
    assert [line.partition(":")[0] for line in refusal(load, config_file("")).splitlines()] == ["output", "model"]


def test_without_a_file_all_comes_from_the_command_line():
    assert load(None, ["output=runs/x", "model.path=m", "seed=3"]).seed == 3
    assert refusal(load, None, ["model.path=m"]).endswith("expected text that is not empty. (command line)")


def test_anchors_and_merge_keys_work(loaded):
    text = MINIMAL + "train: &t {lr: 0.5, steps: 9}\nwarmup: {<<: *t, steps: 5}\n"
    warmup = loaded(text=text).warmup
    assert (warmup.lr, warmup.steps) == (0.5, 5)


# --- the algorithm ----------------------------------------------------------------------------------------------------


def test_every_algorithm_is_reachable_by_its_kind(loaded):
    for kind, section in options.algorithms().items():
        config = loaded(f"algorithm.kind={kind}")
        assert type(config.algorithm) is section
        assert replace(config.algorithm, **dict.fromkeys(["length"] if kind == "dr_grpo" else [])) == section()


def test_a_response_budget_that_is_not_given_is_the_rollouts(loaded):
    assert loaded("algorithm.kind=dr_grpo", "rollout.max_tokens=99").algorithm.length == 99
    assert loaded("algorithm.kind=dr_grpo", "algorithm.length=7").algorithm.length == 7
    assert loaded("algorithm.reduction=constant-length").algorithm.length == 3046
    assert loaded("algorithm.kind=dapo", "algorithm.overlong_buffer=9").algorithm.max_length == 3046
    assert loaded("algorithm.kind=dapo").algorithm.max_length is None


def test_algorithm_options_without_a_kind_are_the_default_algorithms(loaded):
    assert loaded(text=MINIMAL + "algorithm: {}").algorithm.kind == options.DEFAULT_ALGORITHM


def test_an_unknown_algorithm_option_is_refused_and_its_owner_named(loaded):
    assert refusal(loaded, "algorithm.zzz=3") == "algorithm.zzz: no such option. (command line)"
    said = refusal(loaded, "algorithm.kind=grpo", "algorithm.mask_scope=pairs")
    assert said == (
        "algorithm.mask_scope: no such option. It is an option of capo, and algorithm.kind is grpo. (command line)"
    )


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algorithm.top_k=9", "It is an option of simko, and algorithm.kind is capo."),
        (
            "algorithm.reward=reward",
            "It is an option of grpo, dr_grpo, gspo, codapo, simko, scapo, and algorithm.kind is",
        ),
        ("data.reward=exact", "reward is a section of its own."),
        ("algorithm.lr=1", "Did you mean train.lr or warmup.lr?"),
    ],
)
def test_an_option_that_another_algorithm_or_section_has_is_found_there(loaded, override, hint):
    assert refusal(loaded, override).startswith(f"{override.partition('=')[0]}: no such option. {hint}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.tauu=1", "algorithm.tauu: no such option. Did you mean algorithm.tau? (command line)"),
        ("algorithm.ref_high=mean", "algorithm.ref_high: got 'mean', expected a number or 'quartile'. (command line)"),
        (
            "algorithm.surrogate=cubic",
            "algorithm.surrogate: got 'cubic', expected 'logistic' or 'linear'. (command line)",
        ),
    ],
)
def test_algorithm_options_are_checked_like_any_other(loaded, override, message):
    said = refusal(loaded, override)
    assert said.startswith(message)
    assert "\n" not in said


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize("kind", list(options.algorithms()))
def test_algorithm_options_must_be_finite(loaded, kind, value):
    shown = value.replace(".", "")
    numbers = {
        path: annotation
        for path, annotation in options.known(kind).items()
        if path.startswith("algorithm.") and float in options._members(annotation)
    }
    assert "algorithm.beta" in numbers
    for path, annotation in numbers.items():
        said = refusal(loaded, f"algorithm.kind={kind}", f"{path}={value}")
        wanted = options.describe(annotation).replace("a number", "a finite number")
        assert said == f"{path}: got {shown}, expected {wanted}. (command line)"


def test_switching_the_algorithm_says_which_options_of_the_file_are_dropped(config_file, caplog):
    path = config_file(MINIMAL + "algorithm: {kind: capo, tau: 0.4, clip_low: 0.1}")
    with caplog.at_level(logging.WARNING):
        switched = load(path, ["algorithm.kind=grpo", "algorithm.clip_high=0.3"]).algorithm
    assert switched == GrpoConfig(clip_low=0.1, clip_high=0.3)
    assert f"algorithm.kind=grpo replaces capo of {path}: algorithm.tau not used." in caplog.text
    caplog.clear()
    assert load(path, ["algorithm.kind=capo"]).algorithm == CapoConfig(tau=0.4, clip_low=0.1)
    assert load(path, ["algorithm={tau: 0.5}"]).algorithm == CapoConfig(tau=0.5, clip_low=0.1)
    assert not caplog.text
    with pytest.raises(ConfigError, match=r"^algorithm\.kind: no such algorithm 'papo'\..*\(command line\)$"):
        load(path, ["algorithm.kind=papo"])
    assert not caplog.text


def test_switching_the_algorithm_keeps_what_means_the_same_to_both(config_file, caplog):
    shared = "reduction: token-mean, beta: 0.1, truncated: drop"
    path = config_file(MINIMAL + f"algorithm: {{kind: capo, {shared}, clip_low: 0.1, mask: on, tau: 0.5}}")
    with caplog.at_level(logging.WARNING):
        grpo = load(path, ["algorithm.kind=grpo"]).algorithm
        assert grpo == GrpoConfig(reduction="token-mean", beta=0.1, truncated="drop", clip_low=0.1)
        assert caplog.text.rstrip().endswith(": algorithm.mask, algorithm.tau not used.")
        gspo = load(path, ["algorithm.kind=gspo"]).algorithm
        assert gspo == GspoConfig(reduction="token-mean", beta=0.1, truncated="drop")
        assert caplog.text.rstrip().endswith(": algorithm.clip_low, algorithm.mask, algorithm.tau not used.")
        dapo = load(path, ["algorithm.kind=dapo"]).algorithm
        assert (dapo.reduction, dapo.beta, dapo.clip_low) == ("token-mean", 0.1, 0.1)
        assert caplog.text.rstrip().endswith(": algorithm.mask, algorithm.tau not used."), "its reduction is DAPO's own"
        caplog.clear()
        path = config_file(MINIMAL + "algorithm: {kind: grpo, beta: 0.2}")
        assert load(path, ["algorithm.kind=simko"]).algorithm.beta == 0.2
    assert not caplog.text


@pytest.mark.parametrize("after", list(options.algorithms()))
@pytest.mark.parametrize("before", list(options.algorithms()))
def test_switching_the_algorithm_of_a_written_config_gives_one_that_can_be_built(loaded, config_file, before, after):
    given = {"dr_grpo": ["algorithm.length=9"], "capo": ["algorithm.reference_decay=0.9"]}
    path = config_file(dump(loaded(f"algorithm.kind={before}", *given.get(before, []))))
    assert build(load(path, [f"algorithm.kind={after}"]).algorithm).name == after


# --- rules that span sections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "overrides", "message"),
    [
        (1, ["model.path=null"], "model: neither path nor shape is given."),
        (1, ["data.train=[]"], "data: neither task nor train is given."),
        (1, ["data.task=chain"], "data: both task (chain) and train (train.jsonl) are given."),
        (1, ["data.task_options={a: 1}"], "data.task_options: got {'a': 1}, but there is no data.task"),
        (1, ["data.validation=[v.jsonl]"], "data.validation_size=240: data.validation already names files."),
        (1, ["data.validation_size=0"], "eval.every=20: there are no validation problems."),
        (
            1,
            ["reward.kind=mathverify"],
            "reward.kind: got 'mathverify', expected math_verify, exact, reasoning_gym, task",
        ),
        (1, ["reward.kind=task"], "reward.kind=task: needs a data.task to score for"),
        (
            1,
            ["reward.kind=reasoning_gym"],
            "reward.kind=reasoning_gym: needs data.task=reasoning_gym/<name>, got no task",
        ),
        (
            1,
            ["algorithm.kind=grpo", "algorithm.reward=nope"],
            "algorithm.reward=nope: no such reward. reward.kind=math_verify gives reward, correct.",
        ),
        (3, ["rollout.engine=vllm", "rollout.vllm.tensor=2"], "rollout.vllm.tensor=2 does not divide the 3 ranks"),
        (1, ["warmup.steps=60"], "warmup: needs a data.task"),
        (6, ["parallel.tensor=4"], "parallel.tensor=4 x parallel.pipeline=1 takes a multiple of 4 ranks, got 6."),
        (1, ["parallel.virtual=2"], "parallel.virtual=2 needs parallel.pipeline > 1"),
        (1, ["parallel.sequence=true"], "parallel.sequence=true needs parallel.tensor > 1"),
        (1, ["rollout.placement=separate"], "rollout.separate.servers: missing. rollout.placement=separate needs the"),
        (1, ["rollout.separate.servers=[a:1]"], "rollout.separate.servers: a:1 are named, and rollout.placement=coloc"),
        (
            3,
            ["rollout.placement=separate", "rollout.separate.servers=[a:1, b:1]"],
            "rollout.separate.servers: 2 servers for 3 trainer ranks, which are dealt out evenly",
        ),
        (
            2,
            ["rollout.placement=separate", "rollout.separate.servers=[a:1, a:1]"],
            "rollout.separate.servers: a:1, a:1: one is named twice",
        ),
        (
            1,
            ["rollout.placement=separate", "rollout.separate.servers=['http://a:1']"],
            "rollout.separate.servers: got 'http://a:1', expected host:port",
        ),
        (1, ["rollout.samples=1"], "rollout.samples=1: capo compares the responses"),
        (1, ["rollout.prompts=63"], "rollout.prompts=63 does not divide into train.minibatches=2 equal mini-batches"),
        (8, ["rollout.prompts=2", "rollout.samples=4"], "train.minibatches=2 leaves 4 responses to a mini-batch"),
        (1, ["train.micro_batch_tokens=4095"], "train.micro_batch_tokens=4095 cannot hold one sequence of up to 4096"),
        (1, ["rollout.top_p=0.9"], "rollout.top_p=0.9, rollout.top_k=0: tokens would be sampled from a truncated"),
        (1, ["rollout.top_k=20"], "rollout.top_p=1, rollout.top_k=20: tokens would be sampled from a truncated"),
        (1, ["eval.temperature=0"], "eval.temperature=0 gives eval.samples=16 equal responses"),
        (
            1,
            ["model.max_position_embeddings=4095"],
            "data.max_prompt_tokens=1050 + rollout.max_tokens=3046 = 4096 tokens",
        ),
        (
            1,
            ["data.train=[]", "data.task=chain", "eval.every=0", "data.validation_size=0", "warmup.steps=20"],
            "warmup.lr_warmup_steps=50 must be below warmup.steps=20. Set warmup.lr_warmup_steps=2, for example.",
        ),
        (1, ["train.min_lr=1"], "train.min_lr=1 is above train.lr=1e-06"),
        (
            1,
            ["train.lr_warmup_steps=1200"],
            "train.lr_warmup_steps=1200 must be below the 1200 optimizer steps of the whole",
        ),
        (
            1,
            ["train.lr_decay_steps=9", "train.lr_warmup_steps=9"],
            "train.lr_warmup_steps=9 must be below the 9 optimizer",
        ),
    ],
)
def test_a_contradiction_between_sections_is_refused(loaded, world, overrides, message):
    said = refusal(loaded(*overrides).check, world)
    assert said.startswith(message)
    assert "\n" not in said


def test_a_path_and_a_shape_exclude_each_other(loaded):
    shape = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers"), 8)
    shape |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), 2)
    said = refusal(loaded(f"model.shape={shape}").check, 1)
    assert said == "model: both path (model) and shape are given. Keep one; a path brings its own shape."
    said = refusal(loaded(f"model.shape={shape}", "model.path=null").check, 1)
    assert said == "model.tokenizer: missing. Problem files need a tokenizer, and model.shape brings none."


def test_the_models_own_position_limit_is_read_where_it_is_known(loaded, tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4000}')
    assert "exceed the model's 4000 positions" in refusal(loaded(f"model.path={tmp_path}").check, 1)
    (tmp_path / "config.json").write_text("not json")
    loaded(f"model.path={tmp_path}").check(1)


def test_truncated_sampling_can_be_accepted(loaded):
    loaded("rollout.top_p=0.9", "rollout.accept_truncated_sampling=true").check(1)


def test_an_engine_of_several_ranks_cannot_sample_ahead(loaded):
    options = ["rollout.engine=vllm", "rollout.async_steps=1"]
    assert "rollout.async_steps=1 with rollout.vllm.tensor=2" in refusal(
        loaded(*options, "rollout.vllm.tensor=2").check, 2
    )
    loaded(*options).check(2)
    apart = ["rollout.placement=separate", "rollout.separate.servers=[node1:29600]"]  # where it disturbs nobody
    loaded(*options, "rollout.vllm.tensor=2", *apart).check(2)


def test_the_plan_names_the_engine_servers(loaded):
    apart = ["rollout.engine=vllm", "rollout.placement=separate", "rollout.separate.servers=[a:1, b:1]"]
    lines = describe_batch(loaded(*apart), 8)
    assert (
        "engines       vllm at a:1, b:1, each for 4 trainer ranks; weights by nccl (gloo without GPUs) in buckets of "
        "512 MiB"
    ) in lines
    assert not any(line.startswith("engines") for line in describe_batch(loaded(), 8))


def test_all_contradictions_are_said_at_once(loaded):
    said = refusal(loaded("rollout.prompts=7", "train.min_lr=1", "parallel.tensor=2").check, 3)
    assert len(said.splitlines()) == 3


@pytest.mark.parametrize("world", [1, 2, 4, 8, 64])
def test_the_papers_settings_pass_on_any_number_of_ranks(loaded, world):
    loaded().check(world)


def test_the_batch_arithmetic_adds_up(loaded):
    lines = "\n".join(describe_batch(loaded("parallel.tensor=2"), 8))
    for claim in (
        "8 ranks = tensor 2 x pipeline 1 x data 4",
        "128 prompts x 8 samples = 1,024 responses a step",
        "2 mini-batches x 1 epoch = 2 optimizer steps per rollout, 1,200 in all",
        "512 sequences, at most 2,097,152 tokens",
        "128 sequences of a mini-batch, at most 524,288 tokens",
        "4 or more sequences, at most 32 micro-batches per data rank",
    ):
        assert claim in lines


# --- round trips ------------------------------------------------------------------------------------------------------

FINITE = st.floats(-3.4e38, 3.4e38)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
OPTION = st.one_of(FINITE, INTEGERS, st.text(), st.booleans(), st.lists(INTEGERS, min_size=1), st.lists(st.text()))


def values(annotation):
    """A strategy for everything that a field of this type may hold."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation == AlgorithmConfig:
        return st.one_of(*map(instances, options.algorithms().values()))
    if is_dataclass(annotation):
        return instances(annotation)
    if annotation in (float, int):
        return FINITE if annotation is float else INTEGERS
    if origin is Annotated:
        return st.from_type(annotation).filter(lambda value: not list(options.oversized(value)) and value != math.inf)
    if origin is dict:
        return st.dictionaries(st.text(), OPTION, max_size=4)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if options._is_union(annotation):
        return st.one_of(*map(values, arguments))
    return st.from_type(annotation)


def instances(section):
    hints = get_type_hints(section, include_extras=True)
    return st.builds(section, **{spec.name: values(hints[spec.name]) for spec in fields(section)})


@settings(max_examples=40, deadline=None)
@given(config=instances(RunConfig))
def test_a_written_config_loads_back_to_the_same_object(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("round") / "resolved.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == resolve(config)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), FINITE, st.text())
LOOKALIKES = st.sampled_from(
    ["1e-6", "no", "off", "true", "null", "~", "", "012", "1_0", "<<", "=", ".5", ".inf", "- a", "2026-11-30"]
)
TREES = st.recursive(
    st.one_of(SCALARS, LOOKALIKES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.one_of(st.text(), LOOKALIKES), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(tree=TREES)
@example(tree={"a": ["\x85", "x\u2028y", "\r\n", "line\nline\n", "\t", " "], "b": ["1e-6", "no", "012", "<<", ""]})
def test_the_yaml_dialect_reads_what_it_writes(tree):
    again = parse(emit(tree), "test")
    assert again == tree
    assert repr(again) == repr(tree), "types, too: 1 is not true, and '1e-6' is not a number"


# --- cost -------------------------------------------------------------------------------------------------------------


def test_importing_the_config_loads_no_heavy_package():
    heavy = "[m for m in ('transformers', 'megatron', 'matplotlib', 'vllm') if m in sys.modules]"
    script = f"import sys; import capo_megatron.config; print({heavy})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
