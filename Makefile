# Every command does its own set-up in .venv. Needed: Python >= 3.10, a C++20 compiler, make.
#
#   make demo       train two models on `neuron` and on `cpu`, compare them, draw plots into demo-output/
#   make demo-distributed   train with FSDP2 on four local ranks
#   make test       lint, C++ tests, Python tests
#   make bench      measure `neuron` against `cpu`
#   make sanitize   C++ tests under the address, undefined-behaviour and thread sanitizers
#   make lint       ruff and clang-format        make format   let them rewrite the files
#   make build      the package alone, installed editable in .venv
#   make docs       the generated documents
#   make clean      remove .venv and build/

PYTHON ?= python3
# The torch to install, with any options of pip. The README says where CPU builds are.
TORCH ?= torch==2.13.0
# Options for pytest, e.g. `make test PYTEST_ARGS="tests/cli -k info"`.
PYTEST_ARGS ?= tests -n 2
# Debian packages that some tests need: installed if this is root on Debian, else those tests are skipped.
SYSTEM_PACKAGES ?= ccache chromium iproute2 libfabric-dev

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# A stamp is an empty file that says a step of the set-up is done.
STAMPS := $(VENV)/stamps
# Another TORCH is another stamp.
TORCH_STAMP := $(STAMPS)/torch-$(word 1,$(shell echo '$(TORCH)' | cksum))
CPP_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h')
CPP_SOURCES := $(shell find csrc -type f) CMakeLists.txt
SANITIZERS := address,undefined thread
comma := ,
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Two compilers at once: more would need more memory than small machines have.
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

.PHONY: build demo demo-distributed test bench sanitize lint format docs clean cpp-test python-test
.DELETE_ON_ERROR:
.NOTPARALLEL:
build: $(STAMPS)/build

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "Python >= 3.10 is needed, this is %d.%d: make PYTHON=/path/to/python3.11" % v[:2])'
	@echo "== making $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	$(PIP) install --upgrade pip
	@touch $@

# The constraint keeps every later step from replacing this torch.
$(TORCH_STAMP): $(STAMPS)/venv
	@echo "== installing $(TORCH)"
	$(PIP) install $(TORCH)
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(VENV)/constraints.txt
	@rm -f $(STAMPS)/torch-* && touch $@

$(STAMPS)/tools: $(TORCH_STAMP)
	@echo "== installing the build tools"
	$(PIP) install -c $(VENV)/constraints.txt cmake ninja 'numpy>=2' pybind11 'scikit-build-core>=0.10'
	@touch $@

$(STAMPS)/system: tools/system-packages
	@mkdir -p $(STAMPS)
	@tools/system-packages $(SYSTEM_PACKAGES)
	@touch $@

# No build isolation: an isolated build would fetch a torch of its own. The build directory stays, so this compiles
# what changed.
$(STAMPS)/build: $(STAMPS)/tools pyproject.toml $(CPP_SOURCES)
	@echo "== building (the first time takes minutes)"
	$(PIP) install -c $(VENV)/constraints.txt --no-build-isolation -e '.[demo,test,lint]'
	@touch $@

demo: build
	$(BIN)/python examples/demo.py

demo-distributed: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=4 examples/train_fsdp.py

test: $(STAMPS)/system lint cpp-test python-test

# Workers share the processors: threads that wait must not spin.
python-test: build
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(PYTEST_ARGS)

# usage: $(call cpp-tests,build directory,cmake options)
define cpp-tests
	$(BIN)/cmake -G Ninja -S . -B $(1) -DNEURON_CPP_TESTS_ONLY=ON $(2) > $(1).log || { cat $(1).log; exit 1; }
	$(BIN)/cmake --build $(1)
	$(BIN)/ctest --test-dir $(1) --output-on-failure
endef

cpp-test: $(STAMPS)/tools
	@mkdir -p build
	$(call cpp-tests,build/cpp,-DCMAKE_BUILD_TYPE=Release)

sanitize: $(SANITIZERS:%=sanitize-%)

# A linker option that names the folder ends at a comma.
sanitize-%: $(STAMPS)/tools
	@mkdir -p build
	$(call cpp-tests,build/sanitize-$(subst $(comma),-,$*),-DCMAKE_BUILD_TYPE=RelWithDebInfo -DNEURON_SANITIZE=$*)

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

docs: build
	$(BIN)/python -m torchneuron env --markdown > docs/environment.md
	$(BIN)/python -m torchneuron ops --markdown > docs/operators.md
	$(BIN)/python -m torchneuron nki isa > docs/isa.md
	$(BIN)/python -m torchneuron nki fidelity > docs/fidelity.md

bench: build
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) build demo-output
