/* A stand-in for libnccl.so.2, for machines without a GPU: groups of one rank.
 *
 * It is no NCCL. It takes the calls that nccl4py makes, does what they mean for
 * one rank on host memory, and lets a test say what the next ones return.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int result_t;
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5,
       IN_PROGRESS = 7 };
typedef struct { char bytes[128]; } unique_id_t;
typedef struct { int size, rank, aborted, suspended; } comm_t;

/* What a test says. */
volatile int stub_version = 22807;
volatile int stub_async = SUCCESS;   /* of every communicator */
volatile int stub_call = SUCCESS;    /* of every op */
volatile int stub_slow_ms = 0;       /* every op takes so long */
volatile int stub_abort_ms = 0;
/* What a test is told. */
volatile int stub_revokes;
volatile int stub_inits, stub_aborts, stub_destroys, stub_calls, stub_groups;
volatile int stub_in_call;
volatile int stub_splits, stub_shrinks, stub_excluded, stub_shrink_flags;
volatile int stub_homeless;  /* calls of threads without a CUDA context */
int stub_blocking, stub_min_ctas, stub_max_ctas;
/* As NCCL does, the pointer is kept, not the text. */
const char *stub_comm_name;
double stub_factor;

static comm_t comms[256];
static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/* NCCL restores the device of the thread, which without a context is device 0. */
static void need_context(void) {
  int (*get)(void **) = (int (*)(void **))dlsym(RTLD_DEFAULT, "cuCtxGetCurrent");
  void *context = NULL;
  if (!get || get(&context) || !context)
    __atomic_add_fetch(&stub_homeless, 1, __ATOMIC_SEQ_CST);
}

static result_t called(void) {
  need_context();
  stub_in_call = 1;
  stub_calls++;
  if (stub_slow_ms) usleep(stub_slow_ms * 1000);
  stub_in_call = 0;
  return stub_call;
}

result_t ncclGetVersion(int *version) { *version = stub_version; return SUCCESS; }

result_t ncclGetUniqueId(unique_id_t *id) {
  memset(id->bytes, 7, sizeof id->bytes);
  return SUCCESS;
}

const char *ncclGetErrorString(result_t result) {
  return result == SYSTEM_ERROR ? "a system error of the stub" : "a result of the stub";
}

const char *ncclGetLastError(void *comm) { (void)comm; return "the stub's last error"; }

result_t ncclCommInitRankScalable(comm_t **comm, int size, int rank, int ids,
                                  unique_id_t *id, int *config) {
  need_context();
  (void)ids; (void)id;
  /* ncclConfig_t: size (of 8 bytes), magic, version, then these. */
  enum { BLOCKING = 4, MIN_CTAS = 6, MAX_CTAS = 7, COMM_NAME = 12 };
  if (config) {
    stub_blocking = config[BLOCKING];
    stub_min_ctas = config[MIN_CTAS];
    stub_max_ctas = config[MAX_CTAS];
    memcpy(&stub_comm_name, &config[COMM_NAME], sizeof stub_comm_name);
    /* As NCCL does: before the defaults are set, what is not set is INT_MIN. */
    if (stub_min_ctas > stub_max_ctas) return INVALID_ARGUMENT;
  }
  *comm = &comms[stub_inits++ % 256];
  **comm = (comm_t){size, rank, 0, 0};
  return stub_async == IN_PROGRESS ? IN_PROGRESS : SUCCESS;
}

/* As NCCL does, the handle is written when the new communicator is there, and the
   old one is in progress until then: until a test says that it is no longer. */
static comm_t **born;

static result_t descend(comm_t *parent, comm_t **comm, int size) {
  need_context();
  *comm = NULL;
  born = comm;
  stub_async = IN_PROGRESS;
  comms[stub_inits % 256] = (comm_t){size, parent->rank, 0, 0};
  return IN_PROGRESS;
}

result_t ncclCommSplit(comm_t *parent, int color, int key, comm_t **comm,
                       void *config) {
  (void)config;
  if (color != 0 || key != parent->rank) return SYSTEM_ERROR;
  stub_splits++;
  return descend(parent, comm, parent->size);
}

