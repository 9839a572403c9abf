# Each target makes what it needs in .venv and .nox, from nothing but Python >= 3.11 with venv.
#   PYTHON=python3.12   the interpreter to make them with
#   ARGS="-k uneven"    passed on to the session: pytest's or the example's arguments

PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types plugin clean

# Nothing comes from outside the environments made here.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE := 1

help:
	@echo "make demo    train the example on two processes of this machine"
	@echo "make test    all tests"
	@echo "make lint    style and likely bugs"
	@echo "make types   type annotations"
	@echo "make plugin  a backend from outside: installed, held to the contract, trained with"
	@echo "make clean   delete the environments and what was built"
	@echo
	@echo 'ARGS="..." is passed on, e.g. make test ARGS="-k uneven -x"'
	@echo ".venv/bin/nox --list shows every session"

demo: .venv/ready
	.venv/bin/nox -s demo -- $(ARGS)

test: .venv/ready
	.venv/bin/nox -s tests -- $(ARGS)

lint: .venv/ready
	.venv/bin/nox -s lint -- $(ARGS)

types: .venv/ready
	.venv/bin/nox -s types -- $(ARGS)

plugin: .venv/ready
	.venv/bin/nox -s plugin

.venv/ready: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "polyshard needs Python 3.11 \
	or newer and $(PYTHON) is %d.%d; name another: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt nox
	@touch $@

clean:
	rm -rf .venv .nox dist packages/*/build packages/*/src/*.egg-info
	rm -rf examples/third_party_backend/build examples/third_party_backend/src/*.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache packages/*/.ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
