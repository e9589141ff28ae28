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
PORT     ?= $(or $(filter-out tcp:%,$(PKMSERVE_PORT)),8000)
MODEL    ?= models/demo
SANITIZE ?=
# -g1 is what a backtrace needs; all of -g makes the build a third longer: make OPT="-O2 -g".
OPT      ?= -O2 -g1
SIMD_OPT ?= -O3
FUZZ_SECONDS ?= 60
STRESS_SECONDS ?= 60
SOAK_SECONDS ?= 3600
# Of the clients: newer than Debian's, where there is one.
CLIENT_PYTHON ?= python3

# ---- flags -------------------------------------------------------------------------------------

# A compiler newer than those tried here may warn of more, which is shown and stops nobody.
NEWEST_CC := $(if $(findstring clang,$(CC)),19,14)
WERROR    ?= $(if $(shell [ "$$($(CC) -dumpversion | cut -d. -f1)" -le $(NEWEST_CC) ] && echo yes),-Werror)
WARN     := -Wall -Wextra -Wconversion -Wshadow $(if $(findstring clang,$(CC)),-Wenum-float-conversion) $(WERROR)
# -ffp-contract=off: the compiler must not fuse a multiply and an add in one loop and not in its twin,
# or a row's bits would depend on the other rows of its step. Kernels that use an fma say so.
COMMON   := $(OPT) -I. -pthread -ffp-contract=off -fno-omit-frame-pointer -D_GNU_SOURCE $(WARN) \
            $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all) -MMD -MP
CFLAGS_ALL   = -std=c11 $(COMMON) $(CFLAGS)
CXXFLAGS_ALL = -std=c++17 $(COMMON) $(CXXFLAGS)
LDLIBS_ENGINE := -ljansson -lsentencepiece -lstdc++ -lm
LDLIBS_SERVER := -lmicrohttpd -lz -lzstd $(LDLIBS_ENGINE)

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

KERNEL_SRC := $(wildcard kernels/*.c kernels/host/*.c kernels/ref/*.c kernels/cpu/*.c)
SIMD_SRC   := $(wildcard kernels/cpu/simd/*.c)
MODEL_SRC  := $(wildcard models/*.c)
ENGINE_SRC := $(wildcard engine/*.c) $(wildcard engine/*.cc)
# server/none has what stands in where HTTP or compression is missing.
SERVER_SRC := $(filter-out server/main.c server/none/%,$(wildcard server/*.c server/*/*.c))

# Unrolled kernels take a minute to compile under AddressSanitizer unless its checks are calls and what it finds
# itself is looked for once.
FOUND_TWICE := -fno-sanitize=null,object-size,pointer-overflow
KERNEL_ASAN := $(if $(findstring address,$(SANITIZE)),$(FOUND_TWICE) \
                 $(if $(findstring clang,$(CC)),-mllvm -,--param=)asan-instrumentation-with-call-threshold=100)
# Each file of kernels/cpu/simd is compiled once per instruction set.
# gcc 12 with -fsanitize=address may place 64-byte vectors misaligned on the sanitizer's fake stack
# (gcc bug 110027), which ends in a segmentation fault; so these files keep the real one.
NO_FAKE_STACK := $(if $(findstring address,$(SANITIZE)),\
                   $(if $(findstring clang,$(CC)),,--param=asan-use-after-return=0))
ISA_avx512 := -DISA_AVX512 -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8 $(NO_FAKE_STACK)
ISA_avx2   := -DISA_AVX2 -march=x86-64-v3
ISA_neon_bf16 := -DISA_NEON -DISA_NEON_DOT -DISA_NEON_BF16 -march=armv8.2-a+dotprod+bf16
ISA_neon_dot  := -DISA_NEON -DISA_NEON_DOT -march=armv8.2-a+dotprod
ISA_neon   := -DISA_NEON
ISA_plain  := -DISA_PLAIN
ISAS_x86_64  := avx512 avx2
ISAS_aarch64 := neon_bf16 neon_dot neon
ISAS       := $(ISAS_$(firstword $(subst -, ,$(shell $(CC) -dumpmachine)))) plain
# Sanitizers slow the vector kernels tenfold. The kernels' tests run them so; whatever runs a model gets them as they
# are: of the build BARE, which has them, or compiled once more. With WATCHED, the kernels' tests too have those of BARE,
# but for the sets that it names.
BARE       ?=
WATCHED    ?= $(ISAS)
SIMD_OBJ   := $(foreach isa,$(ISAS),$(SIMD_SRC:%.c=$(B)/%.$(isa).o))
SIMD_MODEL := $(if $(SANITIZE),$(if $(BARE),$(SIMD_OBJ:$(B)/%=$(BARE)/%),$(SIMD_OBJ:.o=.bare.o)),$(SIMD_OBJ))

