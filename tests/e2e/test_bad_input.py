"""Whatever is wrong with the input: one line that says what, exit code 2, and nothing written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from capo_megatron.cli import main
from tests.e2e.commands import TREE, WARMUP, own_file_system, refused, run, snapshot, write_config

FILES = {
    "good.jsonl": "".join(f'{{"problem": "{i}+{i}=", "answer": "{2 * i % 10}"}}\n' for i in range(10)),
    "empty.jsonl": "",
    "torn.jsonl": '{"problem": "1+1=", "answer": "2"}\n{"problem": "2+',
    "broken.yaml": "train:\n  steps: 3\n lr: 1\n",
    "list.yaml": "- train\n",
    "other.py": "def grade(problem):\n    return 1.0\n",
}
FROM_FILES = ("data.task=null", "reward.kind=exact", "model.tokenizer=tokenizer")


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of the shape in `TREE`, with its weights in three files."""
    from capo_megatron.data.chain import chain_tokenizer
    from capo_megatron.weights import huggingface
    from capo_megatron.weights.shape import ModelShape
    from capo_megatron.weights.sources import RandomSource
    from capo_megatron.weights.table import hf_shapes

    folder = tmp_path_factory.mktemp("weights") / "model"
    shape = ModelShape(**TREE["model"]["shape"], tie_word_embeddings=True)
    source = RandomSource(shape, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "SHARD_BYTES", 10_000)
        huggingface.save_hf(folder, shape, ((name, source.read(name)) for name in hf_shapes(shape)))
    assert len(list(folder.glob("*.safetensors"))) == 3
    chain_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a config and some files to get wrong."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write_config(tmp_path, warmup=WARMUP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.lrr=1e-3", r"train\.lrr: no such option\. Did you mean train\.lr\? \(command line\)"),
        ("train.lr=fast", r"train\.lr: got 'fast', expected a number > 0"),
        (
            "train.minibatches=3",
            r"rollout\.prompts=4 does not divide into train\.minibatches=3.* Use rollout\.prompts=3",
        ),
        ("train.micro_batch_tokens=20", r"train\.micro_batch_tokens=20 cannot hold one sequence of up to 24 tokens"),
        ("rollout.max_tokens=17", r"16 \+ rollout\.max_tokens=17 = 33 tokens exceed the model's 32 positions\. Lower"),
        ("model.shape.vocab_size=16", r"model\.tokenizer: its ids need 17 embedding rows and the model has 16\. Use"),
        ("model.shape.num_key_value_heads=3", r"num_key_value_heads=3 does not divide num_attention_heads=4"),
        ("data.task=chian", r'data\.task: no task \'chian\'\. Did you mean "chain"\? Known: '),
        (
            "data.task_options={slips: 0.1}",
            r"data\.task_options\.slips: no such option of chain\. Did you mean \"slip\"\?",
        ),
        (
            "reward.kind=no_such_module:grade",
            r"reward\.kind=no_such_module:grade: there is no module 'no_such_module'\. ",
        ),
        ("reward.kind=json:no_such", r"reward\.kind=json:no_such: json has no function 'no_such'"),
        ("reward.kind=absent.py:grade", r"reward\.kind=absent\.py:grade: there is no Python file absent\.py"),
        (
            "reward.kind=other.py:grade",
            r"reward\.kind=other\.py:grade: the function must be callable as grade\(problem, ",
        ),
        ("rollout.async_steps=2", r"rollout\.async_steps: got 2, expected .* 1"),
        ("output=good.jsonl", r"good\.jsonl: cannot be written: a file is in the way\. Remove it or choose another"),
        ("output=good.jsonl/run", r"good\.jsonl/run: cannot be written: a file is in the way"),
        ("output=/proc/run", r"/proc/run: cannot be written: No such file or directory\. Choose another output"),
    ],
)
def test_options_that_cannot_be(place: Path, capfd: pytest.CaptureFixture[str], option: str, message: str) -> None:
    line = refused(capfd, "train", "run.yaml", option)
    assert re.search(message, line), line
    assert not (place / "run").exists() and not (place / "base").exists()


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
@pytest.mark.parametrize("command", ["check", "train"])
def test_fp8_without_transformer_engine(place: Path, capfd: pytest.CaptureFixture[str], command: str) -> None:
    line = refused(capfd, command, "run.yaml", "precision.fp8=tensorwise", "model.dtype=bfloat16")
    assert "precision.fp8=tensorwise: needs TransformerEngine, which is not installed" in line
    assert not (place / "run").exists()


