/* A libcuda.so.1 without a GPU: the plugin calls it by ctypes, and it passes each call on to fake_driver.py (see through_libcuda.py).
 *
 * Where nobody stands behind, it is a driver of devices whose work is done as soon as it is queued. Names, parameters and numbers are those of
 * cuda.h of CUDA 12 and 13. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <time.h>

#include "upcall.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, UNKNOWN = 999 };
enum { DEVICES = 8, PATIENCE_S = 20 };

typedef void *Context;
typedef void *Event;
typedef void *Stream;

/* A gate before each question for an event, which a test may close: it waits here as behind a full queue, where no Python runs. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_closed, waiting;

void close_gate(int closed);
void close_gate(int closed)
{
    pthread_mutex_lock(&lock);
    is_closed = closed;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int count_waiting(void);
int count_waiting(void)
{
    pthread_mutex_lock(&lock);
    int count = waiting;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Nobody opens the gate if the caller has kept Python's lock: an error ends what would hang. */
static int pass_gate(void)
{
    int failed = 0;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&lock);
    waiting++;
    while (is_closed && !failed)
        failed = pthread_cond_timedwait(&changed, &lock, &end);
    waiting--;
    pthread_mutex_unlock(&lock);
    return failed ? UNKNOWN : SUCCESS;
}

/* The driver itself, and its words for errors, which belong to whoever stands behind. */
FUNCTION(cuInit, cuInit, (unsigned flags), W(flags))

static int say(const char *method, int status, const char **out)
{
    const intptr_t words[] = {W(status)};
    intptr_t made = W("an error");
    int found = upcall ? upcall(method, words, 1, &made) : SUCCESS;
    *out = (const char *)made;
    return found;
}

int cuGetErrorName(int status, const char **out);
int cuGetErrorName(int status, const char **out)
{
    return say("cuGetErrorName", status, out);
}

int cuGetErrorString(int status, const char **out);
int cuGetErrorString(int status, const char **out)
{
    return say("cuGetErrorString", status, out);
}

/* Devices, and the context of each that the whole process shares: its address stands for it. A thread has a current one. */
static char contexts[DEVICES];
static __thread Context current;

int cuDeviceGet(int *out, int number);
int cuDeviceGet(int *out, int number)
{
    const intptr_t words[] = {W(number)};
    intptr_t made = number;
    int is_there = number >= 0 && number < DEVICES;
    int status = upcall ? upcall("cuDeviceGet", words, 1, &made) : is_there ? SUCCESS : INVALID_DEVICE;
    *out = (int)made;
    return status;
}

/* Sixteen bytes, which are two words. */
typedef struct {
    intptr_t words[2];
} Uuid;

#define UUID(name) \
    int name(Uuid *out, int device); \
    int name(Uuid *out, int device) \
    { \
        const intptr_t words[] = {W(device)}; \
        *out = (Uuid){{device, 0}}; \
        return upcall ? upcall(#name, words, 1, out->words) : SUCCESS; \
    }

UUID(cuDeviceGetUuid)
UUID(cuDeviceGetUuid_v2)

int cuDevicePrimaryCtxRetain(Context *out, int device);
int cuDevicePrimaryCtxRetain(Context *out, int device)
{
    const intptr_t words[] = {W(device)};
    intptr_t made = 0;
    int is_there = device >= 0 && device < DEVICES;
    if (upcall) {
        int status = upcall("cuDevicePrimaryCtxRetain", words, 1, &made);
        *out = (Context)made;
        return status;
    }
    *out = is_there ? &contexts[device] : NULL;
    return is_there ? SUCCESS : INVALID_DEVICE;
}

int cuCtxGetCurrent(Context *out);
int cuCtxGetCurrent(Context *out)
{
    intptr_t none = 0, made = W(current);
    int status = upcall ? upcall("cuCtxGetCurrent", &none, 0, &made) : SUCCESS;
    *out = (Context)made;
    return status;
}

int cuCtxSetCurrent(Context context);
int cuCtxSetCurrent(Context context)
{
    const intptr_t words[] = {W(context)};
    if (upcall)
        return upcall("cuCtxSetCurrent", words, 1, NULL);
    current = context;
    return SUCCESS;
}

/* Events. */
static char some_event;

int cuEventCreate(Event *out, unsigned flags);
int cuEventCreate(Event *out, unsigned flags)
{
    const intptr_t words[] = {W(flags)};
    intptr_t made = W(&some_event);
    int status = upcall ? upcall("cuEventCreate", words, 1, &made) : SUCCESS;
    *out = (Event)made;
    return status;
}

int cuEventQuery(Event event);
int cuEventQuery(Event event)
{
    const intptr_t words[] = {W(event)};
    int status = pass_gate();
    if (status != SUCCESS)
        return status;
    return upcall ? upcall("cuEventQuery", words, 1, NULL) : event ? SUCCESS : INVALID_VALUE;
}

FUNCTION(cuEventDestroy_v2, cuEventDestroy_v2, (Event event), W(event))
FUNCTION(cuEventRecord, cuEventRecord, (Event event, Stream stream), W(event), W(stream))

/* Streams, and what is captured from them. The mode is exchanged for the one before, which is CUDA's default, 0. */
FUNCTION(cuStreamWaitEvent, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags), W(stream), W(event), W(flags))
FUNCTION(cuStreamDestroy_v2, cuStreamDestroy_v2, (Stream stream), W(stream))
MAKER(cuStreamIsCapturing, cuStreamIsCapturing, int, (Stream stream, int *out), W(stream))
MAKER(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, int, (int *out), W(*out))