obj = $(patsubst %.cc,$(B)/%.o,$(patsubst %.c,$(B)/%.o,$(1)))
SIMD_KERNEL := $(foreach isa,$(ISAS),$(SIMD_SRC:%.c=$(if $(filter $(isa),$(WATCHED)),$(B),$(BARE))/%.$(isa).o))
KERNEL_OBJ := $(call obj,$(KERNEL_SRC)) $(SIMD_KERNEL)
MODEL_OBJ  := $(call obj,$(MODEL_SRC) $(KERNEL_SRC)) $(SIMD_MODEL)
ENGINE_OBJ := $(call obj,$(ENGINE_SRC)) $(MODEL_OBJ)
SERVER_OBJ := $(call obj,$(SERVER_SRC)) $(ENGINE_OBJ)

.PHONY: all
all: $(B)/pkmserve ## build the program, build/pkmserve
all: $(if $(CUDA_WANTED),cuda)

define SIMD_RULE
$(B)/%.$(1).o: %.c
	@mkdir -p $$(@D)
	$$(call say,C)
	$$(Q)$$(CC) $$(CFLAGS_ALL) $$(SIMD_OPT) $$(ISA_$(1)) $$(KERNEL_ASAN) -c -o $$@ $$<
$(B)/%.$(1).bare.o: %.c
	@mkdir -p $$(@D)
	$$(call say,C)
	$$(Q)$$(CC) $$(CFLAGS_ALL) -O2 -fno-sanitize=all $$(ISA_$(1)) -c -o $$@ $$<
endef
$(foreach isa,$(ISAS),$(eval $(call SIMD_RULE,$(isa))))

