# `make chat` and `make test` need nothing but Python 3.11+ and a package index. See README.md.

PYTHON ?= python3
MODEL ?= smollm2
QUESTION ?= What is the capital of France? Answer in one sentence.

VENV := .venv
BIN := $(VENV)/bin
NATIVE := hatch_build.py $(wildcard engine/kernels/native/*.cpp engine/kernels/native/*.h engine/kernels/native/*.py)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# On all cores, where pip uses one; what does not compile is for another Python.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true

.PHONY: help chat test lint format man clean

help:
	@echo 'make chat     install and chat with the default model (MODEL=... for another)'
	@echo 'make test     install and run every check and test'
	@echo 'make lint     the checks alone: ruff, mypy, import contracts'
	@echo 'make format   rewrite the sources in the house style'
	@echo 'make man      docs/chatterm.1, from the help of the commands'
	@echo 'make clean    remove the virtual environment and caches (models stay)'

# Where there is no terminal (a log, a pipe) one sample question shows the main job.
chat: $(VENV)/installed
	@if [ -t 0 ] && [ -t 1 ]; then \
		$(BIN)/chatterm run '$(MODEL)'; \
	else \
		echo '> $(QUESTION)'; \
		$(BIN)/chatterm run '$(MODEL)' --prompt '$(QUESTION)' --seed 1 --max-tokens 200 --stats </dev/null; \
	fi

# The order of sets of strings depends on the seed of their hash.
test: lint
	PYTHONHASHSEED=0 $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

man: $(VENV)/installed-dev
	$(BIN)/python docs/make_man.py > docs/chatterm.1

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis

# The stamps make the next call start at once; a change of the dependencies or of the native kernels installs again.
$(VENV)/installed: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) -e .
	@$(COMPILE)
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $(VENV)/installed $@

$(BIN)/python:
	@command -v '$(PYTHON)' >/dev/null || { echo "chatterm: '$(PYTHON)' was not found; name one with make PYTHON=..." >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.version_info < (3, 11) and sys.exit("chatterm needs Python 3.11 or newer, this is %d.%d; name another with make PYTHON=..." % sys.version_info[:2])'
	'$(PYTHON)' -m venv $(VENV)
