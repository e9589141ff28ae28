/* What the device was asked to do, for who counts it: CUDA_HOST_TRACE names a file that gets a line
 * of tab-separated fields for each
 *
 *   launch  LIBRARY OFFSET NAME RANGE GRID BLOCK SHARED OVERLAPS   OFFSET: of the kernel in LIBRARY
 *   graph   LAUNCHES                                               which follow
 *   copy    KIND BYTES
 *   fill    BYTES
 *   wait                                                           of the host, for the device */
#include "tests/cuda_host/double.h"

#include <nvtx3/nvToolsExt.h>

#include <dlfcn.h>
#include <stdio.h>
#include <set>
#include <string>
#include <vector>

namespace
{

std::vector<const char *> ranges;
std::set<std::string> texts; /* of ranges, each once */

FILE *file_of(const char *path)
{
    static FILE *file;
    static std::string open_path;
    if (path == nullptr) {
        return nullptr;
    }
    if (open_path != path) {
        if (file != nullptr) {
            fclose(file);
        }
        file = fopen(path, "a");
        if (file == nullptr) {
            die("CUDA_HOST_TRACE: %s cannot be written", path);
        }
        setvbuf(file, nullptr, _IOLBF, 0);
        open_path = path;
    }
    return file;
}

FILE *file_now(void)
{
    return file_of(environment_get()->trace);
}

} // namespace

int nvtxRangePushA(const char *message)
{
    const struct api lock;
    ranges.push_back(texts.insert(message).first->c_str());
    return static_cast<int>(ranges.size()) - 1;
}

int nvtxRangePop(void)
{
    const struct api lock;
    if (ranges.empty()) {
        die("a range ends that has not begun");
    }
    ranges.pop_back();
    return static_cast<int>(ranges.size());
}

const char *trace_range(void)
{
    return ranges.empty() ? "" : ranges.back();
}

void trace_launch(const struct cuda_host_call *call)
{
    FILE *const file = file_now();
    if (file == nullptr) {
        return;
    }
    Dl_info where = {};
    (void)dladdr(call->kernel, &where);
    const char *const slash = where.dli_fname == nullptr ? nullptr : strrchr(where.dli_fname, '/');
    fprintf(file, "launch\t%s\t%tx\t%s\t%s\t%u,%u,%u\t%u,%u,%u\t%zu\t%d\n",
            slash == nullptr ? "" : slash + 1,
            static_cast<const char *>(call->kernel) - static_cast<const char *>(where.dli_fbase),
            call->name, call->range, call->grid.x, call->grid.y, call->grid.z, call->block.x,
            call->block.y, call->block.z, call->shared_bytes, call->overlaps);
}

void trace_graph(size_t n_launch)
{
    if (FILE *const file = file_now()) {
        fprintf(file, "graph\t%zu\n", n_launch);
    }
}

void trace_copy(int kind, size_t bytes)
{
    if (FILE *const file = file_now()) {
        fprintf(file, "copy\t%d\t%zu\n", kind, bytes);
    }
}

void trace_fill(size_t bytes)
{
    if (FILE *const file = file_now()) {
        fprintf(file, "fill\t%zu\n", bytes);
    }
}

void trace_wait(void)
{
    if (FILE *const file = file_now()) {
        fprintf(file, "wait\n");
    }
}
