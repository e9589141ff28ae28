# pkmserve: see README.md. `make help` lists the targets.
#
# Variants build into folders of their own: make B=build/asan SANITIZE=address,undefined ...

B        ?= build
CC       ?= gcc
CXX      ?= g++
PYTHON   ?= /usr/bin/python3
SANITIZE ?=
OPT      ?= -O2 -g
WARN     := -Wall -Wextra -Wconversion -Wshadow -Werror
# -ffp-contract=off: the compiler must not fuse a multiply and an add in one loop and not in its twin,
# or a row's bits would depend on its company. Kernels that want an fma say so.
COMMON   := $(OPT) -I. -pthread -ffp-contract=off -fno-omit-frame-pointer -D_GNU_SOURCE $(WARN) \
            $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all) -MMD -MP
CFLAGS_ALL   = -std=c11 $(COMMON) $(CFLAGS)
CXXFLAGS_ALL = -std=c++17 $(COMMON) $(CXXFLAGS)
LDLIBS_ENGINE := -ljansson -lsentencepiece -lstdc++ -lm
LDLIBS_SERVER := -lmicrohttpd $(LDLIBS_ENGINE)

KERNEL_SRC := $(wildcard kernels/*.c kernels/ref/*.c kernels/cpu/*.c)
SIMD_SRC   := $(wildcard kernels/cpu/simd/*.c)
MODEL_SRC  := $(wildcard models/*.c)
ENGINE_SRC := $(wildcard engine/*.c) $(wildcard engine/*.cc)
SERVER_SRC := $(filter-out server/main.c,$(wildcard server/*.c))

# Each file of kernels/cpu/simd is compiled once per instruction set.
ISA_avx512 := -DISA_AVX512 -march=x86-64-v4 -mavx512bf16 -mavx512vnni
ISA_avx2   := -DISA_AVX2 -march=x86-64-v3
ISA_plain  := -DISA_PLAIN
SIMD_OBJ   := $(foreach isa,avx512 avx2 plain,$(SIMD_SRC:%.c=$(B)/%.$(isa).o))

obj = $(patsubst %.cc,$(B)/%.o,$(patsubst %.c,$(B)/%.o,$(1)))
KERNEL_OBJ := $(call obj,$(KERNEL_SRC)) $(SIMD_OBJ)
MODEL_OBJ  := $(call obj,$(MODEL_SRC))
ENGINE_OBJ := $(call obj,$(ENGINE_SRC))
SERVER_OBJ := $(call obj,$(SERVER_SRC))

.PHONY: all
all: $(B)/pkmserve

$(B)/pkmserve: $(call obj,server/main.c) $(SERVER_OBJ) $(ENGINE_OBJ) $(MODEL_OBJ) $(KERNEL_OBJ)
	$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) $(LDLIBS_SERVER)

define SIMD_RULE
$(B)/%.$(1).o: %.c
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS_ALL) -O3 $$(ISA_$(1)) -c -o $$@ $$<
endef
$(foreach isa,avx512 avx2 plain,$(eval $(call SIMD_RULE,$(isa))))

$(B)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -c -o $@ $<
$(B)/%.o: %.cc
	@mkdir -p $(@D)
	$(CXX) $(CXXFLAGS_ALL) -c -o $@ $<

# C tests: tests/<layer>/test_*.c, one cmocka program each, linked with the layers it may include.
TEST_SRC := $(wildcard tests/*/test_*.c)
TEST_BIN := $(TEST_SRC:%.c=$(B)/%)
$(B)/tests/kernels/test_%: $(B)/tests/kernels/test_%.o $(KERNEL_OBJ)
	$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka -lm
$(B)/tests/models/test_%: $(B)/tests/models/test_%.o $(MODEL_OBJ) $(KERNEL_OBJ)
	$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka -ljansson -lm
$(B)/tests/engine/test_%: $(B)/tests/engine/test_%.o $(ENGINE_OBJ) $(MODEL_OBJ) $(KERNEL_OBJ)
	$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka $(LDLIBS_ENGINE)
$(B)/tests/server/test_%: $(B)/tests/server/test_%.o $(SERVER_OBJ) $(ENGINE_OBJ) $(MODEL_OBJ) $(KERNEL_OBJ)
	$(CC) $(CFLAGS_ALL) -o $@ $^ $(LDFLAGS) -lcmocka $(LDLIBS_SERVER)
.PRECIOUS: $(B)/tests/%.o

-include $(shell find $(B) -name '*.d' 2>/dev/null)