def test_problems_that_are_chosen_by_the_step_before_cannot_be_sampled_ahead(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["train", "run.yaml", "algorithm.kind=codapo", "rollout.async_steps=1"]
    line = refused(capfd, *options)
    assert re.search(r"rollout\.async_steps=1: codapo chooses .*async_steps=0, or .*algorithm\.refocus=false", line)
    assert main(["check", *options[1:], "algorithm.refocus=false"]) == 0


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (
            3,
            ["parallel.tensor=3"],
            r"parallel\.tensor=3 does not divide the 2 key-value heads of model\.shape\. Use 1 or 2",
        ),
        (2, ["parallel.pipeline=2"], r"parallel\.pipeline=2 does not divide the 3 layers of model\.shape\. Use 1 or 3"),
        (3, ["parallel.tensor=2"], r"takes a multiple of 2 ranks, got 3\. Start 4 ranks, or change the layout"),
        (16, ["rollout.samples=2"], r"leaves 4 responses to a mini-batch .* too few for 16 data-parallel ranks"),
        (2, ["parallel.sequence=true"], r"parallel\.sequence=true needs parallel\.tensor > 1, got 1"),
    ],
)
def test_layouts_that_do_not_fit(
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    options: list[str],
    message: str,
) -> None:
    assert re.search(message, line := refused(capfd, "check", "run.yaml", "--ranks", str(ranks), *options)), line
    monkeypatch.setenv("RANK", "0")  # as a launcher sets them
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert refused(capfd, "train", "run.yaml", *options) == line


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "absent.yaml"], r"absent\.yaml: the config cannot be read: No such file or directory"),
        (["train", "broken.yaml"], r"broken\.yaml:3: not valid YAML"),
        (["train", "list.yaml"], r"list\.yaml: got .*, expected `section: options` pairs at the top level"),
        (["train", "."], r"\.: neither a run \(resolved\.yaml\) nor a Hugging Face model \(config\.json\) is in there"),
        (["train", "run.yaml", "--nproc", "0"], r"--nproc 0: at least one rank is needed"),
        (["train", "run.yaml", "--nproc", "-2"], r"--nproc -2: at least one rank is needed"),
        (["check", "run.yaml", "--ranks", "0"], r"--ranks 0: at least one rank is needed"),
        (["train", "run.yaml", "--nproc", "3", "parallel.tensor=2"], r"takes a multiple of 2 ranks, got 3"),
        (["eval", "run.yaml"], r"run: no checkpoint in it yet\. Train first, or use the model before training: --base"),
        (["eval", "run.yaml", "--benchmark", "absent.jsonl"], r"absent\.jsonl: no such file"),
        (["eval", "run.yaml", "eval.temperature=0"], r"eval\.temperature=0: 2 responses .* all be equal\. .* --n 1"),
        (["eval", "run.yaml", "--output", "."], r"--output \.: is a folder\. Name a file in it"),
        (["sample", "run.yaml", "--base", "--prompt", "3 plus 4="], r"one token per character, and none for ' '"),
        (["sample", "run.yaml", "--base", "--prompt", "1+" * 15 + "1="], r"32 prompt tokens and .*need 40 positions"),
    ],
)
def test_commands_that_make_no_sense(
    place: Path, capfd: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    write_config(place)
    assert re.search(message, line := refused(capfd, *command)), line


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.train=[empty.jsonl]"], r"empty\.jsonl: no problems in this file"),
        (["data.train=[absent.jsonl]"], r"absent\.jsonl: no such file"),
        (["data.train=[torn.jsonl]"], r"torn\.jsonl:2: not JSON"),
        (
            ["data.train=[good.jsonl]", "data.prompt_column=problems"],
            r'good\.jsonl:1: no column "problems"\. Did you mean "problem"\? .* Set data\.prompt_column',
        ),
        (
            ["data.train=[good.jsonl]", "data.answer_column=solution"],
            r'good\.jsonl:1: no column "solution"\. Columns here: answer, problem\. Set data\.answer_column',
        ),
        (["data.train=[good.jsonl]", "data.validation_size=10"], r"data\.validation_size=10: there are only 10"),
        (
            ["data.train=[good.jsonl]", "data.max_prompt_tokens=3"],
            r"all 10 prompts are longer, the shortest has 4 tokens",
        ),
        (["data.train=[good.jsonl]", "data.template=chat"], r"data\.template: chat, but this tokenizer has no chat"),
        (["data.train=[good.jsonl]", "model.tokenizer=nowhere"], r"model\.tokenizer: nowhere is not a directory"),
    ],
)
def test_problem_files_that_cannot_be_used(
    place: Path, capfd: pytest.CaptureFixture[str], model_directory: Path, options: list[str], message: str
) -> None:
    write_config(place)
    (place / "tokenizer").mkdir()
    for file in model_directory.glob("tokenizer*"):
        shutil.copy(file, place / "tokenizer")
    assert re.search(message, line := refused(capfd, "train", "run.yaml", *FROM_FILES, *options)), line


