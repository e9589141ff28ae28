# The tests and the benchmarks: included by the Makefile, whose variables it uses. tests/README.md says what
# each folder of tests is for.

# ---- programs for tests alone ---------------------------------------------------------------------

# The same without SentencePiece, zlib and libzstd, for its test.
$(B)/pkmserve-ids: $(call obj,server/main.c server/none/serve.c server/none/codec.c) $(B)/server/parts.a $(ENGINE_IDS_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -ljansson -lm

# ---- the check on a GPU --------------------------------------------------------------------------

.PHONY: gpu-kit gpu-programs check-gpu
gpu-kit: ## gather into build/gpu-kit what a bare GPU machine lacks
	@CC="$(CC)" .ci/gpu-kit build/gpu-kit

# What tests/gpu/check.py runs; it builds them itself, in a folder of its own.
GPU_PROGRAMS := $(addprefix $(B)/,pkmserve pkmserve-engine tests/gpu/forward tests/kernels/run_check tests/bench/bench_device \
    tests/bench/make_model)
gpu-programs: $(GPU_PROGRAMS) # for a rehearsal, and its test
check-gpu: ## on a machine with a GPU: build, check, measure, write a report (8 minutes; PART=right|fast|rest|serve|cores)
	@$(if $(filter file,$(origin PYTHON)),python3,$(PYTHON)) tests/gpu/check.py $(if $(PART),--part $(PART)) $(CHECK_GPU)

# What a GPU would do, counted without one: what the double is asked to launch, and what ptxas says of the kernels.
# GPU_COUNT="--write kernels/cuda/COUNT.md" renews the table there.
.PHONY: gpu-count
GPU_COUNT_ARCH ?= 90 100
GPU_COUNT_USAGE := $(if $(NVCC),$(foreach arch,$(GPU_COUNT_ARCH),$(patsubst %.cu,$(B)/gpu-count/sm_$(arch)/%.usage,\
    $(wildcard kernels/cuda/*.cu))))
gpu-count: cuda-host $(B)/tests/bench/bench_device $(GPU_COUNT_USAGE) ## count a GPU's launches, bytes, registers; no GPU needed
	@$(PYTHON) tests/gpu/count.py --build $(B) --arch "$(GPU_COUNT_ARCH)" $(GPU_COUNT)
define GPU_COUNT_RULE
$(B)/gpu-count/sm_$(1)/%.ptx: %.cu
	@mkdir -p $$(@D)
	$$(call say,ptx)
	$$(Q)$$(NVCC) $$(filter-out -lineinfo --compress-mode=size,$$(filter-out $$(CUDA_CODE),$$(NVCC_FLAGS))) \
	    -arch=compute_$(1) -ptx -MMD -MP -o $$@ $$<
$(B)/gpu-count/sm_$(1)/%.usage: $(B)/gpu-count/sm_$(1)/%.ptx
	$$(Q)$$(dir $$(NVCC))ptxas -arch=sm_$(1) -O3 -v $$< -o /dev/null >$$@.new 2>&1 && mv $$@.new $$@
.PRECIOUS: $(B)/gpu-count/sm_$(1)/%.ptx
endef
$(foreach arch,$(GPU_COUNT_ARCH),$(eval $(call GPU_COUNT_RULE,$(arch))))

# ---- tests -------------------------------------------------------------------------------------

# C tests: tests/<layer>/test_*.c, one cmocka program each, linked with the layers it may include.
TEST_SRC := $(wildcard tests/*/test_*.c)
TEST_BIN := $(TEST_SRC:%.c=$(B)/%)
# Fuzz targets: tests/fuzz/fuzz_*.c. With gcc each is a program that replays its corpus.
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_BIN := $(FUZZ_SRC:%.c=$(B)/%)
BENCH_BIN := $(patsubst %.c,$(B)/%,$(wildcard tests/bench/bench_*.c) tests/bench/make_model.c)

# Without optimization the tests are compiled in a third of the time, and take as long to run: what they call is
# optimized. The kernels' checker, which computes much itself, and the benchmarks are too.
$(call obj,$(TEST_SRC) $(FUZZ_SRC)): CFLAGS += -O0

# The kernel tests share the checker.
CHECK_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard tests/kernels/check*.c))
$(B)/tests/kernels/test_%: $(B)/tests/kernels/test_%.o $(CHECK_OBJ) $(KERNEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka -lm
$(B)/tests/kernels/run_check: $(B)/tests/kernels/run_check.o $(CHECK_OBJ) $(KERNEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lm
# A library that test_backend must refuse.
$(B)/tests/kernels/test_backend: | $(B)/tests/kernels/other_version.so
$(B)/tests/kernels/other_version.so: tests/kernels/other_version.c
	@mkdir -p $(@D)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -fPIC -shared -o $@ $<
$(B)/tests/models/test_%: $(B)/tests/models/test_%.o $(MODEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka -ljansson -lm
$(B)/tests/engine/test_%: $(B)/tests/engine/test_%.o $(ENGINE_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka $(LDLIBS_ENGINE)
$(B)/tests/server/test_%: $(B)/tests/server/test_%.o $(SERVER_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka $(LDLIBS_SERVER)
$(B)/tests/fuzz/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(B)/tests/fuzz/replay.o $(SERVER_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) $(LDLIBS_SERVER)
$(B)/tests/bench/%: $(B)/tests/bench/%.o $(MODEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -ljansson -lm
$(B)/tests/bench/bench_tokenizer: $(B)/tests/bench/bench_tokenizer.o $(ENGINE_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) $(LDLIBS_ENGINE)
$(B)/tests/bench/make_model: $(B)/tests/bench/model_plan.o
$(B)/tests/gpu/forward: $(B)/tests/gpu/forward.o $(MODEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -ljansson -lm
# The model's forward with weights of its own making: no files, hence no JSON and no models/tensors.c.
$(B)/tests/bench/bench_device: $(patsubst %,$(B)/tests/bench/%.o,bench_device device_ops device_memory random_model \
    model_plan) $(B)/server/cli/bench_cost.o \
    $(patsubst %,$(B)/models/%.o,adaptive arena kv_cache loader loader_tables memory model output pkm_transformer store) \
    $(KERNEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lm
.PRECIOUS: $(B)/%.o

.PHONY: tests test deps-test test-asan test-tsan
tests: $(B)/pkmserve $(TEST_BIN) $(FUZZ_BIN) $(BENCH_BIN) $(GPU_PROGRAMS) $(B)/pkmserve-ids # builds them all, runs none

# With CFLAGS=-fsyntax-only: what another compiler says of the tests, without their objects and programs.
.PHONY: test-objects
test-objects: $(call obj,$(wildcard tests/*/*.c tests/*/*.cc))

deps-test:
	@.ci/deps build test

TEST_JOBS ?= 2 # areas of tests side by side
# Each variant is a make of its own, so that its objects live in a folder of their own.
test: deps-test ## build and run every test
	@$(MAKE) --no-print-directory tests
	@TEST_JOBS=$(TEST_JOBS) PYTHON=$(PYTHON) tests/run.sh $(B)

# Where threads of the server meet; what one thread parses and prints is left to the other variants.
TSAN_SERVER := server/test_bits.py server/test_life.py server/test_stream.py

# What it is slow at and other tests of it cover is left out: the checker's own tests, the orders of the double's
# threads, whole forwards of the demo model, the engine on the reference backend, whose ops the kernels' tests run.
# Tests of single CUDA kernels, and of models on them, whose ops the checker runs, and of hundreds of megabytes of JSON are for
# releases (ASAN_ALL=1).
ASAN_ALL ?=
ASAN_LEFT_OUT := test_checker test_cuda_linear \
    $(if $(ASAN_ALL),,test_cuda_attention test_cuda_attention_mma test_cuda_rounded test_cuda_split)
ASAN_KERNELS := $(filter-out $(ASAN_LEFT_OUT:%=kernels/%),$(patsubst tests/%.c,%,$(wildcard tests/kernels/test_*.c)))
ASAN_MODELS := $(filter-out models/test_parity $(if $(ASAN_ALL),,models/test_cuda_model models/test_json_file), \
    $(patsubst tests/%.c,%,$(wildcard tests/models/test_*.c)))
ASAN_SERVER := $(basename $(wildcard tests/server/test_*.c)) \
    $(filter-out %/test_cuda.py $(addprefix tests/,$(TSAN_SERVER)),$(wildcard tests/server/test_*.py)) \
    tests/cli/test_options.py
ASAN_SERVER := $(ASAN_SERVER:tests/%=%)
ASAN_PROGRAMS := pkmserve $(addprefix tests/,$(ASAN_KERNELS) $(ASAN_MODELS) $(filter engine/% server/%,\
    $(patsubst tests/%.c,%,$(TEST_SRC))) $(patsubst tests/%.c,%,$(FUZZ_SRC)))
test-asan: deps-test ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) -s --no-print-directory $(SIMD_OBJ)
	@$(MAKE) --no-print-directory $(addprefix $(B)/asan/,$(ASAN_PROGRAMS)) cuda-host B=$(B)/asan BARE=$(B) \
	    SANITIZE=address,undefined OPT="-O1 -g1" SIMD_OPT="-O1 -g1"
	@TEST_DEVICE=cpu TEST_FEW=1 CHECK_ORDER=random CHECK_PERCENT=2 TEST_JOBS=$(TEST_JOBS) PYTHON=$(PYTHON) \
	    tests/run.sh $(B)/asan $(ASAN_KERNELS) $(ASAN_MODELS) engine $(ASAN_SERVER) fuzz

TSAN_KERNELS  := kernels/test_pool kernels/test_kernels kernels/test_cuda_fuse kernels/test_cuda_search kernels/test_cuda_attention_mma
TSAN_ENGINE   := $(filter-out engine/test_tokenizer%,$(patsubst tests/%.c,%,$(wildcard tests/engine/test_*.c)))
TSAN_PROGRAMS := pkmserve $(addprefix tests/,$(TSAN_KERNELS) $(TSAN_ENGINE))
# Tests of the double's kernels that are short, and some cases of each op, by a seed whose cases are small: on the CUDA
# double, where a missing barrier is a race in any order, and on two of the CPU's instruction sets. All sets share the work
# out to threads by the same functions, so of kernels/cpu/simd the plain set's files are watched alone, but for releases
# (TSAN_ALL=1). By clang 14, whose ThreadSanitizer takes a fifth of the time of gcc 12's there.
TSAN_ALL ?=
test-tsan: deps-test ## the threaded tests and the CUDA kernels under ThreadSanitizer
	@.ci/deps lint
	@$(MAKE) -s --no-print-directory $(SIMD_OBJ)
	@$(MAKE) --no-print-directory $(addprefix $(B)/tsan/,$(TSAN_PROGRAMS)) cuda-host B=$(B)/tsan BARE=$(B) \
	    $(if $(TSAN_ALL),,WATCHED=plain) \
	    CC=clang CXX=clang++ SANITIZE=thread OPT="-O1 -g1" SIMD_OPT="-O1 -g1"
	@PKMSERVE_THREADS=2 TEST_DEVICE=cpu TEST_FEW=1 CHECK_BACKEND="cpu-plain cpu-amx cuda" CHECK_ORDER=forward CHECK_PERCENT=5 CHECK_SEED=80 TEST_JOBS=$(TEST_JOBS) PYTHON=$(PYTHON) \
	    tests/run.sh $(B)/tsan $(TSAN_KERNELS) $(TSAN_ENGINE) $(TSAN_SERVER)

# ---- fuzzing -------------------------------------------------------------------------------------

.PHONY: fuzz
fuzz: ## run each fuzz target for FUZZ_SECONDS (60) with libFuzzer
	@.ci/deps build lint
	@$(MAKE) --no-print-directory fuzz-build B=$(B)/fuzz CC=clang CXX=clang++ OPT="-O1 -g" \
	    SANITIZE=fuzzer-no-link,address,undefined
	@tests/fuzz/run.sh $(B)/fuzz $(FUZZ_SECONDS)

.PHONY: fuzz-build
fuzz-build: $(FUZZ_SRC:%.c=$(B)/%.libfuzzer)
$(B)/tests/fuzz/fuzz_%.libfuzzer: $(B)/tests/fuzz/fuzz_%.o $(SERVER_OBJ)
	$(call say,link)
	$(Q)$(CXX) $(CXXFLAGS_ALL) -fsanitize=fuzzer -o $@ $^ $(LDFLAGS) $(LDLIBS_SERVER)

# ---- in containers -------------------------------------------------------------------------------

CHECK_REQUESTS ?= 10000

.PHONY: check-containers
check-containers: all ## image, two replicas behind HAProxy and nginx, restarts and a kill under load
	@PKMSERVE=$(B)/pkmserve $(PYTHON) tests/docker/check.py --requests $(CHECK_REQUESTS)

# ---- measuring ---------------------------------------------------------------------------------

.PHONY: bench bench-papers
# BENCH="torch llama dense sparse isa start host http" names tables of tests/bench/compare.py; BENCH_TORCH, a Python with
# PyTorch, and BENCH_LLAMA, llama.cpp's llama-batched-bench, beside which its other programs are, name what is not on the path.
BENCH ?=
bench: all $(BENCH_BIN) ## measure a full-size model with random weights, beside PyTorch and llama.cpp
	$(if $(BENCH),,@tests/bench/run.sh $(B))
	@$(PYTHON) tests/bench/compare.py --build $(B) $(BENCH)

# One table each: table4 figure4 figure6 counts; chart draws what was measured. tests/bench/papers.py --help.
PAPERS ?= table4 figure4 figure6 counts chart
bench-papers: $(B)/tests/bench/bench_device ## the product-key paper's tables measured here (PAPERS="table4 chart")
	@$(PYTHON) tests/bench/papers.py --build $(B) $(PAPERS)

# Beside the Python package `tokenizers`, which BENCH_PYTHON must have; TEXT names the texts.
BENCH_PYTHON ?= $(PYTHON)
TEXT ?=
.PHONY: bench-tokenizer
bench-tokenizer: $(B)/tests/bench/bench_tokenizer ## byte-level BPE beside the package tokenizers (BENCH_PYTHON, TEXT)
	@$(BENCH_PYTHON) tests/bench/tokenizer.py --build $(B) $(TEXT)

# In Debian's Chromium; not in .ci/run.
.PHONY: check-page screenshots
check-page: all $(B)/tests/bench/make_model ## the web page in a headless Chromium, used as a person uses it
	@.ci/deps page
	@B=$(B) PKMSERVE=$(B)/pkmserve $(PYTHON) -m pytest -q -rs -p no:cacheprovider tests/page
screenshots: all ## draw the README's pictures of the web page
	@.ci/deps page
	@PKMSERVE=$(B)/pkmserve $(PYTHON) tests/page/screenshots.py

.PHONY: stress soak check-clients check-hf check-ray check-chart
stress: all ## overload, 256 streams, slow readers, scoring beside generations; prints Markdown tables
	@PKMSERVE=$(B)/pkmserve $(PYTHON) tests/bench/stress.py overload streams slow bulk --seconds $(STRESS_SECONDS)
soak: all ## an hour of everything at once (SOAK_SECONDS=3600): no error, no growth
	@PKMSERVE=$(B)/pkmserve $(PYTHON) tests/bench/stress.py soak --seconds $(SOAK_SECONDS)

# Everything there is, an hour and a half of it; needs root for the containers and PyPI for the clients.
.PHONY: release-check
release-check: ## what a release must pass: .ci/run, the next Debian, fuzz, clients, containers, the page, stress, five minutes of soak
	.ci/run
	ANALYZER_NODES=225000 $(MAKE) lint
	$(MAKE) test-asan ASAN_ALL=1
	$(MAKE) test-tsan TSAN_ALL=1
	$(MAKE) check-debian fuzz check-clients check-containers check-page stress
	$(MAKE) soak SOAK_SECONDS=300

# Pythons of their own for the clients, which come from PyPI at the versions named there: one for the packages, and
# one for the frameworks, which want other versions of them.
check-clients: all $(B)/clients/bin/pytest $(B)/frameworks/bin/pytest ## the clients that people use, unmodified, against the server
	@PKMSERVE=$(B)/pkmserve $(B)/clients/bin/python -m pytest -q -rs -p no:cacheprovider \
	    --ignore tests/clients/frameworks tests/clients
	@PKMSERVE=$(B)/pkmserve $(B)/frameworks/bin/python -m pytest -q -rs -W ignore -p no:cacheprovider \
	    tests/clients/frameworks
$(B)/clients/bin/pytest: tests/clients/requirements.txt
$(B)/frameworks/bin/pytest: tests/clients/frameworks/requirements.txt
$(B)/ray/bin/pytest: tests/ray/requirements.txt
$(B)/clients/bin/pytest $(B)/frameworks/bin/pytest $(B)/ray/bin/pytest:
	@$(CLIENT_PYTHON) -m venv --clear $(patsubst %/bin/pytest,%,$@)
	@$(@D)/pip install -q -r $<

# Another one, for the transformers package. BENCH_TORCH, a Python that has PyTorch, spares its download.
check-hf: all $(B)/tests/gpu/forward ## fresh random models of the transformers package against the server
	@test -x $(B)/hf/bin/pytest || { $(CLIENT_PYTHON) -m venv $(B)/hf && \
	    $(if $(BENCH_TORCH),$(BENCH_TORCH) -c 'import site; print(site.getsitepackages()[0])' \
	        > $$(echo $(B)/hf/lib/python*/site-packages)/torch.pth &&) \
	    $(B)/hf/bin/pip install -q -r tests/hf/requirements.txt; }
	@PKMSERVE=$(B)/pkmserve B=$(B) $(B)/hf/bin/python -m pytest -q -rs -p no:cacheprovider tests/hf

# Another one, for Ray. SCALE=1 also measures one worker beside two.
check-ray: all $(B)/ray/bin/pytest ## a corpus on a local Ray of two workers, one of which is killed; the lines for Spark
	@PKMSERVE=$(abspath $(B)/pkmserve) $(B)/ray/bin/python -m pytest -q -rs -p no:cacheprovider tests/ray

# The kubernetes package has the classes of Kubernetes' own kinds. CRDS, a folder with the CustomResourceDefinitions of the
# Prometheus operator, KServe, the Gateway API and its inference extension, has the rest; helm is used where it is installed.
check-chart: all ## Helm chart, Job and examples against the schemas that are to be had (CRDS=FOLDER)
	@test -x $(B)/chart/bin/pytest || { $(CLIENT_PYTHON) -m venv $(B)/chart && \
	    $(B)/chart/bin/pip install -q kubernetes jsonschema numpy pyyaml pytest requests; }
	@PKMSERVE=$(abspath $(B)/pkmserve) $(if $(CRDS),CRDS=$(abspath $(CRDS))) PATH=$$PATH:$(abspath build/tools) \
	    $(B)/chart/bin/python -m pytest -q -rs -p no:cacheprovider tests/docker/test_chart.py tests/docker/test_files.py

# ---- on another Debian ---------------------------------------------------------------------------

DEBIAN ?= trixie
.PHONY: check-debian
check-debian: ## build and run every test in a bare root of another Debian (DEBIAN=trixie); as root, with debootstrap
	@tests/debian.sh $(DEBIAN)

# ---- on ARM64 ------------------------------------------------------------------------------------

# Built by Debian's cross compiler with arm64's libraries in a root of their own, and run by qemu, whose processor has
# every instruction. What qemu takes says nothing of an ARM's speed. The C tests, of the models and the engine on the
# CPU backend; a case of each op for each instruction set.
ARM64       := build/arm64
ARM64_ROOT  := $(abspath $(ARM64)/root)
ARM64_TESTS := $(patsubst tests/%.c,%,$(filter-out tests/cuda_host/% %/test_cuda_model.c %/test_cuda_rows.c %/test_checker.c,$(TEST_SRC)))

.PHONY: check-arm64 arm64-programs
arm64-programs: $(B)/pkmserve $(ARM64_TESTS:%=$(B)/tests/%)
check-arm64: ## cross-compile for ARM64 and run the C tests by qemu; fetches Debian's packages
	@.ci/arm64-root $(ARM64_ROOT)
	@$(MAKE) --no-print-directory arm64-programs B=$(ARM64) CUDA=0 CC="aarch64-linux-gnu-gcc --sysroot=$(ARM64_ROOT)" \
	    CXX="aarch64-linux-gnu-g++ --sysroot=$(ARM64_ROOT)"
	@tests/arm64.sh $(ARM64) $(ARM64_ROOT)
	@RUN="qemu-aarch64 -cpu max -L $(ARM64_ROOT)" TEST_FEW=1 TEST_DEVICE=cpu CHECK_PERCENT=1 TEST_JOBS=$(TEST_JOBS) PYTHON=$(PYTHON) \
	    tests/run.sh $(ARM64) $(ARM64_TESTS)
