# make demo: train on rotated digits and compare; make test: all tests. Both start from nothing but Python 3.11.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test lowest lint docs clean bench bench-quick
.DELETE_ON_ERROR:

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kinfed needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed
	rm -rf runs/demo
	$(BIN)/kinfed demo

# A worker for each core, of one thread each (tests/conftest.py).
test: .venv/installed
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

# lowest: the tests with the lowest versions of all dependencies that pyproject.toml names; about half an hour.
lowest: .venv/installed
	$(BIN)/python tests/installed.py --lowest -n auto --maxprocesses 8 --dist loadgroup

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs: the site in build/docs, from the pages in docs/; it runs the notebooks and checks every link.
docs: .venv/installed
	$(BIN)/python -c 'import furo, myst_nb' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
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
bench: .venv/installed .venv-peers/installed
	$(BIN)/python benchmarks/peers.py

# bench-quick: ratios to the plain loop only, and a word where one has got worse; under 3 minutes.
bench-quick: .venv/installed
	$(BIN)/python benchmarks/peers.py --quick
