# make demo   install into .venv and go from raw text to a served model; make demo ISA=avx2 as on a processor without AVX-512
# make test   install with the test tools and run the tests that take seconds, with one process more than cores (TEST_PROCESSES=N for
#             another number); ends with the ten slowest tests, the wall time and the CPU time, and fails where that is above its limit
# make test-slow  the others, which are marked `slow`: layouts, kills, whole runs, measurements, with twice as many processes
#             as cores; where the processor has AVX-512, the tests of numerics run a second time as on one with AVX2 alone
# make test-all   both
# make coverage  the same with the share of lines in src/modelwright that were run: 40% more CPU time on Python 3.11,
#             so not a part of make test; lines that only processes of their own run do not count
# make docs   build the documentation into build/site, with warnings as errors
# make wheel-check  build the wheels, and try them in empty environments: without extras, and with all of them
# make lint   formatting, types, import layers
# make bench  the rows of docs/performance.md: training, fine-tuning, engines, serving and cleaning next to others, some of
#             which get environments of their own, and llama.cpp's server is compiled; it says its minutes first. make bench ISA=avx2 times a newer processor
#             as one with AVX2 alone (or ISA=x86-64); ARGS and TUNING_ARGS are options of peers.py and tuning_peers.py; records go to BENCH=bench-here
# make parity every parallel layout against one process
# make prove  measure every claim (about 20 hours; it resumes) into claims-here; make prove QUICK=1 for the short
#             form; make loading-peers before it gives litData and mosaicml-streaming an environment of their own, and the claim loading_latency then has them beside ours;
#             make reader-peers does so for TRL, LLaMA-Factory and Axolotl, and the claim silent_errors
# make gpu-check  on a CUDA machine with torch installed: parity tests and speed figures, nothing is downloaded

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# The packages built onto this one, in editable form: every folder of packages/.
PROJECTS := $(sort $(wildcard packages/*/pyproject.toml))
PACKAGES := $(PROJECTS:/pyproject.toml=)
EDITABLE := $(PACKAGES:%=-e %)
empty :=
comma := ,
space := $(empty) $(empty)
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq
# Where uv is installed, it installs the versions of uv.lock; `make UV=` installs with pip and constraints.txt.
UV ?= $(shell command -v uv 2>/dev/null)
# The build of torch is chosen below, and on a machine without a GPU nothing for one is installed.
LEAVE := $(if $(UV),$(shell sed -n 's/^name = "\(torch\|triton\|nvidia-[^"]*\|cuda-[^"]*\)"$$/--no-install-package \1/p' uv.lock | sort -u))
install = $(if $(UV),UV_PROJECT_ENVIRONMENT=$(abspath $(VENV)) $(UV) sync -q --frozen --inexact --all-packages \
	$(addprefix --extra ,$(1)) $(if $(shell command -v nvidia-smi),--no-install-package torch,$(LEAVE)),$(PIP) -c constraints.txt -e '.[$(subst $(space),$(comma),$(1))]' $(EDITABLE))
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
RECIPE ?= quickstart
ARGS ?=
TUNING_ARGS ?=
BENCH ?= bench-here
ISA ?=
STARTED := $(shell date +%s)
TORCH_INDEX ?=
TEST_PROCESSES ?= auto
# A file stays on one process, because its tests share fixtures; tests/longest_first.py has the slowest files begin first.
# Bytecode is kept whatever the environment says, because many tests start interpreters: each takes 0.5 s less of a core.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest \
	--numprocesses $(TEST_PROCESSES) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# An older instruction set for every library of the programs that follow.
WITH_ISA := $(if $(ISA),env MODELWRIGHT_ISA=$(ISA) $$(MODELWRIGHT_ISA=$(ISA) $(BIN)/python -m modelwright.core.print_environment))
# What a processor without AVX-512 and BF16 computes differently: not threads, memory, decisions, Triton, NumPy and Pillow.
ISA_TESTS := $(filter-out $(foreach part,ops/test_kernel_team ops/test_tensor_heap ops/test_triton_quantize \
	ops/test_microbenchmark ops/test_image_augment ops/test_sparse_code train/precision/test_adaptive \
	train/precision/test_loss_scale,tests/$(part).py), \
	$(wildcard tests/ops/test_*.py tests/train/precision/test_*.py)) \
	tests/parallel/test_gather_formats.py tests/parallel/test_tensor.py \
	tests/train/memory/test_checkpointing.py tests/train/test_wired_precision.py tests/serve/test_openvino.py
# Single tests of these files for which the same holds, by parts of their names.
ISA_LEFT_OUT := not build_at_once and not for_a_reason and not amid_a_look and not decide_alike and not tolerable_everywhere
HAS_AVX512 := $(shell grep -qsw avx512f /proc/cpuinfo && echo yes)

.PHONY: demo test test-slow test-all coverage docs wheel-check lint bench loading-peers reader-peers prove parity gpu-check clean

demo: $(VENV)/.installed
	@echo "time     $$(($$(date +%s) - $(STARTED))) s: installation"
	$(WITH_ISA) $(BIN)/modelwright run $(RECIPE) $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" $(ARGS)

# The second pass runs whatever the first one found, and the target fails where either does.
test-slow: $(VENV)/.installed-dev
	@set -x; code=0; $(PYTEST) -m slow $(ARGS) || code=$$?; \
	$(if $(HAS_AVX512),$(if $(ARGS),,MODELWRIGHT_ISA=avx2 $(PYTEST) $(ISA_TESTS) -k "$(ISA_LEFT_OUT)" || code=$$?;)) \
	exit $$code

test-all:
	@code=0; $(MAKE) test || code=$$?; $(MAKE) test-slow || code=$$?; exit $$code

coverage: $(VENV)/.installed-dev
	$(PYTEST) --cov --cov-report= $(ARGS)
	$(BIN)/coverage report --skip-covered --sort=miss

docs: $(VENV)/.installed-docs
	OMP_NUM_THREADS=1 $(BIN)/python docs/build.py $(ARGS)

wheel-check: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/wheel_check.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.installed-peers $(BIN)/llama-server .venv-trl/.ready .venv-trl-ppo/.ready .venv-cleaning/.ready
	@$(BIN)/python benchmarks/performance.py --minutes
	$(WITH_ISA) $(BIN)/python benchmarks/peers.py --compute fp32 bf16 --results $(BENCH) $(ARGS)
	$(WITH_ISA) $(BIN)/python benchmarks/tuning_peers.py --trl .venv-trl/bin/python \
		--trl-ppo .venv-trl-ppo/bin/python --results $(BENCH) $(TUNING_ARGS)
	$(WITH_ISA) $(BIN)/modelwright prove int8 serving_qps --results $(BENCH)
	$(WITH_ISA) $(BIN)/python benchmarks/cleaning_peers.py --peers .venv-cleaning/bin/python --results $(BENCH)
	$(BIN)/python benchmarks/performance.py --results $(BENCH)

loading-peers: .venv-loading/.ready

# Each of the three wants other versions of transformers and datasets. Where one cannot be installed, the others still are.
reader-peers:
	@code=0; for one in trl llamafactory axolotl; do $(MAKE) .venv-$$one/.ready || code=$$?; done; exit $$code

prove: $(VENV)/.installed
	$(BIN)/modelwright prove --all $(if $(QUICK),--quick) $(ARGS)

# Every parallel layout against one process; writes docs/parallel.md.
parity: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parity.py --page docs/parallel.md $(ARGS)

gpu-check:
	PYTHONPATH=src:$(subst $(space),:,$(PACKAGES))$${PYTHONPATH:+:$$PYTHONPATH} python3 benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-trl .venv-trl-ppo .venv-llamafactory .venv-axolotl .venv-loading .venv-cleaning build dist src/*.egg-info $(PACKAGES:%=%/build) $(PACKAGES:%=%/*.egg-info) .pytest_cache .ruff_cache .coverage .import_linter_cache

# A CPU-only Linux machine wants the CPU build of torch: the default one brings gigabytes of CUDA libraries with it.
# Where pip knows no "+cpu" build, TORCH_INDEX names the package index that has it; without one the default is taken.
$(VENV)/.torch: constraints.txt
	@test -n "$(PYTHON)" || { echo "Modelwright needs Python 3.11 or newer with the venv module"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25,<26.2'  # pip 23, which Python 3.11 brings, resolves five times as long
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "torch==$(TORCH)+cpu" 2>/dev/null || \
		$(PIP) -c constraints.txt torch; \
	else \
		$(PIP) -c constraints.txt torch; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(PROJECTS)
	$(call install,all)
	@touch $@

# `all` by its name, although dev contains it: uv does not follow extras of extras that have conflicts.
# With what builds the documentation: two small packages, where a second installation would take a minute of a core.
$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml $(PROJECTS)
	$(call install,all dev docs)
	@touch $@ $(VENV)/.installed $(VENV)/.installed-docs

$(VENV)/.installed-docs: $(VENV)/.torch pyproject.toml $(PROJECTS)
	$(PIP) -c constraints.txt -e '.[docs]' $(EDITABLE)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-peers: $(VENV)/.torch pyproject.toml $(PROJECTS)
	$(PIP) -c constraints.txt -e '.[peers]' $(EDITABLE) -e 'packages/claims[peers]'
	@touch $@ $(VENV)/.installed

# llama.cpp's server of the version that llama-cpp-python brings, from that package's source: seven minutes of two cores.
$(BIN)/llama-server: $(VENV)/.installed-peers
	rm -rf build/llama && mkdir -p build/llama
	$(PIP) 'cmake>=3.28,<5'
	$(BIN)/python -m pip download --disable-pip-version-check -qq --no-deps --no-binary llama-cpp-python --dest build/llama \
		"llama-cpp-python==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("llama-cpp-python"))')"
	tar -xzf build/llama/llama_cpp_python-*.tar.gz --strip-components=1 -C build/llama
	PATH="$(abspath $(BIN)):$$PATH" cmake -S build/llama/vendor/llama.cpp -B build/llama/out -DCMAKE_BUILD_TYPE=Release \
		-DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF
	PATH="$(abspath $(BIN)):$$PATH" cmake --build build/llama/out --parallel 2 --target llama-server
	install build/llama/out/bin/llama-server $@

# TRL 1.12 is the last that has PPO. Both get the torch of constraints.txt. TRL imports requests for GRPO and does not name it;
# transformers 5.24 no longer brings it.
.venv-trl/.ready .venv-trl-ppo/.ready: constraints.txt
	$(MAKE) VENV=$(@D) $(@D)/.torch
	$(@D)/bin/python -m pip install --disable-pip-version-check -qq -c constraints.txt peft requests \
		$(if $(findstring ppo,$@),'trl==1.12.*',trl)
	@touch $@

# It imports torchaudio, whose build on the package index does not load next to a CPU build of torch; so 7 GB.
.venv-llamafactory/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -qq 'llamafactory>=0.9.5,<0.10'
	@touch $@

.venv-axolotl/.ready: constraints.txt
	$(MAKE) VENV=$(@D) $(@D)/.torch
	$(@D)/bin/python -m pip install --disable-pip-version-check -qq 'torch==$(TORCH)' 'axolotl>=0.19'
	@touch $@

.venv-cleaning/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -qq 'datatrove[processing]' spacy datasketch presidio-analyzer
	@touch $@

# Not in .venv: mosaicml-streaming wants older versions of numpy and transformers than constraints.txt has.
.venv-loading/.ready: constraints.txt
	$(MAKE) VENV=$(@D) $(@D)/.torch
	$(@D)/bin/python -m pip install --disable-pip-version-check -qq 'torch==$(TORCH)' \
		'litdata>=0.2.76,<0.3' 'mosaicml-streaming>=0.13,<0.14'
	@touch $@
