// One rank of a communicator without other ranks. It prints every call, with the bytes sent; the
// bytes received from rank r are 100 + r. FAIL_AT names a call that fails, with its number:
// "ncclSend 2". With SLOW, a communicator does not block.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef VERSION
#define VERSION 22809
#endif

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct comm { int rank, ranks, device, polls; } *ncclComm_t;

static int depth;

#define SAY(...) dprintf(1, "call: " __VA_ARGS__)
#define CALL(name) static int calls; if (fails(name, ++calls)) return 6

static int fails(const char *name, int call) {
    char wanted[100];
    snprintf(wanted, sizeof wanted, "%s %d", name, call);
    const char *at = getenv("FAIL_AT");
    return at && !strcmp(at, wanted);
}

// The status of a call of a non-blocking communicator; the next two polls of its state return "in
// progress".
static int later(ncclComm_t comm) {
    if (!getenv("SLOW") || depth) return 0;
    comm->polls = 2;
    return 7;
}

int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : "another error"; }
const char *ncclGetLastError(ncclComm_t comm) { return "the stand-in was told to fail\n"; }

int ncclGetUniqueId(ncclUniqueId *id) {
    CALL("ncclGetUniqueId");
    for (int i = 0; i < 128; i++) id->internal[i] = (char)(3 * i);
    return 0;
}

static struct comm the_comm;

int ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    CALL("ncclCommInitRank");
    for (int i = 0; i < 128; i++) if (id.internal[i] != (char)(3 * i)) return 5;
    int (*get_current)(char **) = dlsym(dlopen("libcuda.so", RTLD_NOW), "cuCtxGetCurrent");
    char *context;
    get_current(&context);
    the_comm = (struct comm){rank, ranks, (int)(context - (char *)0x1000), 0};
    *comm = &the_comm;
    SAY("init %d of %d on device %d\n", rank, ranks, the_comm.device);
    return later(*comm);
}

// For a communicator of another owner.
ncclComm_t standin_comm(int rank, int ranks, int device) {
    the_comm = (struct comm){rank, ranks, device, getenv("SLOW") ? 2 : 0};
    return &the_comm;
}

#ifndef NO_FINALIZE
int ncclCommFinalize(ncclComm_t comm) { CALL("ncclCommFinalize"); SAY("finalize\n"); return later(comm); }
#endif
int ncclCommDestroy(ncclComm_t comm) { CALL("ncclCommDestroy"); SAY("destroy\n"); return 0; }
int ncclCommAbort(ncclComm_t comm) { SAY("abort\n"); return 0; }
int ncclCommCount(ncclComm_t comm, int *count) { *count = comm->ranks; return comm->polls ? 4 : 0; }
int ncclCommCuDevice(ncclComm_t comm, int *device) { *device = comm->device; return comm->polls ? 4 : 0; }
int ncclCommUserRank(ncclComm_t comm, int *rank) { *rank = comm->rank; return comm->polls ? 4 : 0; }

int ncclCommGetAsyncError(ncclComm_t comm, int *state) {
    static int calls;
    *state = fails("async", ++calls) ? 6 : comm->polls > 0 ? 7 : 0;
    if (comm->polls > 0) comm->polls--;
    return 0;
}

static ncclComm_t in_group;
int ncclGroupStart(void) { CALL("ncclGroupStart"); depth++; SAY("group {\n"); return 0; }
int ncclGroupEnd(void) { depth--; SAY("}\n"); CALL("ncclGroupEnd"); return in_group ? later(in_group) : 0; }

int ncclSend(const unsigned char *data, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    CALL("ncclSend");
    in_group = comm;
    SAY("send to %d type %d:", peer, type);
    for (size_t i = 0; i < count; i++) dprintf(1, " %d", data[i]);
    dprintf(1, "\n");
    return 0;
}

int ncclRecv(unsigned char *data, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    CALL("ncclRecv");
    in_group = comm;
    SAY("receive %zu from %d type %d\n", count, peer, type);
    memset(data, 100 + peer, count);
    return 0;
}

int ncclAllGather(const unsigned char *from, unsigned char *to, size_t count, int type, ncclComm_t comm, void *stream) {
    CALL("ncclAllGather");
    SAY("all_gather %zu type %d from %td\n", count, type, from - to);
    for (int rank = 0; rank < comm->ranks; rank++) if (rank != comm->rank) memset(to + rank * count, 100 + rank, count);
    return later(comm);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, ncclComm_t comm, void *stream) {
    CALL("ncclAllReduce");
    SAY("all_reduce %zu type %d op %d%s\n", count, type, op, from == to ? " in place" : "");
    return later(comm);
}
