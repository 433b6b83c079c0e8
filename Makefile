# Each target sets up what it needs in $(VENV), once; from then on it works offline.
#
#   make demo     run the main job
#   make pictures draw the pictures of README and of the documentation again
#   make test     run the tests, without those marked heavy or soak; those marked python_core with the core in Python
#   make slow     run the tests marked heavy: they start servers, kill processes or need minutes; those marked alone last,
#                 one by one, and again if they fail; some tests with the lowest versions of the requirements, and with the
#                 loaders of others; and those of core, completion, stream and memory with the other form of the core
#   make test-pythons
#                 run the fast tests, and those of Ctrl-C, on each python3.N that starts here; PYTHONS="…" adds others by path
#   make check    style, types and floors; the wheel as a user meets it; the tables of figures; the drivers and the completion
#                 on the newest other Python that is found here
#   make gpu      run all tests on a GPU: side by side, then those that need it alone, then those that failed again alone;
#                 without make: PYTHONPATH=src python3 -m tests.gpu
#   make bench    run the benchmarks; NAME=h200 writes docs/benchmarks/h200.json and, without ARGS, h200-serving.json
#   make docs     build the documentation into docs/_build/html
#   make build    build wheel and sdist into dist/
#   make wheels   build the sdist, a wheel for each Python that is found here, as an index accepts it, and the pure
#                 wheel into dist/
#   make soak     run on for SECONDS=1800
#   make clean    remove what was built; the environment stays
#
# ARGS="…" is passed to the command of demo, pictures, test, slow, test-pythons, gpu, bench and soak:
# make test ARGS="-x tests/driver".

VENV ?= .venv
# The first interpreter here that is new enough.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
NAME ?= local
SECONDS ?= 1800
ARGS ?=
PYTHONS ?=

BIN := $(abspath $(VENV))/bin
WHEELS := $(abspath $(VENV))/aiocuda-wheels
OTHER := $(abspath $(VENV))/aiocuda-other-python
LOWEST := $(abspath $(VENV))/aiocuda-lowest
LOADERS := $(abspath $(VENV))/aiocuda-loaders
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder
# Makes the targets that follow it, two at a time. After a failure, no other target begins.
SIDE_BY_SIDE = $(MAKE) --no-print-directory -j2
# Shows the output of each target at its end. Make before 4.0 mixes the outputs.
SYNCED := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
# Prints the files that have tests marked alone: they are collected more quickly than all files.
ALONE = $(BIN)/python -c 'from tests.conftest import ALONE; print(*sorted({test.partition("::")[0] for test in ALONE}))'
MEASURING = $(BIN)/python -m pytest -m "alone and not soak" --timeout 900
# After a command: shows its output at its end.
AT_END = >$(VENV)/aiocuda-$@.log 2>&1; status=$$?; cat $(VENV)/aiocuda-$@.log; exit $$status
# The short ones first, then the longest.
CHECKS := $(addprefix check-,style format floors figures wheel types other-python types-darwin names types-win32)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Some containers set it. Each of the many processes of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# A stamp holds for this directory and for what pyproject.toml says before its first [tool.…] table: what is required.
# A time stamp would call for a new installation after each checkout, and would not notice that another clone has been
# installed into the same environment.
KEY := $(firstword $(shell { pwd; sed '/^\[tool\./,$$d' pyproject.toml; } | cksum))
stamp = $(VENV)/.aiocuda-$(KEY)-$(1)
stamped = @find $(VENV) -maxdepth 1 -name '.aiocuda-*' ! -name '*-$(KEY)-*' -exec rm {} + && touch $@

.DEFAULT_GOAL := test
.PHONY: demo pictures test slow gpu test-pythons check bench docs build wheels soak clean core
.PHONY: slow-heavy slow-lowest slow-loaders slow-core $(CHECKS)

demo: $(or $(wildcard $(call stamp,dev)),$(call stamp,demo))
	$(BIN)/aiocuda demo $(ARGS)

pictures: $(call stamp,dev)
	$(BIN)/python -m tests.pictures $(ARGS)

# Compiled again only after an edit. Without a compiler, the core in Python is used.
core: $(call stamp,dev)
	@$(BIN)/python -m aiocuda._core.build --if-possible >/dev/null

# The files whose tests have the mark python_core name it: the second run collects no others.
test: core
	$(BIN)/python -m pytest -m "not heavy and not soak and not alone$(if $(ARGS),, and not python_core)" $(IN_TWO) --timeout 600 $(ARGS)
	$(if $(ARGS),,AIOCUDA_CORE=python $(BIN)/python -m pytest -m "python_core and not heavy and not soak and not alone" $(IN_TWO) --timeout 600 \
		$$(grep -rl python_core tests --include='test_*.py'))

