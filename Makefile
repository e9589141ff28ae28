# pkmserve: see README.md. `make help` lists the targets.
#
# Everything is built below $(B), which is build/ or, for a variant, a folder of its own:
#   make B=build/clang CC=clang CXX=clang++
#   make B=build/asan SANITIZE=address,undefined

B        ?= build
ifeq ($(origin CC),default)
CC       := gcc
endif
ifeq ($(origin CXX),default)
CXX      := g++
endif
PYTHON   ?= /usr/bin/python3
PREFIX   ?= /usr/local
PORT     ?= 8000
MODEL    ?= models/demo
SANITIZE ?=
OPT      ?= -O2 -g
SIMD_OPT ?= -O3
FUZZ_SECONDS ?= 60
STRESS_SECONDS ?= 60
SOAK_SECONDS ?= 3600
# Of the clients: newer than Debian's, where there is one.
CLIENT_PYTHON ?= python3

# ---- flags -------------------------------------------------------------------------------------

WARN     := -Wall -Wextra -Wconversion -Wshadow -Werror
# -ffp-contract=off: the compiler must not fuse a multiply and an add in one loop and not in its twin,
# or a row's bits would depend on its company. Kernels that want an fma say so.
COMMON   := $(OPT) -I. -pthread -ffp-contract=off -fno-omit-frame-pointer -D_GNU_SOURCE $(WARN) \
            $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all) -MMD -MP
CFLAGS_ALL   = -std=c11 $(COMMON) $(CFLAGS)
CXXFLAGS_ALL = -std=c++17 $(COMMON) $(CXXFLAGS)
LDLIBS_ENGINE := -ljansson -lsentencepiece -lstdc++ -lm
LDLIBS_SERVER := -lmicrohttpd $(LDLIBS_ENGINE)

# One short line per file; make V=1 shows the commands.
Q        := $(if $(V),,@)
say       = $(if $(V),,@printf '  %-4s %s\n' $(1) $@)

# ---- CUDA --------------------------------------------------------------------------------------

# The GPU's backend is a library of its own, $(B)/libpkmserve_cuda.so, that the program opens at run
# time. CUDA=auto builds it where there are nvcc and a GPU, for this GPU; CUDA=1 demands it, for all
# generations; CUDA=0 never does; no test needs it. CUDA_ARCH names the generations it has code for,
# "native" that of this machine's GPU alone; code for the last one named is translated for newer devices
# when it is loaded.
CUDA      ?= auto
CUDA_ARCH ?= $(if $(and $(filter auto,$(CUDA)),$(wildcard /dev/nvidiactl)),native,80 86 89 90 100 120)
NVCC      ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA_WANTED := $(if $(SANITIZE),,$(filter-out 0,$(if $(filter auto,$(CUDA)),\
                 $(if $(NVCC),$(if $(wildcard /dev/nvidiactl),1)),$(CUDA))))
ifeq ($(filter auto 0 1,$(CUDA)),)
$(error CUDA=$(CUDA): use auto, 0 or 1)
endif

# ---- sources, by layer -------------------------------------------------------------------------

KERNEL_SRC := $(wildcard kernels/*.c kernels/ref/*.c kernels/cpu/*.c)
SIMD_SRC   := $(wildcard kernels/cpu/simd/*.c)
MODEL_SRC  := $(wildcard models/*.c)
ENGINE_SRC := $(wildcard engine/*.c) $(wildcard engine/*.cc)
# server/none has what stands in for serve.c in programs without HTTP.
SERVER_SRC := $(filter-out server/main.c server/none/%,$(wildcard server/*.c server/*/*.c))

# Each file of kernels/cpu/simd is compiled once per instruction set.
# gcc 12 with -fsanitize=address may place 64-byte vectors misaligned on the sanitizer's fake stack
# (gcc bug 110027), which ends in a segmentation fault; so these files keep the real one.
NO_FAKE_STACK := $(if $(findstring address,$(SANITIZE)),\
                   $(if $(findstring clang,$(CC)),,--param=asan-use-after-return=0))
