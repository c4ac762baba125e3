/* A stand-in for libnvidia-ml.so.1: one GPU and one part of a GPU (MIG).
 *
 * They have the UUIDs of the devices 1 and 2 of cuda_stub.c.
 */
#include <string.h>

typedef int result_t;
enum { SUCCESS = 0, NOT_FOUND = 6, GPU_IS_LOST = 15 };
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} memory_t;

/* What a test says. */
volatile int stub_lost = 0;

result_t nvmlInit_v2(void) { return SUCCESS; }

const char *nvmlErrorString(result_t result) {
  return result == GPU_IS_LOST ? "the GPU of the stub is lost" : "a result of the stub";
}

result_t nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (!strcmp(uuid, "GPU-01010101-0101-0101-0101-010101010101"))
    *device = (void *)1;
  else if (!strcmp(uuid, "MIG-02020202-0202-0202-0202-020202020202"))
    *device = (void *)2;
  else
    return NOT_FOUND;
  return SUCCESS;
}

result_t nvmlDeviceGetMemoryInfo_v2(void *device, memory_t *memory) {
  if (stub_lost) return GPU_IS_LOST;
  memory->total = 80ull << 30;
  memory->used = (unsigned long long)(size_t)device << 30;
  memory->reserved = 1 << 20;
  memory->free = memory->total - memory->used - memory->reserved;
  return SUCCESS;
}
