# make demo: ten methods on rotated digits, compared; make test: all tests. Both start from nothing but Python 3.11.
# TORCH_INDEX=URL takes PyTorch from the index at URL, such as that of its builds for CPUs (docs/install.md).
PYTHON ?= python3
BIN = .venv/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
TORCH_INDEX ?=

.PHONY: demo test lowest lint docs clean bench bench-quick
.DELETE_ON_ERROR:

# What kinfed and its demo need.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kinfed needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
ifneq ($(TORCH_INDEX),)
	$(PIP) --index-url $(TORCH_INDEX) torch
else
	@echo "Installing kinfed and what it needs into .venv. Most of that is PyTorch, whose"
	@echo "default build for Linux brings gigabytes for GPUs. Its build for CPUs instead:"
	@echo "make demo TORCH_INDEX=URL (docs/install.md says which URL)."
endif
	$(PIP) -e .
	touch $@

# And what tests and the linter need.
.venv/installed-dev: .venv/installed
	$(PIP) -e '.[dev]'
	touch $@

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/python examples/first_run.py

# A worker for each core, of one thread each (tests/conftest.py).
test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

# lowest: the tests with the lowest versions of all dependencies that pyproject.toml names; about half an hour.
lowest: .venv/installed-dev
	$(BIN)/python tests/installed.py --lowest -n auto --maxprocesses 8 --dist loadgroup

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file evidence/mypy.ini evidence/*.py benchmarks/*.py examples/*.py

# docs: the site in build/docs, from the pages in docs/; it runs the notebooks and checks every link.
docs: .venv/installed
	$(BIN)/python -c 'import furo, myst_nb' 2>/dev/null || $(PIP) -e '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -q -j auto docs build/docs
	@echo "open build/docs/index.html"

clean:
	rm -rf .venv runs build dist src/*.egg-info

.venv-peers/installed: constraints.txt
	$(PYTHON) -m venv .venv-peers
	for peer in torch fedjax pfl 'flwr[simulation]'; do \
	  .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$peer" || true; done
	touch $@

# bench: the workloads against a plain loop and against other programs, into docs/performance.md; about 20 minutes.
bench: .venv/installed-dev .venv-peers/installed
	$(BIN)/python benchmarks/peers.py

# bench-quick: ratios to the plain loop only, and a word where one has got worse; under 3 minutes.
bench-quick: .venv/installed-dev
	$(BIN)/python benchmarks/peers.py --quick
