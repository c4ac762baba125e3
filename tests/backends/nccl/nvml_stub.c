/* A stand-in for libnvidia-ml.so.1: one GPU and one part of a GPU (MIG).
 *
 * They have the UUIDs of the devices 1 and 2 of cuda_stub.c.
 */
#include <string.h>
#include <unistd.h>

typedef int result_t;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} memory_t;

typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} process_t;

/* What a test says; `processes`: 0 where the driver does not list any, 1 another one,
 * 2 this one, too, 3 this one, of an unknown size. */
volatile int stub_lost = 0, stub_processes = 2;

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

result_t nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *found) {
  unsigned there = stub_processes < 2 ? 1 : 2;
  if (!stub_processes) return NOT_SUPPORTED;
  if (*count < there) {
    *count = there;
    return INSUFFICIENT_SIZE;
  }
  *count = there;
  found[0] = (process_t){1, 5ull << 30, 0, 0};
  if (there == 2)
    found[1] = (process_t){(unsigned)getpid(), stub_processes == 3 ? -1ull : 3ull << 29, 0, 0};
  return SUCCESS;
}