result_t ncclCommShrink(comm_t *parent, int *excluded, int count, comm_t **comm,
                        void *config, int flags) {
  (void)config;
  stub_shrinks++;
  stub_excluded = excluded[0];
  stub_shrink_flags = flags;
  return descend(parent, comm, parent->size - count);
}

result_t ncclCommGetAsyncError(comm_t *comm, result_t *result) {
  if (!comm) return INVALID_ARGUMENT;
  if (born && stub_async == SUCCESS) {
    *born = &comms[stub_inits++ % 256];
    born = NULL;
  }
  *result = stub_async;
  return SUCCESS;
}

result_t ncclCommAbort(comm_t *comm) {
  need_context();
  if (stub_abort_ms) usleep(stub_abort_ms * 1000);
  comm->aborted = 1;
  stub_aborts++;
  return SUCCESS;
}

result_t ncclCommRevoke(comm_t *comm, int flags) {
  (void)comm;
  need_context();
  if (flags) return INVALID_ARGUMENT;
  stub_revokes++;
  return stub_async == IN_PROGRESS ? IN_PROGRESS : SUCCESS;
}

result_t ncclCommSuspend(comm_t *comm, int flags) {
  need_context();
  if (flags != 1) return INVALID_ARGUMENT; /* NCCL_SUSPEND_MEM */
  if (comm->suspended) return INVALID_USAGE;
  comm->suspended = 1;
  return SUCCESS;
}

result_t ncclCommResume(comm_t *comm) {
  need_context();
  if (!comm->suspended) return INVALID_USAGE;
  comm->suspended = 0;
  return SUCCESS;
}

result_t ncclCommMemStats(comm_t *comm, int stat, uint64_t *value) {
  need_context();
  if (stat < 0 || stat > 3) return INVALID_ARGUMENT;
  *value = stat == 1 ? (uint64_t)comm->suspended : 1000u * (stat + 1);
  return SUCCESS;
}

result_t ncclCommFinalize(comm_t *comm) {
  (void)comm;
  need_context();
  return SUCCESS;
}

result_t ncclCommDestroy(comm_t *comm) {
  (void)comm;
  need_context();
  stub_destroys++;
  return SUCCESS;
}

result_t ncclGroupStart(void) { return SUCCESS; }
result_t ncclGroupEnd(void) { stub_groups++; return SUCCESS; }

static result_t move(const void *from, void *to, size_t count, int type) {
  if (from && to && from != to) memcpy(to, from, count * sizes[type]);
  return called();
}

result_t ncclAllReduce(const void *from, void *to, size_t count, int type, int op,
                       comm_t *comm, void *stream) {
  (void)op; (void)comm; (void)stream;
  return move(from, to, count, type);
}

result_t ncclBroadcast(const void *from, void *to, size_t count, int type, int root,
                       comm_t *comm, void *stream) {
  (void)root; (void)comm; (void)stream;
  return move(from, to, count, type);
}

result_t ncclReduce(const void *from, void *to, size_t count, int type, int op,
                    int root, comm_t *comm, void *stream) {
  (void)op; (void)root; (void)comm; (void)stream;
  return move(from, to, count, type);
}

result_t ncclAllGather(const void *from, void *to, size_t count, int type,
                       comm_t *comm, void *stream) {
  (void)comm; (void)stream;
  return move(from, to, count, type);
}

result_t ncclReduceScatter(const void *from, void *to, size_t count, int type, int op,
                           comm_t *comm, void *stream) {
  (void)op; (void)comm; (void)stream;
  return move(from, to, count, type);
}

static const void *sent;

result_t ncclSend(const void *from, size_t count, int type, int peer, comm_t *comm,
                  void *stream) {
  (void)count; (void)type; (void)peer; (void)comm; (void)stream;
  sent = from;
  return called();
}

result_t ncclRecv(void *to, size_t count, int type, int peer, comm_t *comm,
                  void *stream) {
  (void)peer; (void)comm; (void)stream;
  return move(sent, to, count, type);
}

result_t ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence,
                                  comm_t *comm) {
  (void)residence; (void)comm;
  stub_factor = type == 8 ? *(double *)scalar : *(float *)scalar;
  *op = 9;
  return SUCCESS;
}

result_t ncclRedOpDestroy(int op, comm_t *comm) { (void)op; (void)comm; return SUCCESS; }
