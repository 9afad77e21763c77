# Two commands on a fresh machine: `make demo` and `make test`. Both build .venv first; nothing is installed outside it.
PYTHON ?= python3
VENV   := .venv
EXTRAS := .venv-integrations
SITE   := .venv-docs
AUDIT  := .venv-audit
RELEASE := .venv-release
PROOF  := .venv-proof
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# Real data beside the checkout is used where it is there; otherwise it is fetched once into the user's cache.
ifneq ($(wildcard ../shared/data/README.md),)
export SELFLESS_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo check test test-whole test-integrations test-wheel test-matrix dist lint snippets docs fuzz kills faults audit bench tables
.PHONY: coverage mutants soak bench-history bench-check
.PHONY: clean help
help:           ## what the targets do
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## build .venv with everything (idempotent)

# Stale when the dependencies change, missing when it was never finished: the stamp is written last.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("selfless needs Python >= 3.11; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
ifdef HASHES
	@$(PIP) --require-hashes --no-deps --requirement $(HASHES)
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip check
else
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
endif
	@touch $(STAMP)

demo: $(STAMP)  ## five permuted-MNIST tasks, MAS alone beside MAS + SLNID: table, plots, report
	@$(BIN)/selfless demo --out demo

lint: $(STAMP)  ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest -n 2 --maxschedchunk=2
check: lint     ## lint, types and the fast tests: before every commit
	@$(PYTEST) -m "not slow and not whole"

test: lint      ## lint, types and every test but those of whole programs
	@$(PYTEST) -m "not whole" --durations=20

test-whole: $(STAMP) ## whole programs: the examples, the page in a browser, several processes
	@$(PYTEST) -m whole

test-integrations: $(STAMP) ## callbacks, plugins and trackers, with the real libraries in an environment of their own
	@$(BIN)/python tests/integrations/environment.py $(EXTRAS)

dist:           ## the wheel and the sdist of the last commit: built twice with the same bytes, twine check; into dist/
	@$(PYTHON) -m tests.release.dist

test-wheel: dist ## the wheel in a bare environment, without the repository: demo, run, a user's program, mypy and pyright
	@$(PYTHON) -m tests.release.wheel

MATRIX ?=
test-matrix: dist ## each Python with the oldest and the newest torch; MATRIX="--only 3.12 --newest 2.10.0" for some cells
	@$(PYTHON) -m tests.release.matrix $(MATRIX)

snippets: $(STAMP) ## run every snippet of README.md and docs/
	@$(BIN)/python -m pytest tests/test_docs.py tests/test_docs_numbers.py

docs: $(STAMP)  ## build the site into build/site, notebooks executed, in an environment of its own
	@$(BIN)/python -m docs.site.build $(SITE)

FUZZ_SECONDS ?= 1200
fuzz: $(STAMP)  ## odd texts, flags, files and records for FUZZ_SECONDS: no traceback, no hang, nothing written elsewhere
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

kills: $(STAMP) ## kill commands at random moments, start them again, compare the results bit for bit
	@$(BIN)/python benchmarks/kills.py

faults: $(STAMP) ## every method at strengths from 1e-12 to 1e12; NaN and infinity in data, losses and rates
	@$(BIN)/python benchmarks/faults.py

soak: $(STAMP)  ## long trainings: no growth of memory, open files and threads
	@$(BIN)/python benchmarks/soak.py

coverage: $(STAMP) ## branch coverage of src, subprocesses counted; into build/coverage
	@$(BIN)/python -m tests.mutants.environment $(PROOF) -m tests.mutants.coverage_of_src -n 2 --maxschedchunk=2 -m "not whole"

MUTANTS ?= --workers 2 --seconds 3600
mutants: $(STAMP) ## put small faults into the code and count those that the tests find; into build/mutants; again to continue
	@$(BIN)/python -m tests.mutants.environment $(PROOF) -m tests.mutants $(MUTANTS)

audit: $(STAMP) ## known security holes of the installed packages, found by pip-audit in an environment of its own
	@$(PYTHON) .ci/audit.py $(BIN)/python $(AUDIT)

bench: $(STAMP) ## the speed ratios of this machine
	@$(BIN)/selfless bench

BENCH := bench --quick --only steps,importance,penalty --device cpu --threads 1 --history benchmarks/history.jsonl
bench-history: $(STAMP) ## add the ratios of this commit to benchmarks/history.jsonl
	@$(BIN)/selfless $(BENCH)

bench-check: $(STAMP) ## fail if a ratio is a third below its median in benchmarks/history.jsonl
	@$(BIN)/selfless $(BENCH) --check

RECORDED := results/reproduction
tables: $(STAMP) ## tables and figures of the recorded reproduction, from its JSON
	@$(BIN)/selfless report $(RECORDED) --format md > $(RECORDED)/tables.md
	@$(BIN)/selfless report $(RECORDED) --format latex > $(RECORDED)/tables.tex
	@$(BIN)/selfless report $(RECORDED) --format csv > $(RECORDED)/tables.csv
	@$(BIN)/selfless report $(RECORDED) --format claims > $(RECORDED)/claims.md
	@$(BIN)/selfless report $(RECORDED) --format values > $(RECORDED)/values.md
	@$(BIN)/selfless report $(RECORDED) --figures $(RECORDED)/figures
	@rm $(RECORDED)/figures/*.pdf
	@$(BIN)/selfless report $(RECORDED) --against results/again > results/again/against.md
	@if test -d results/equal; then cd results/equal && \
	  ../../$(BIN)/selfless report . --format md > tables.md && ../../$(BIN)/selfless report . --format claims > claims.md && \
	  ../../$(BIN)/selfless report . --format values > values.md && ../../$(BIN)/selfless report . --figures figures && rm figures/*.pdf && \
	  (../../$(BIN)/selfless report . --split 10 && echo && ../../$(BIN)/selfless report . --split 60) > again.md; fi
	@$(BIN)/python -m selfless.report.results $(RECORDED) results/equal --again ours=results/again/against.md equal=results/equal/again.md > docs/results.md
	@$(BIN)/python docs/recommended.py

clean:          ## remove .venv and caches
	rm -rf $(VENV) $(EXTRAS) $(SITE) $(AUDIT) $(RELEASE) $(PROOF) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