$(B)/server/api/openapi.o: server/api/openapi.json
$(B)/server/api/page.o: $(wildcard server/page/*)
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
# Another nvcc than ours has other warnings: who changes the kernels adds NVCC_WARN="-Werror all-warnings".
# -lineinfo costs no speed; profilers and compute-sanitizer then name lines.
NVCC_WARN  ?=
NVCC_FLAGS := -std=c++20 -O3 -fmad=false -lineinfo -I. $(CUDA_CODE) $(if $(word 2,$(CUDA_ARCH)),--compress-mode=size) $(NVCC_WARN) \
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

# ---- the program -----------------------------------------------------------------------------------

# Where SentencePiece is missing, the program takes token ids and byte-level BPE alone (WITH_SPM=0); where zlib or
# libzstd is, it has no --jsonl (WITH_ZIP=0). jansson and libmicrohttpd may come from build/gpu-kit (KIT).
WITH_SPM ?= 1
WITH_ZIP ?= 1
KIT      ?=
ifneq ($(KIT),)
COMMON   += -isystem $(KIT)/include
override LDFLAGS += -L$(KIT)/lib -Wl,-rpath-link,$(KIT)/lib
endif
ENGINE_IDS_OBJ := $(B)/engine/none/tokenizer_spm.o $(filter-out $(B)/engine/tokenizer_spm.o,$(ENGINE_OBJ))
WITH_OBJ := $(if $(filter 0,$(WITH_SPM)),$(ENGINE_IDS_OBJ),$(ENGINE_OBJ)) \
    $(B)/server/$(if $(filter 0,$(WITH_ZIP)),none,io)/codec.o
WITH_LIB := $(if $(filter 0,$(WITH_ZIP)),,-lz -lzstd) -ljansson $(if $(filter 0,$(WITH_SPM)),,-lsentencepiece -lstdc++) -lm

$(B)/pkmserve: $(filter-out %/codec.o,$(call obj,server/main.c $(SERVER_SRC))) $(WITH_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lmicrohttpd $(WITH_LIB)

# pkmserve-engine is pkmserve without `serve`, for machines without libmicrohttpd.
.PHONY: engine
engine: ## build build/pkmserve-engine: every command but serve, without libmicrohttpd
	@variables=$$(CC="$(CC)" CXX="$(CXX)" .ci/engine-libs) && \
	    $(MAKE) --no-print-directory $(B)/pkmserve-engine $$variables

# The linker takes out of this archive what the commands use, which is nothing of HTTP.
$(B)/server/parts.a: $(filter-out %/http.o %/http_head.o %/serve.o %/codec.o,$(call obj,$(SERVER_SRC)))
	$(call say,ar)
	$(Q)rm -f $@ && ar rcs $@ $^
$(B)/pkmserve-engine: $(call obj,server/main.c server/none/serve.c) $(B)/server/parts.a $(WITH_OBJ)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) $(WITH_LIB)

# ---- running -----------------------------------------------------------------------------------

.PHONY: deps serve install
deps: ## install what the build needs (Debian packages)
	@.ci/deps build

serve: deps ## install what is missing, build, serve the shipped model on port 8000
	@$(MAKE) --no-print-directory all
	@.ci/serve $(B)/pkmserve $(MODEL) $(PORT)

SHARE = $(DESTDIR)$(PREFIX)/share
install: all ## install program, demo models, converter, documents, completions below DESTDIR and PREFIX (/usr/local)
	install -D -t "$(DESTDIR)$(PREFIX)/bin" $(B)/pkmserve
	$(if $(CUDA_WANTED),install -D -t "$(DESTDIR)$(PREFIX)/lib/pkmserve" $(B)/libpkmserve_cuda.so)
	install -D -m 644 -t "$(SHARE)/pkmserve/models/demo" $(wildcard models/demo/*)
	install -D -m 644 -t "$(SHARE)/pkmserve/models/demo-bytes" $(wildcard models/demo-bytes/*)
	install -D -m 644 -t "$(SHARE)/pkmserve/models/demo-dense" $(wildcard models/demo-dense/*)
	install -D -m 644 -t "$(SHARE)/pkmserve/models/convert" $(wildcard models/convert/*.py)
	install -D -m 644 -t "$(SHARE)/doc/pkmserve" README.md LICENSE
	for folder in server models models/convert models/python docker docker/batch; do \
	    install -D -m 644 -t "$(SHARE)/doc/pkmserve/$$folder" $$folder/*.md || exit; done
	install -d "$(SHARE)/man/man1" "$(SHARE)/bash-completion/completions" "$(SHARE)/zsh/site-functions" \
	    "$(SHARE)/fish/vendor_completions.d"
	$(B)/pkmserve help man >"$(SHARE)/man/man1/pkmserve.1"
	$(B)/pkmserve help bash >"$(SHARE)/bash-completion/completions/pkmserve"
	$(B)/pkmserve help zsh >"$(SHARE)/zsh/site-functions/_pkmserve"
	$(B)/pkmserve help fish >"$(SHARE)/fish/vendor_completions.d/pkmserve.fish"

# ---- packages -----------------------------------------------------------------------------------

VERSION = $(shell sed -n 's/.*PKMSERVE_VERSION "\(.*\)"/\1/p' server/version.h)

.PHONY: dist deb check-packages
dist: all ## pack what make install installs: build/pkmserve-VERSION.tar.gz
	docker/packages/dist.sh $(B) $(VERSION)
deb: all ## make a Debian package with a systemd unit, in build
	docker/packages/deb.sh $(B) $(VERSION)
check-packages: dist deb ## install both into a bare Debian and run them there; as root, with debootstrap
	docker/packages/check.sh $(B)

# ---- containers ---------------------------------------------------------------------------------

CONTAINER ?= $(firstword $(foreach tool,podman docker,$(if $(shell command -v $(tool)),$(tool))))
IMAGE     ?= pkmserve:cpu

.PHONY: image
image: ## build the container image, pkmserve:cpu (IMAGE)
	$(if $(CONTAINER),,$(error the image needs podman or docker))
	$(CONTAINER) build $(if $(filter podman,$(CONTAINER)),--format docker) -f docker/Dockerfile --target cpu -t $(IMAGE) .

# ---- style, help ---------------------------------------------------------------------------------

.PHONY: fmt lint clean help
fmt: ## format the C and C++ sources
	clang-format -i $$(git ls-files '*.c' '*.h' '*.cc' '*.cu' '*.cuh')

lint: ## check format, includes, fences; clang-tidy, cppcheck, shellcheck
	@.ci/deps build lint
	@tests/lint.sh

clean: ## remove the build folder
	rm -rf $(B)

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(filter %Makefile %.mk,$(MAKEFILE_LIST)) | while IFS='|' read -r target text; do \
	    printf '  make %-16s %s\n' "$$target" "$$text"; done

# The image of docker/ is built without the tests.
-include tests/tests.mk tests/cuda_host/rules.mk

-include $(shell find $(B) -name '*.d' -type f 2>/dev/null)