ISA_avx512 := -DISA_AVX512 -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8 $(NO_FAKE_STACK)
ISA_avx2   := -DISA_AVX2 -march=x86-64-v3
ISA_plain  := -DISA_PLAIN
SIMD_OBJ   := $(foreach isa,avx512 avx2 plain,$(SIMD_SRC:%.c=$(B)/%.$(isa).o))
# Sanitizers slow the vector kernels tenfold. The kernels' tests run them so; whatever runs a model
# gets them as they are: of the build BARE, which has them, or compiled once more.
BARE       ?=
SIMD_MODEL := $(if $(SANITIZE),$(if $(BARE),$(SIMD_OBJ:$(B)/%=$(BARE)/%),$(SIMD_OBJ:.o=.bare.o)),$(SIMD_OBJ))

obj = $(patsubst %.cc,$(B)/%.o,$(patsubst %.c,$(B)/%.o,$(1)))
KERNEL_OBJ := $(call obj,$(KERNEL_SRC)) $(SIMD_OBJ)
MODEL_OBJ  := $(call obj,$(MODEL_SRC) $(KERNEL_SRC)) $(SIMD_MODEL)
ENGINE_OBJ := $(call obj,$(ENGINE_SRC)) $(MODEL_OBJ)
SERVER_OBJ := $(call obj,$(SERVER_SRC)) $(ENGINE_OBJ)

.PHONY: all
all: $(B)/pkmserve ## build the program, $(B)/pkmserve
all: $(if $(CUDA_WANTED),cuda)

$(B)/pkmserve: $(call obj,server/main.c) $(SERVER_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) $(LDLIBS_SERVER)

define SIMD_RULE
$(B)/%.$(1).o: %.c
	@mkdir -p $$(@D)
	$$(call say,C)
	$$(Q)$$(CC) $$(CFLAGS_ALL) $$(SIMD_OPT) $$(ISA_$(1)) -c -o $$@ $$<
$(B)/%.$(1).bare.o: %.c
	@mkdir -p $$(@D)
	$$(call say,C)
	$$(Q)$$(CC) $$(CFLAGS_ALL) -O2 -fno-sanitize=all $$(ISA_$(1)) -c -o $$@ $$<
endef
$(foreach isa,avx512 avx2 plain,$(eval $(call SIMD_RULE,$(isa))))

$(B)/server/openapi.o: server/api/openapi.json
$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(call say,C)
	$(Q)$(CC) $(CFLAGS_ALL) -c -o $@ $<
$(B)/%.o: %.cc
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CXXFLAGS_ALL) -c -o $@ $<

# ---- the CUDA library --------------------------------------------------------------------------

