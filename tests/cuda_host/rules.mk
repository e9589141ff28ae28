# How the CUDA backend is compiled for the CPU: included by the Makefile, whose variables it uses.

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
# ints. Each compiler takes the names that the other knows.
CUDA_HOST_WARN := -Wno-unknown-warning-option -Wno-shadow -Wshadow=local -Wno-sign-conversion \
                  -Wno-unknown-pragmas -Wno-pass-failed -Wno-maybe-uninitialized
CUDA_HOST_FLAGS = -std=c++20 $(COMMON) $(CXXFLAGS) -DPKMSERVE_CUDA_HOST -Itests/cuda_host/include -fPIC \
                  -fvisibility=hidden $(CUDA_HOST_ISA) $(CUDA_HOST_WARN)
# A stack per fiber is enough without AddressSanitizer's second one.
CUDA_HOST_ASAN := $(if $(findstring clang,$(CXX)),-fsanitize-address-use-after-return=never,\
                    --param=asan-use-after-return=0)
# For .cu files. tests/cuda_host/shared.ld finds __shared__ variables by their sections. Pragmas to unroll are hints for
# nvcc: gcc does not know them, and clang, which would take half as long again to follow them, is told not to. -O1 takes
# a fifth less time to compile than -O2, and the kernels then run no slower here.
CUDA_HOST_CUDA := -x c++ -fdata-sections
CUDA_HOST_OPT  := $(if $(SANITIZE),,-O1) $(if $(findstring clang,$(CXX)),-mllvm -pragma-unroll-threshold=1)
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
# The double itself is not watched, and always fast: see tests/cuda_host/sanitizer.h.
$(CUDA_HOST_OBJ): $(B)/%.o: %.cc
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -O2 -fno-sanitize=all -c -o $@ $<
$(CUDA_HOST_CU): $(B)/%.host.o: %.cu
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CUDA_HOST_CUDA) $(CUDA_HOST_FLAGS) $(CUDA_HOST_OPT) $(if $(findstring address,$(SANITIZE)),$(CUDA_HOST_ASAN)) \
	    $(KERNEL_ASAN) -c -o $@ $<
$(CUDA_C:%.c=$(B)/%.host.o): $(B)/%.host.o: %.c
	@mkdir -p $(@D)
	$(call say,C)
	$(Q)$(CC) $(CFLAGS_ALL) -fPIC -fvisibility=hidden -c -o $@ $<

# The backend as a toolkit without cuBLASLt's headers makes it: the files that look for them, compiled once more.
CUDA_NO_LT    := $(B)/tests/cuda_host/no_lt
CUDA_NO_LT_CU := linear_choose linear_lt linear_lt_none lt_library
$(CUDA_NO_LT)/%.o: kernels/cuda/%.cu
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CUDA_HOST_CUDA) $(CUDA_HOST_FLAGS) '-DLT_HEADER=<no/cublasLt.h>' -c -o $@ $<
$(CUDA_NO_LT)/libpkmserve_cudahost.so: $(CUDA_NO_LT_CU:%=$(CUDA_NO_LT)/%.o) \
    $(filter-out $(CUDA_NO_LT_CU:%=$(B)/kernels/cuda/%.host.o),$(CUDA_HOST_CU)) $(filter-out %/cublaslt.o,$(CUDA_HOST_OBJ)) \
    $(CUDA_C:%.c=$(B)/%.host.o)
	$(call say,link)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -shared -o $@ $^ $(CUDA_HOST_LINK) $(LDFLAGS) -Wl,-soname,$(@F)

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
$(B)/tests/cuda_host/cases.$(1): $(patsubst %,$(B)/tests/cuda_host/%.$(1).o,cases bugs) $(CUDA_HOST_OBJ)
	$$(call say,link)
	$$(Q)$$(CXX) $$(CUDA_HOST_FLAGS) $$(CUDA_CASES_$(1)) -o $$@ $$^ $$(CUDA_HOST_LINK) $$(LDFLAGS)
endef
$(foreach variant,plain asan tsan,$(eval $(call CUDA_CASES_RULE,$(variant))))
# The same with the way of switching stacks that other processors than x86-64 take.
CUDA_CASES += $(B)/tests/cuda_host/cases.ucontext
CUDA_UCONTEXT := $(patsubst %,$(B)/tests/cuda_host/%.ucontext.o,block fiber grid warp)
$(CUDA_UCONTEXT): $(B)/tests/cuda_host/%.ucontext.o: tests/cuda_host/%.cc
	@mkdir -p $(@D)
	$(call say,C++)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -DCUDA_HOST_UCONTEXT -c -o $@ $<
$(B)/tests/cuda_host/cases.ucontext: $(patsubst %,$(B)/tests/cuda_host/%.plain.o,cases bugs) $(CUDA_UCONTEXT) \
    $(filter-out $(CUDA_UCONTEXT:.ucontext.o=.o),$(CUDA_HOST_OBJ))
	$(call say,link)
	$(Q)$(CXX) $(CUDA_HOST_FLAGS) -o $@ $^ $(CUDA_HOST_LINK) $(LDFLAGS)
ifeq ($(SANITIZE),)
tests: $(CUDA_CASES) $(CUDA_NO_LT)/libpkmserve_cudahost.so
endif
