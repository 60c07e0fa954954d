// Two devices whose memory is the host's and whose streams finish at once. Prints the calls that
// order streams.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;

// A context is a number, which NCCL's stand-in also knows.
static _Thread_local char *current;
#define CONTEXT(device) ((char *)0x1000 + (device))

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = CONTEXT(device); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuGetErrorName(int code, const char **text) { *text = "STANDIN_NAME"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "a driver's error"; return 0; }

int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return 0; }
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
int cuStreamSynchronize(void *stream) { return 0; }

// An event stores whether and where it was recorded: waiting for an unrecorded event does nothing.
struct event { int recorded; void *stream; };
int cuEventCreate(struct event **event, unsigned flags) { *event = calloc(1, sizeof(struct event)); return 0; }
int cuEventDestroy_v2(struct event *event) { free(event); return 0; }
int cuEventRecord(struct event *event, void *stream) {
    event->recorded = 1;
    event->stream = stream;
    dprintf(1, "call: record on the %s stream\n", stream ? "other" : "default");
    return 0;
}
int cuStreamWaitEvent(void *stream, struct event *event, unsigned flags) {
    if (event->recorded && event->stream != stream)
        dprintf(1, "call: the %s stream waits\n", stream ? "other" : "default");
    return 0;
}

int cuMemAllocAsync(address *memory, size_t bytes, void *stream) { *memory = (address)calloc(bytes, 1); return 0; }
int cuMemFreeAsync(address memory, void *stream) { free((void *)memory); return 0; }
int cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) { memset((void *)to, value, bytes); return 0; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) { memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) { memcpy(to, (void *)from, bytes); return 0; }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
    dprintf(1, "call: copy %zu\n", bytes);
    memcpy((void *)to, (void *)from, bytes);
    return 0;
}