# The tests marked alone measure times: nothing runs beside them. Other programs on this machine may, so those that fail
# run once more, and both results are shown.
slow: core
	+@$(SIDE_BY_SIDE) slow-heavy $(if $(ARGS),,slow-core slow-lowest slow-loaders)
	$(if $(ARGS),,$(MEASURING) $$($(ALONE)) || $(MEASURING) --last-failed --last-failed-no-failures none $$($(ALONE)))

# Three processes keep two processors busy: these tests often wait.
slow-heavy: core
	$(BIN)/python -m pytest -m "heavy and not soak and not alone" -n 3 --dist loadfile --no-loadscope-reorder --timeout 900 $(ARGS)

slow-lowest: $(call stamp,dev)
	@$(BIN)/python -m tests.lowest $(LOWEST) $(AT_END)

slow-loaders: $(call stamp,dev)
	@$(BIN)/python -m tests.other_loaders $(LOADERS) $(AT_END)

slow-core: core
	@$(BIN)/python -m tests.other_core tests/core tests/completion tests/stream tests/memory -m "not heavy and not soak and not alone" --timeout 600 -q $(AT_END)

gpu: core
	$(BIN)/python -m tests.gpu $(ARGS)

test-pythons: $(call stamp,dev)
	$(BIN)/python -m tests.other_python all $(OTHER) $(PYTHONS) --pytest="$(ARGS)"

check: $(call stamp,dev) $(call stamp,wheels) $(call stamp,other)
	+@$(SIDE_BY_SIDE) $(SYNCED) $(CHECKS)

check-style: $(call stamp,dev)
	$(BIN)/ruff check .

check-format: $(call stamp,dev)
	$(BIN)/ruff format --check .

check-floors: $(call stamp,dev)
	$(BIN)/lint-imports --no-logo
	$(BIN)/lint-imports --no-logo --config tests/project/core.importlinter

check-figures: $(call stamp,dev)
	$(BIN)/python -m tests.benchmarks.readme --check

check-wheel: $(call stamp,dev) $(call stamp,wheels)
	$(BIN)/python -m tests.typing.wheel --wheels $(WHEELS)

check-types: $(call stamp,dev)
	$(BIN)/mypy

# What the host driver needs, as other systems' standard libraries have it. The cuda driver is for Linux.
check-types-darwin check-types-win32: check-types-%: $(call stamp,dev)
	$(BIN)/mypy src --exclude /driver/cuda/ --follow-imports silent --platform $* --cache-dir .mypy_cache/$*

check-names: $(call stamp,dev)
	$(BIN)/python -m tests.project.collecting

check-other-python: $(call stamp,dev) $(call stamp,other)
	$(BIN)/python -m tests.other_python run $(OTHER)

bench: $(call stamp,dev) $(call stamp,bench)
	@mkdir -p docs/benchmarks
	$(BIN)/python -m tests.benchmarks --json docs/benchmarks/$(NAME).json $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.load --json docs/benchmarks/$(NAME)-serving.json)

docs: $(call stamp,docs)
	AIOCUDA_CORE=python $(BIN)/python -m sphinx --quiet --builder html --fail-on-warning --keep-going --fresh-env docs docs/_build/html

build: $(call stamp,dev)
	$(BIN)/python -m build --no-isolation --outdir dist

wheels: $(call stamp,dev)
	$(BIN)/python -m tests.wheels dist

soak: core
	AIOCUDA_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.other_core -m "not soak and not alone" $(IN_TWO) --timeout 300 -q)

clean:
	rm -rf src/aiocuda/_core/_compiled*.so dist docs/_build .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard src tests examples docs) -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "aiocuda needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"aiocuda needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0])'
	@echo "Creating the environment $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv $(VENV)

# Not quiet: pip shows each package while it is downloaded and installed.
$(call stamp,demo): | $(BIN)/python
	@echo "Installing aiocuda and the packages that it needs into $(VENV). The first time, this takes about a minute."
	@$(BIN)/python -m pip install --editable '.[cli]'
	$(stamped)

# pip knows dependency groups from 25.1 on.
$(call stamp,dev): | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable '.[cli,testing]' --group dev
	$(stamped)

# The services beside which tests/load measures ours.
$(call stamp,bench): $(call stamp,dev)
	$(BIN)/python -m pip install --quiet --group bench
	$(stamped)

# The wheels of the requirements are for `make check`, which installs into empty environments each time it runs.
$(call stamp,wheels): $(call stamp,dev)
	rm -rf $(WHEELS)
	AIOCUDA_BUILD=python $(BIN)/python -m pip wheel --quiet --no-build-isolation --wheel-dir $(WHEELS) '.[cli,testing]' hatchling
	rm $(WHEELS)/aiocuda-*.whl
	$(stamped)

$(call stamp,other): $(call stamp,dev)
	$(BIN)/python -m tests.other_python prepare $(OTHER)
	$(stamped)

$(call stamp,docs): | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(stamped)
