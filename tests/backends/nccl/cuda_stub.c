/* A stand-in for libcuda.so.1, for machines without a GPU: primary contexts of four
 * devices, streams and events.
 *
 * It is no CUDA. It has the calls of the driver that the NCCL backend makes, keeps
 * count of what it handed out, and refuses a handle that it does not know, so that
 * a test sees what is used after it was freed. What was recorded is reached at once,
 * unless a test says otherwise.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int result_t;
enum { SUCCESS = 0, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, BREAKS_CAPTURE = 900 };
enum { FREE, STREAM, EVENT, TIMED_EVENT };
enum { DEVICES = 4 };

/* What a test says. */
volatile int stub_query = SUCCESS;  /* of every event that was recorded */
volatile int stub_query_ms = 0;     /* every query takes so long */
volatile int stub_capturing = 0;    /* CUstreamCaptureStatus of every stream */
volatile int stub_global_capture = 0; /* another thread captures in global mode */
/* What a test is told. */
volatile int stub_streams, stub_events, stub_stream_flags, stub_waits, stub_priority;
volatile int stub_contexts;         /* bit n: device n has its primary context */
volatile int stub_broken_captures;  /* unsafe calls of threads that may not */
volatile int stub_switches;         /* calls that changed a thread's context */

static struct { int kind, recorded; } things[4096];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void *make(int kind) {
  void *handle = NULL;
  pthread_mutex_lock(&mutex);
  for (int i = 1; i < 4096; i++)
    if (things[i].kind == FREE) {
      things[i].kind = kind;
      things[i].recorded = 0;
      handle = (void *)(size_t)i;
      break;
    }
  pthread_mutex_unlock(&mutex);
  return handle;
}

static int kind_of(void *handle) {
  return (size_t)handle < 4096 ? things[(size_t)handle].kind : FREE;
}

static int is_event(void *handle) { return kind_of(handle) >= EVENT; }

/* The legacy stream has no handle. */
static int is_stream(void *handle) { return !handle || kind_of(handle) == STREAM; }

result_t cuGetProcAddress_v2(const char *name, void **function, int version,
                             unsigned long flags, int *status) {
  char own[128];
  (void)version; (void)flags;
  snprintf(own, sizeof own, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, own);
  if (status) *status = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}

result_t cuGetProcAddress(const char *name, void **function, int version,
                          unsigned long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

result_t cuInit(unsigned flags) { (void)flags; return SUCCESS; }
result_t cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }

result_t cuGetErrorString(result_t result, const char **text) {
  *text = result == INVALID_HANDLE ? "a handle that the stub does not know"
                                   : "a result of the stub";
  return SUCCESS;
}

/* CUstreamCaptureMode of a thread: GLOBAL unless it says RELAXED, which is 2. */
static __thread int capture_mode;

result_t cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return SUCCESS;
}

/* As the driver does: a potentially unsafe call ends the capture. */
static int breaks_capture(void) {
  if (!stub_global_capture || capture_mode == 2) return 0;
  __atomic_add_fetch(&stub_broken_captures, 1, __ATOMIC_SEQ_CST);
  return 1;
}

result_t cuDeviceGetCount(int *count) { *count = DEVICES; return SUCCESS; }

result_t cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}

/* The bytes of the UUID of device n are n. */
result_t cuDeviceGetUuid(char *uuid, int device) {
  memset(uuid, device, 16);
  return SUCCESS;
}

/* The context of device n is the address of contexts[n]. */
static char contexts[DEVICES];
static __thread char *current;

result_t cuDevicePrimaryCtxRetain(void **context, int device) {
  if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
  __atomic_or_fetch(&stub_contexts, 1 << device, __ATOMIC_SEQ_CST);
  *context = &contexts[device];
  return SUCCESS;
}

result_t cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
  *flags = 0;
  *active = stub_contexts >> device & 1;
  return SUCCESS;
}

result_t cuCtxGetCurrent(void **context) { *context = current; return SUCCESS; }

result_t cuCtxSetCurrent(void *context) {
  char *wanted = context;
  if (wanted && (wanted < contexts || wanted >= contexts + DEVICES))
    return INVALID_CONTEXT;
  current = wanted;
  __atomic_add_fetch(&stub_switches, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

result_t cuCtxGetDevice(int *device) {
  if (!current) return INVALID_CONTEXT;
  *device = (int)(current - contexts);
  return SUCCESS;
}

result_t cuStreamCreate(void **stream, unsigned flags) {
  if (!current) return INVALID_CONTEXT;
  *stream = make(STREAM);
  stub_stream_flags = (int)flags;
  __atomic_add_fetch(&stub_streams, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

result_t cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  if (!current) return INVALID_CONTEXT;
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}

result_t cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  stub_priority = priority;
  return cuStreamCreate(stream, flags);
}

result_t cuStreamDestroy_v2(void *stream) {
  if (breaks_capture()) return BREAKS_CAPTURE;
  if (!stream || !is_stream(stream)) return INVALID_HANDLE;
  things[(size_t)stream].kind = FREE;
  __atomic_sub_fetch(&stub_streams, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

result_t cuStreamIsCapturing(void *stream, int *status) {
  if (!is_stream(stream)) return INVALID_HANDLE;
  *status = stub_capturing;
  return SUCCESS;
}

result_t cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  if (!is_stream(stream) || !is_event(event) || flags) return INVALID_HANDLE;
  stub_waits++;
  return SUCCESS;
}

result_t cuEventCreate(void **event, unsigned flags) {
  if (!current) return INVALID_CONTEXT;
  /* CU_EVENT_DISABLE_TIMING is 2. */
  *event = make(flags & 2 ? EVENT : TIMED_EVENT);
  __atomic_add_fetch(&stub_events, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

result_t cuEventDestroy_v2(void *event) {
  if (breaks_capture()) return BREAKS_CAPTURE;
  if (!is_event(event)) return INVALID_HANDLE;
  things[(size_t)event].kind = FREE;
  __atomic_sub_fetch(&stub_events, 1, __ATOMIC_SEQ_CST);
  return SUCCESS;
}

result_t cuEventRecord(void *event, void *stream) {
  if (!is_event(event) || !is_stream(stream)) return INVALID_HANDLE;
  things[(size_t)event].recorded = 1;
  return SUCCESS;
}

result_t cuEventQuery(void *event) {
  if (breaks_capture()) return BREAKS_CAPTURE;
  if (!is_event(event) || !things[(size_t)event].recorded) return INVALID_HANDLE;
  if (stub_query_ms) usleep(stub_query_ms * 1000);
  return stub_query;
}

result_t cuEventElapsedTime_v2(float *ms, void *start, void *end) {
  if (kind_of(start) != TIMED_EVENT || kind_of(end) != TIMED_EVENT)
    return INVALID_HANDLE;
  *ms = 2.5f;
  return SUCCESS;
}

result_t cuEventElapsedTime(float *ms, void *start, void *end) {
  return cuEventElapsedTime_v2(ms, start, end);
}