# --- weights ----------------------------------------------------------------------------------------------------------


def remove_all(model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()


def remove_one(model: Path) -> None:
    (model / "model-00002-of-00003.safetensors").unlink()


def truncate(model: Path) -> None:
    file = model / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def swap(model: Path) -> None:
    file = model / "model-00003-of-00003.safetensors"
    save_file({name: tensor[..., :-1].contiguous() for name, tensor in load_file(file).items()}, file)


def break_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{")


def deepen(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))


def other_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))


def truncate_tokenizer(model: Path) -> None:
    file = model / "tokenizer.json"
    file.write_text(file.read_text()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_all, r"model: no model\.safetensors and no model\.safetensors\.index\.json\. Point to"),
        (remove_one, r"model-00002-of-00003\.safetensors: no such file, but .*index\.json names it"),
        (truncate, r"model-00002-of-00003\.safetensors: damaged or truncated .*Download it again"),
        (break_index, r"model\.safetensors\.index\.json: not a safetensors index"),
        (swap, r"model-00003-of-00003\.safetensors: tensor \S+ has shape .*, but model needs "),
        (deepen, r"tensor model\.layers\.3\.\S+ is missing\. model needs it"),
        (other_kind, r"config\.json: model_type='gemma' is not supported\. Use a 'qwen2', 'qwen3' or 'llama' model"),
        (truncate_tokenizer, r"tokenizer\.json: damaged or unreadable"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_model_directories_that_cannot_be_used(
    place: Path, capfd: pytest.CaptureFixture[str], model_directory: Path, damage: object, message: str
) -> None:
    assert callable(damage)
    write_config(place, model={"path": "model", "dtype": "float32"})
    shutil.copytree(model_directory, place / "model")
    damage(place / "model")
    assert re.search(message, line := refused(capfd, "train", "run.yaml")), line
    assert refused(capfd, "check", "run.yaml") == line


# --- an output that holds something -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a file system of its own of 4 MiB, if the system lets us mount one, holding a run."""
    with own_file_system(tmp_path_factory.mktemp("disk"), "4m") as folder:
        assert main(["train", str(write_config(folder)), f"output={folder / 'run'}", "train.steps=1"]) == 0
        yield folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["model.shape.hidden_size=32"],
            r"step_000001: saved for a model with hidden_size 16, this one has 32\. Nothing",
        ),
        (["algorithm.kind=grpo"], r"algorithm\.kind=grpo: .* was trained by capo\. .* Choose another output, or"),
        (
            ["algorithm.reference_decay=0.9"],
            r"algorithm\.reference_decay=0\.9: .* a fixed reference: other options of c",
        ),
        (["model.shape.initializer_range=0.1"], r"model\.reference: the checkpoint of step 1 .* against other weights"),
        (["seed=7"], r"data: cannot resume, the .* of the training problems was .*new output folder"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_left_alone(
    small_disk: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(small_disk)
    assert re.search(message, line := refused(capfd, "train", "run.yaml", *options)), line
    assert re.search(r"There are: \[1\]", refused(capfd, "eval", "run", "--step", "99"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "latest",
            "step_000007",
            r"latest: names 'step_000007', which is not a complete checkpoint\. Complete ones: \[1\]",
        ),
        ("step_000001/state.json", '{"step": 1', r"state\.json: damaged .*To resume from an older one, write its name"),
        ("step_000001/state.json", "{}", r"state\.json: not the description of a checkpoint\. To resume"),
        ("step_000001/__0_0.distcp", "", r"step_000001: cannot be read: .*\. To resume from an older one, write"),
        ("step_000001/rng.safetensors", "", r"rng\.safetensors: cannot be read .*\. To resume from an older one"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    small_disk: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    content: str,
    message: str,
) -> None:
    monkeypatch.chdir(small_disk)
    path = small_disk / "run" / "checkpoints" / file
    good = path.read_bytes()
    path.write_text(content)
    try:
        assert re.search(message, line := refused(capfd, "train", "run.yaml")), line
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize(
    ("free_kib", "message"),
    [
        (0, r"run: cannot be written: the disk is full\. Free some space"),
        (60, r"run/checkpoints: 0\.\d MiB free, a checkpoint needs 0\.\d MiB\. Nothing was written\. Free disk space"),
    ],
)
def test_a_full_disk_ends_the_run_and_spares_the_checkpoint(
    small_disk: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_kib: int, message: str
) -> None:
    if not small_disk.is_mount():
        pytest.skip("a small file system cannot be mounted here")
    monkeypatch.chdir(small_disk)
    fill(small_disk, free_kib)
    before = snapshot(small_disk / "run" / "checkpoints")
    capfd.readouterr()
    assert main(["train", "run.yaml", "train.steps=2"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and re.search(message, lines[0]), lines
    assert snapshot(small_disk / "run" / "checkpoints") == before
    (small_disk / "filler").unlink()
    assert main(["sample", "run", "--prompt", "1+2="]) == 0  # it loads


def fill(folder: Path, free_kib: int) -> None:
    (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - free_kib * 1024))


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parallel
def test_a_failure_of_one_rank_alone_is_said_once(place: Path) -> None:
    write_config(place)
    (place / "run").mkdir()
    (place / "run" / "metrics.jsonl").symlink_to("/dev/full")  # only the first rank writes there
    done = run(place, "capo_megatron", "train", "run.yaml", "--nproc", "2")
    assert done.returncode == 2
    message = r"capo-megatron: CapoError: run/metrics\.jsonl: cannot be written: the disk is full\. .*\n"
    assert re.fullmatch(message, done.stderr), done.stderr


@pytest.mark.parallel
def test_under_torchrun_the_program_says_it_once(place: Path) -> None:
    """torchrun adds its own report to every failure and ends with 1, whatever the ranks end with."""
    before = snapshot(place)
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "capo_megatron")
    done = run(place, *launcher, "train", "run.yaml", "output=good.jsonl")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("capo-megatron: ")]
    assert len(said) == 1 and "good.jsonl: cannot be written: a file is in the way" in said[0], done.stderr
    assert "capo_megatron/" not in done.stderr, "a traceback of ours"
    assert "exitcode  : 2" in done.stderr
    assert snapshot(place) == before