# What the library shares with the program; each has its own.
CUDA_C     := kernels/err.c kernels/step.c kernels/weight.c
CUDA_OBJ   := $(patsubst %.cu,$(B)/nvcc/%.o,$(wildcard kernels/cuda/*.cu)) $(CUDA_C:%.c=$(B)/nvcc/%.o)
CUDA_CODE  := $(if $(filter native,$(CUDA_ARCH)),-arch=native,\
                $(foreach arch,$(CUDA_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) \
                -gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH)))
# -fmad=false is -ffp-contract=off for the device.
NVCC_WARN  ?= -Werror all-warnings
NVCC_FLAGS := -std=c++20 -O3 -fmad=false -I. $(CUDA_CODE) $(if $(word 2,$(CUDA_ARCH)),--compress-mode=size) $(NVCC_WARN) \
              -Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra
# CUDA's folder is where nvcc stands; cuBLASLt is found there even if the system does not know.
CUDA_LIB    = $(abspath $(dir $(NVCC))../lib64)

.PHONY: cuda
cuda: $(B)/libpkmserve_cuda.so ## build the GPU's library (CUDA_ARCH=native is quick)

$(B)/libpkmserve_cuda.so: $(CUDA_OBJ)
	$(call say,link)
	$(Q)$(NVCC) -shared -cudart static $(CUDA_CODE) -o $@ $^ \
	    -Xlinker --exclude-libs,ALL,-rpath,$(CUDA_LIB)
$(B)/nvcc/%.o: %.cu
	@mkdir -p $(@D)
	$(if $(NVCC),,$(error the CUDA library needs nvcc: install the CUDA toolkit, name NVCC, or use CUDA=0))
	$(call say,nvcc)
	$(Q)$(NVCC) $(NVCC_FLAGS) -MMD -MP -c -o $@ $<
$(B)/nvcc/%.o: %.c
	@mkdir -p $(@D)
	$(call say,C)
	$(Q)$(CC) $(CFLAGS_ALL) -fPIC -fvisibility=hidden -c -o $@ $<

# ---- the engine alone, the check on a GPU -------------------------------------------------------

# pkmserve-engine is pkmserve without `serve`, for machines without libmicrohttpd. Where SentencePiece is
# missing it takes token ids only (WITH_SPM=0); jansson may come from build/gpu-kit (KIT).
WITH_SPM ?= 1
KIT      ?=
ifneq ($(KIT),)
COMMON   += -isystem $(KIT)/include
override LDFLAGS += -L$(KIT)/lib
endif
ENGINE_IDS_OBJ  := $(B)/engine/none/tokenizer_spm.o $(filter-out $(B)/engine/tokenizer_spm.o,$(ENGINE_OBJ))
ENGINE_ONLY_OBJ := $(if $(filter 0,$(WITH_SPM)),$(ENGINE_IDS_OBJ),$(ENGINE_OBJ))
ENGINE_ONLY_LIB := -ljansson $(if $(filter 0,$(WITH_SPM)),,-lsentencepiece -lstdc++) -lm

.PHONY: engine gpu-kit gpu-programs check-gpu
engine: ## build $(B)/pkmserve-engine: score, compare, generate, inspect, bench; no HTTP
	@variables=$$(CC="$(CC)" CXX="$(CXX)" .ci/engine-libs) && \
	    $(MAKE) --no-print-directory $(B)/pkmserve-engine $$variables

# The linker takes out of this archive what the commands use, which is nothing of HTTP.
$(B)/server/parts.a: $(filter-out %/http.o %/serve.o,$(call obj,$(SERVER_SRC)))
	$(call say,ar)
	$(Q)rm -f $@ && ar rcs $@ $^
$(B)/pkmserve-engine: $(call obj,server/main.c server/none/serve.c) $(B)/server/parts.a $(ENGINE_ONLY_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) $(ENGINE_ONLY_LIB)

# The same without SentencePiece, for its test.
$(B)/pkmserve-ids: $(call obj,server/main.c server/none/serve.c) $(B)/server/parts.a $(ENGINE_IDS_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -ljansson -lm

gpu-kit: ## gather into build/gpu-kit what a bare GPU machine lacks
	@CC="$(CC)" .ci/gpu-kit build/gpu-kit

# What tests/gpu/check.py runs; it builds them itself, in a folder of its own.
GPU_PROGRAMS := $(addprefix $(B)/,pkmserve-engine tests/gpu/forward tests/kernels/run_check tests/bench/bench_device)
gpu-programs: $(GPU_PROGRAMS) # for a rehearsal, and its test
check-gpu: ## on a machine with a GPU: build, check, measure, write a report (8 minutes)
	@$(if $(filter file,$(origin PYTHON)),python3,$(PYTHON)) tests/gpu/check.py $(CHECK_GPU)

# ---- running -----------------------------------------------------------------------------------

.PHONY: deps serve install
deps: ## install what the build needs (Debian packages)
	@.ci/deps build

serve: deps ## install what is missing, build, serve the shipped model on port 8000
	@$(MAKE) --no-print-directory all
	@.ci/serve $(B)/pkmserve $(MODEL) $(PORT)

SHARE = $(DESTDIR)$(PREFIX)/share
install: all ## install program, model and documents below $(DESTDIR)$(PREFIX)
	install -D -t "$(DESTDIR)$(PREFIX)/bin" $(B)/pkmserve
	$(if $(CUDA_WANTED),install -D -t "$(DESTDIR)$(PREFIX)/lib/pkmserve" $(B)/libpkmserve_cuda.so)
	install -D -m 644 -t "$(SHARE)/pkmserve/models/demo" $(wildcard models/demo/*)
	install -D -m 644 -t "$(SHARE)/doc/pkmserve" README.md LICENSE

# ---- tests -------------------------------------------------------------------------------------

# C tests: tests/<layer>/test_*.c, one cmocka program each, linked with the layers it may include.
TEST_SRC := $(wildcard tests/*/test_*.c)
TEST_BIN := $(TEST_SRC:%.c=$(B)/%)
# Fuzz targets: tests/fuzz/fuzz_*.c. With gcc each is a program that replays its corpus.
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_BIN := $(FUZZ_SRC:%.c=$(B)/%)
BENCH_BIN := $(patsubst %.c,$(B)/%,$(wildcard tests/bench/bench_*.c) tests/bench/make_model.c)

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
$(B)/tests/bench/make_model: $(B)/tests/bench/model_plan.o
$(B)/tests/gpu/forward: $(B)/tests/gpu/forward.o $(MODEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -ljansson -lm
# The model's forward with weights of its own making: no files, hence no JSON and no models/tensors.c.
$(B)/tests/bench/bench_device: $(patsubst %,$(B)/tests/bench/%.o,bench_device device_ops device_memory random_model \
    model_plan) $(B)/server/cli/bench_cost.o \
    $(patsubst %,$(B)/models/%.o,adaptive loader loader_memory loader_weight output query pkm_transformer) $(KERNEL_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lm
.PRECIOUS: $(B)/%.o

.PHONY: tests test deps-test test-asan test-tsan
tests: $(B)/pkmserve $(TEST_BIN) $(FUZZ_BIN) $(BENCH_BIN) $(GPU_PROGRAMS) $(B)/pkmserve-ids # builds them all, runs none

deps-test:
	@.ci/deps build test

TEST_JOBS ?= 2 # areas of tests side by side
# Each variant is a make of its own, so that its objects live in a folder of their own.
test: deps-test ## build and run every test
	@$(MAKE) --no-print-directory tests
	@TEST_JOBS=$(TEST_JOBS) PYTHON=$(PYTHON) tests/run.sh $(B)

# Where threads of the server meet; what one thread parses and prints is left to the other variants.
TSAN_SERVER := server/test_bits.py server/test_life.py server/test_stream.py server/test_http_rules.py

# What it is slow at and other tests of it cover is left out: the checker's own tests, the orders of the double's
# threads, whole forwards of the demo model.
ASAN_KERNELS := $(filter-out kernels/test_checker,$(patsubst tests/%.c,%,$(wildcard tests/kernels/test_*.c)))
ASAN_MODELS := $(filter-out models/test_parity,$(patsubst tests/%.c,%,$(wildcard tests/models/test_*.c)))
ASAN_SERVER := $(basename $(wildcard tests/server/test_*.c)) \
    $(filter-out %/test_cuda.py $(addprefix tests/,$(TSAN_SERVER)),$(wildcard tests/server/test_*.py)) \
    tests/cli/test_options.py
ASAN_SERVER := $(ASAN_SERVER:tests/%=%)
test-asan: deps-test ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) -s --no-print-directory $(SIMD_OBJ)
	@$(MAKE) --no-print-directory tests B=$(B)/asan BARE=$(B) SANITIZE=address,undefined OPT="-O1 -g" SIMD_OPT="-O1 -g"
	@TEST_FEW=1 CHECK_ORDER=random PYTHON=$(PYTHON) \
	    tests/run.sh $(B)/asan $(ASAN_KERNELS) $(ASAN_MODELS) engine $(ASAN_SERVER) fuzz

TSAN_KERNELS  := kernels/test_pool kernels/test_kernels
TSAN_PROGRAMS := pkmserve $(addprefix tests/,$(TSAN_KERNELS)) $(patsubst %.c,%,$(wildcard tests/engine/test_*.c))
# Of the kernels, a case of each op, by a seed whose cases are small; on the CUDA double a missing barrier is a race in
# any order.
test-tsan: deps-test ## the threaded tests and the CUDA kernels under ThreadSanitizer
	@$(MAKE) -s --no-print-directory $(SIMD_OBJ)
	@$(MAKE) --no-print-directory $(addprefix $(B)/tsan/,$(TSAN_PROGRAMS)) cuda-host B=$(B)/tsan BARE=$(B) \
	    SANITIZE=thread OPT="-O1 -g" SIMD_OPT="-O1 -g"
	@TEST_DEVICE=cpu CHECK_ORDER=forward CHECK_PERCENT=1 CHECK_SEED=5 PYTHON=$(PYTHON) \
	    tests/run.sh $(B)/tsan $(TSAN_KERNELS) engine $(TSAN_SERVER)

# ---- containers ---------------------------------------------------------------------------------

CONTAINER ?= $(firstword $(foreach tool,podman docker,$(if $(shell command -v $(tool)),$(tool))))
IMAGE     ?= pkmserve:cpu
CHECK_REQUESTS ?= 10000

.PHONY: image check-containers
image: ## build the container image, $(IMAGE)
	$(if $(CONTAINER),,$(error the image needs podman or docker))
	$(CONTAINER) build $(if $(filter podman,$(CONTAINER)),--format docker) -f docker/Dockerfile --target cpu -t $(IMAGE) .

check-containers: all ## image, two replicas behind HAProxy and nginx, restarts and a kill under load
	@PKMSERVE=$(B)/pkmserve $(PYTHON) tests/docker/check.py --requests $(CHECK_REQUESTS)

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

# ---- the CUDA backend on the CPU ----------------------------------------------------------------

# kernels/cuda compiled by the C++ compiler against tests/cuda_host, which runs each CUDA thread as a
# fiber: libpkmserve_cudahost.so is opened as the backend by PKMSERVE_CUDA_LIBRARY.
CUDA_HOST_OBJ := $(patsubst %.cc,$(B)/%.o,$(wildcard tests/cuda_host/*.cc))
CUDA_HOST_CU  := $(patsubst %.cu,$(B)/%.host.o,$(wildcard kernels/cuda/*.cu))
CUDA_HOST_LIB := $(B)/libpkmserve_cudahost.so
# Its cuBLASLt is a library that it opens by name, as the GPU's does with the real one.
CUDA_HOST_LT  := $(B)/libcublasLt.so.0
# fmaf is an instruction where the machine has it; the result is the same bits as the function's.
CUDA_HOST_ISA := $(shell grep -qw fma /proc/cpuinfo 2>/dev/null && echo -mfma)
# The house's C style in C++20: functions named like structs, constants that are enums, sizes that are
# ints. Pragmas to unroll are hints for nvcc. Each compiler takes the names that the other knows.
CUDA_HOST_WARN := -Wno-unknown-warning-option -Wno-shadow -Wshadow=local -Wno-sign-conversion \
                  -Wno-unknown-pragmas -Wno-pass-failed -Wno-maybe-uninitialized
CUDA_HOST_FLAGS = -std=c++20 $(COMMON) $(CXXFLAGS) -DPKMSERVE_CUDA_HOST -Itests/cuda_host/include -fPIC \
                  -fvisibility=hidden $(CUDA_HOST_ISA) $(CUDA_HOST_WARN)
# A stack per fiber is enough without AddressSanitizer's second one.
CUDA_HOST_ASAN := $(if $(findstring clang,$(CXX)),-fsanitize-address-use-after-return=never,\
                    --param=asan-use-after-return=0)
# For .cu files. tests/cuda_host/shared.ld finds __shared__ variables by their sections.
CUDA_HOST_CUDA := -x c++ -fdata-sections
CUDA_HOST_LINK := -Wl,-T,tests/cuda_host/shared.ld

.PHONY: cuda-host
cuda-host: $(CUDA_HOST_LIB) $(CUDA_HOST_LT) ## build the CUDA backend for the CPU, for tests
tests: cuda-host

$(CUDA_HOST_LIB): $(filter-out %/cublaslt.o,$(CUDA_HOST_OBJ)) $(CUDA_HOST_CU) $(CUDA_C:%.c=$(B)/%.host.o) \
    tests/cuda_host/shared.ld
	$(call say,link)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -shared -o $@ $(filter %.o,$^) $(CUDA_HOST_LINK) $(LDFLAGS) \
	    -Wl,-soname,$(@F)
$(CUDA_HOST_LT): $(B)/tests/cuda_host/cublaslt.o $(CUDA_HOST_LIB)
	$(call say,link)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -shared -o $@ $^ $(LDFLAGS)
# The double itself is not watched: see tests/cuda_host/sanitizer.h.
$(CUDA_HOST_OBJ): $(B)/%.o: %.cc
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -fno-sanitize=address,thread -c -o $@ $<
$(CUDA_HOST_CU): $(B)/%.host.o: %.cu
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CUDA_HOST_CUDA) $(CUDA_HOST_FLAGS) $(if $(findstring address,$(SANITIZE)),$(CUDA_HOST_ASAN)) \
	    -c -o $@ $<
$(CUDA_C:%.c=$(B)/%.host.o): $(B)/%.host.o: %.c
	@mkdir -p $(@D)
	$(call say,C)
	$(Q)$(CC) $(CFLAGS_ALL) -fPIC -fvisibility=hidden -c -o $@ $<

# The double's own test, plain and with what each sanitizer must find: the double is the same objects.
CUDA_CASES := $(addprefix $(B)/tests/cuda_host/cases.,plain asan tsan)
CUDA_CASES_plain :=
CUDA_CASES_asan  := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all $(CUDA_HOST_ASAN)
CUDA_CASES_tsan  := -O1 -fsanitize=thread
define CUDA_CASES_RULE
$(B)/tests/cuda_host/%.$(1).o: tests/cuda_host/%.cu
	@mkdir -p $$(@D)
	$$(call say,C++)
	$$(Q)$$(CXX) $$(CUDA_HOST_CUDA) $$(CUDA_HOST_FLAGS) $$(CUDA_CASES_$(1)) -c -o $$@ $$<
$(B)/tests/cuda_host/cases.$(1): $(B)/tests/cuda_host/cases.$(1).o $(B)/tests/cuda_host/bugs.$(1).o $(CUDA_HOST_OBJ)
	$$(call say,link)
	$$(Q)$$(CXX) $$(CUDA_HOST_FLAGS) $$(CUDA_CASES_$(1)) -o $$@ $$^ $$(CUDA_HOST_LINK) $$(LDFLAGS)
endef
$(foreach variant,plain asan tsan,$(eval $(call CUDA_CASES_RULE,$(variant))))
# The same with the way of switching stacks that other processors than x86-64 take.
CUDA_CASES += $(B)/tests/cuda_host/cases.ucontext
$(B)/tests/cuda_host/fiber.ucontext.o: tests/cuda_host/fiber.cc
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -DCUDA_HOST_UCONTEXT -c -o $@ $<
$(B)/tests/cuda_host/cases.ucontext: $(patsubst %,$(B)/tests/cuda_host/%.o,cases.plain bugs.plain fiber.ucontext) \
    $(filter-out %/fiber.o,$(CUDA_HOST_OBJ))
	$(call say,link)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -o $@ $^ $(CUDA_HOST_LINK) $(LDFLAGS)
ifeq ($(SANITIZE),)
tests: $(CUDA_CASES)
endif

# ---- measuring, style --------------------------------------------------------------------------

.PHONY: bench bench-papers fmt lint clean help
# BENCH="torch llama isa start host" names tables of tests/bench/compare.py; BENCH_TORCH, a Python with PyTorch, and
# BENCH_LLAMA, llama.cpp's llama-batched-bench, name what is not on the path.
BENCH ?=
bench: all $(BENCH_BIN) ## measure a full-size model with random weights, beside PyTorch and llama.cpp
	$(if $(BENCH),,@tests/bench/run.sh $(B))
	@$(PYTHON) tests/bench/compare.py --build $(B) $(BENCH)

# One table each: table4 figure4 figure6 counts; chart draws what was measured. tests/bench/papers.py --help.
PAPERS ?= table4 figure4 figure6 counts chart
bench-papers: $(B)/tests/bench/bench_device ## the product-key paper's tables measured here (PAPERS="table4 chart")
	@$(PYTHON) tests/bench/papers.py --build $(B) $(PAPERS)

.PHONY: stress soak check-clients
stress: all ## overload, 256 streams, slow readers, scoring beside generations; prints Markdown tables
	@PKMSERVE=$(B)/pkmserve $(PYTHON) tests/bench/stress.py overload streams slow bulk --seconds $(STRESS_SECONDS)
soak: all ## an hour of everything at once (SOAK_SECONDS=3600): no error, no growth
	@PKMSERVE=$(B)/pkmserve $(PYTHON) tests/bench/stress.py soak --seconds $(SOAK_SECONDS)

# Everything there is, an hour and a half of it; needs root for the containers and PyPI for the clients.
.PHONY: release-check
release-check: ## what a release must pass: .ci/run, fuzz, clients, containers, stress, five minutes of soak
	.ci/run
	$(MAKE) fuzz check-clients check-containers stress
	$(MAKE) soak SOAK_SECONDS=300

# A Python of its own for the clients: they come from PyPI, at the versions named there.
check-clients: all ## the clients that people use, unmodified, against the server
	@test -x $(B)/clients/bin/pytest || { $(CLIENT_PYTHON) -m venv $(B)/clients && \
	    $(B)/clients/bin/pip install -q -r tests/clients/requirements.txt; }
	@PKMSERVE=$(B)/pkmserve $(B)/clients/bin/python -m pytest -q -rs -p no:cacheprovider tests/clients

fmt: ## format the C and C++ sources
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cc' '*.cu' '*.cuh')

lint: ## check format, includes, fences; clang-tidy, cppcheck, shellcheck
	@.ci/deps build lint
	@tests/lint.sh

clean: ## remove the build folder
	rm -rf $(B)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r target text; do \
	    printf '  make %-16s %s\n' "$$target" "$$text"; done

-include $(shell find $(B) -name '*.d' 2>/dev/null)
