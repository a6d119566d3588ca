# Every target makes .venv first when it has to; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
TESTS ?= tests
THREADS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
DEMO_ARGS ?=
BENCH_ARGS ?=
CLIENTS ?=
EXTRAS ?=
QUICK ?=
ATEN ?= avx2
ONEDNN ?= AVX2
MKL ?= AVX2

.DEFAULT_GOAL := help
.PHONY: help setup demo test portable exhaustive nightly threads-1 threads-4 check lint format bench bench-pages bench-full versions clients \
  extra-tests quantization docs-setup docs wheel smoke clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv from constraints.txt (quick the second time)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed, and $(PYTHON) is `$(PYTHON) --version 2>&1`; try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) (once; the download takes minutes)"; $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev,demo]' -c constraints.txt
	@touch $@

demo: $(READY) ## the main job: train, publish, reload and convert a small model on real text
	$(BIN)/blockformer demo $(DEMO_ARGS)

# Each process of the tests computes with one thread, for there are several. Those of the engine and of generation compute
# with two whatever the process has (tests/conftest.py); a thread that waits must not spin then, for there are few cores.
test: $(READY) ## run the tests, up to four at a time (TESTS=tests/cli to run some)
	$(ONE_THREAD) $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --threads $(THREADS) $(TESTS)

portable: $(READY) ## the tests that compare numbers, as a processor without AVX-512 computes them
	$(ONE_THREAD) ATEN_CPU_CAPABILITY=$(ATEN) ONEDNN_MAX_CPU_ISA=$(ONEDNN) MKL_ENABLE_INSTRUCTIONS=$(MKL) \
	  $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --margins 10 -m "portable and not exhaustive" $(TESTS)

exhaustive: $(READY) ## the tests that take minutes, with examples drawn afresh: 50,000 cases of fuzzing, large checkpoints
	$(ONE_THREAD) $(BIN)/python -m pytest -m exhaustive --fresh-seeds --durations=0 --timeout=3600 $(TESTS)

threads-1 threads-4: threads-%: $(READY) ## what generates, with one thread and with four
	$(ONE_THREAD) $(BIN)/python -m pytest --threads $* -m "several_threads and not exhaustive" $(TESTS)

nightly: ## all of this, some hours: make --keep-going nightly
nightly: check portable exhaustive threads-1 threads-4 versions clients extra-tests docs smoke

check: lint test ## lint, types and tests

lint: $(READY) ## ruff check, ruff format --check, mypy, bandit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.13
	$(BIN)/bandit -q -c pyproject.toml -r src conversion examples benchmarks scripts

format: $(READY) ## apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## speed and memory beside transformers, some minutes (BENCH_ARGS="--only training")
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

bench-pages: $(READY) ## what the README and the benchmarks show, on an idle machine, and write it there
	$(BIN)/python benchmarks/run.py --dtypes float32 --output benchmarks/results/pages --only \
	  decoder small gpt2 encoder encoder-decoder translator compiled both-compiled
	$(BIN)/python scripts/speed_pages.py benchmarks/results/pages/speed.json
	$(BIN)/python scripts/figures.py

bench-full: $(READY) ## the same with every size and context
	$(BIN)/python benchmarks/run.py --full $(BENCH_ARGS)

versions: $(READY) ## the parity, generation and remote-code tests on transformers 5.5, 5.10.4, 5.23.0 and the newest
	$(BIN)/python scripts/versions.py $(QUICK)

clients: $(READY) ## other people's tools on our models and on transformers' own (CLIENTS="peft onnx" for some)
	$(BIN)/python scripts/clients $(QUICK) $(CLIENTS)

extra-tests: $(READY) ## the tests that need other packages, in environments of their own (EXTRAS="quantization onnx" for some)
	$(BIN)/python scripts/extra_tests.py $(EXTRAS)

quantization: ## those of the low-bit libraries
	$(MAKE) extra-tests EXTRAS=quantization

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[docs]' -c constraints.txt
	@touch $@

docs-setup: $(DOCS_READY)

docs: $(DOCS_READY) ## build the documentation into site/, offline; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(READY) ## build dist/blockformer-*.whl
	@rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist .

smoke: wheel ## install the wheel into a second environment and try it there
	scripts/smoke.sh $(BIN)/python

clean: ## remove what was built, the environments too
	rm -rf $(VENV) .venvs build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
