# From nothing to a trained model (make demo) or to green tests (make test), in an environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test check browser clean

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

# The pages are tested in a real browser: Debian's, put there where that needs no password; without one they are skipped.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium; } \
		|| echo "There is no chromium: tests in a browser will be skipped."

test: check browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

clean:
	rm -rf $(VENV) runs/demo
