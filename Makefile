# make demo: train a model from a fresh checkout. make test: checks and tests. make docs: the documentation as a site.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test torture check docs browser lock audit clean

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

# The whole campaign against faults, of which make test runs a slice; its counts are in docs/reliability.md.
# SHARE=0.25 makes a quarter of the cases, ATTACKS=tests/torture/test_kills.py only some of the attacks.
SHARE ?= 1
ATTACKS ?= tests/torture
torture: $(READY)
	NEARKIN_TORTURE=$(SHARE) NEARKIN_TORTURE_RESULTS=benchmarks/results/torture.json OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n 2 $(ATTACKS)
	$(BIN)/python -m tools.docs

# Renew constraints.txt with the newest versions that fit, PyTorch excepted; run make test before you commit it.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	grep -E '^torch(vision)?==' constraints.txt > build/lock/torch.txt
	build/lock/bin/python -m pip install --quiet --constraint build/lock/torch.txt '.[dev]'
	head -1 constraints.txt > build/constraints.txt
	build/lock/bin/python -m pip freeze --exclude nearkin | sed 's/+cpu//' | LC_ALL=C sort -f >> build/constraints.txt
	mv build/constraints.txt constraints.txt

# Look the pinned versions up among known vulnerabilities. This needs a service on the internet, so it is no test.
audit:
	rm -rf build/audit && $(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	@build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip > build/audit/log 2>&1; code=$$?; \
		cat build/audit/log; if grep -qE 'ConnectionError|ServiceError|Max retries|could not be audited' build/audit/log; then \
		echo "The service that knows vulnerabilities cannot be reached, or does not know these packages: what it could not look up was not checked."; fi; exit $$code

clean:
	rm -rf $(VENV) runs/demo site
