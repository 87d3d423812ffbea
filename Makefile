# make demo: train a model from a fresh checkout. make test: checks and tests. make docs: the documentation as a site.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test check docs browser clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/nearkin train --out runs/demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site starts at site/index.html."

# The pages are tested in a browser. Debian's chromium is installed where that needs no password; otherwise those tests are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium; } \
		|| echo "There is no chromium: tests in a browser will be skipped."

test: check browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV) runs/demo site
