/* What the machine itself allows, with nothing of oneaccord between: each function does one thing a number of times, without the lock of the
   interpreter, and returns the seconds that this took; of pings, the median of a round trip. `oneaccord bench --limits` holds its results against these. */
#include "native.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>

#define PIECE ((uint64_t)256 << 10) /* of a stream, for each system call: more is not faster */
#define TRIES 20                    /* of a stream both ways, before it sleeps: who tries on and on keeps the kernel from moving anything */
#define LONE_TRIES 200              /* of a stream one way */
#define PAUSE_MS 10
#define LOOKS 1000 /* for a ping at once, before others may have the processor */
#define TRIPS 8    /* in a batch of pings: more than reading the clock takes, less than until somebody else has the processor */
#define MOST_BATCHES 1024
#define APART 128  /* bytes between two flags: processors fetch lines of 64 in pairs */

typedef enum { WENT, LATE, BROKE, CUT } Course;

static PyObject *answer(Course course, double seconds) {
    if (course == LATE) PyErr_SetString(PyExc_TimeoutError, "the other side did not come in time");
    if (course == BROKE) PyErr_SetFromErrno(PyExc_OSError);
    if (course == CUT) PyErr_SetString(PyExc_ConnectionError, "the other side closed the connection");
    return course == WENT ? PyFloat_FromDouble(seconds) : NULL;
}

/* Say that nothing has come; tell whether the time is up. */
static bool too_late(uint64_t *looks, double until) {
    if (++*looks < LOOKS) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        return false;
    }
    sched_yield();
    return now_s() > until;
}

/* Memory. */

/* The compiler must neither leave out nor merge what is done several times. */
#define AGAIN __asm__ volatile("" ::: "memory")

static void copy(void *const *arrays, size_t nbytes) { memcpy(arrays[0], arrays[1], nbytes); }

static inline __attribute__((always_inline)) void sum(void *const *arrays, size_t nbytes) {
    float *target = arrays[0];
    const float *left = arrays[1], *right = arrays[2];
    for (size_t i = 0; i < nbytes / sizeof(float); i++) target[i] = left[i] + right[i];
}

static void add(void *const *arrays, size_t nbytes) { sum(arrays, nbytes); }

#if defined(__x86_64__)
/* As wide as NumPy adds. */
__attribute__((target("avx2"))) static void add_wide(void *const *arrays, size_t nbytes) { sum(arrays, nbytes); }
#endif

static PyObject *repeated(PyObject *args, int count, void (*action)(void *const *, size_t)) {
    PyObject *given[3] = {NULL};
    unsigned long long times;
    if (count == 2 ? !PyArg_ParseTuple(args, "OOK", &given[0], &given[1], &times)
                   : !PyArg_ParseTuple(args, "OOOK", &given[0], &given[1], &given[2], &times))
        return NULL;
    Py_buffer views[3];
    void *arrays[3];
    PyObject *result = NULL;
    int held = 0;
    for (; held < count; held++) {
        if (PyObject_GetBuffer(given[held], &views[held], held ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto done;
        arrays[held] = views[held].buf;
        if (views[held].len != views[0].len || views[held].len % (Py_ssize_t)sizeof(float) ||
            (uintptr_t)arrays[held] % sizeof(float)) {
            held++;
            PyErr_SetString(PyExc_ValueError, "expected arrays of one length, of whole aligned numbers of 4 bytes");
            goto done;
        }
    }
    double seconds;
    Py_BEGIN_ALLOW_THREADS;
    double begin = now_s();
    for (unsigned long long i = 0; i < times; i++) {
        action(arrays, (size_t)views[0].len);
        AGAIN;
    }
    seconds = now_s() - begin;
    Py_END_ALLOW_THREADS;
    result = PyFloat_FromDouble(seconds);
done:
    while (held) PyBuffer_Release(&views[--held]);
    return result;
}

static PyObject *measure_copy(PyObject *Py_UNUSED(module), PyObject *args) { return repeated(args, 2, copy); }

static PyObject *measure_add(PyObject *Py_UNUSED(module), PyObject *args) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return repeated(args, 3, add_wide);
#endif
    return repeated(args, 3, add);
}

/* A stream: both ways at once, or one way where there is nothing to send or to receive. It begins anew at the end of its memory. */
typedef struct {
    Py_buffer memory;
    unsigned long long total; /* bytes */
} Way;

/* Tell what a system call on a socket did: it moved bytes, or would have had to wait, or failed. */
static Course took(ssize_t count, uint64_t *moved, bool *idle) {
    if (count > 0) {
        *moved += (uint64_t)count;
        *idle = false;
        return WENT;
    }
    if (!count) return CUT;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? WENT : BROKE;
}

/* Return the memory for what comes next, and how many bytes of it. */
static char *next(const Way *way, uint64_t done, size_t *count) {
    uint64_t length = (uint64_t)way->memory.len, at = done % length, left = way->total - done;
    if (left > length - at) left = length - at;
    *count = (size_t)(left < PIECE ? left : PIECE);
    return (char *)way->memory.buf + at;
}

static Course stream(int fd, const Way *out, const Way *in, double timeout_s) {
    uint64_t sent = 0, got = 0;
    unsigned tries = 0, most = out->total && in->total ? TRIES : LONE_TRIES;
    double until = now_s() + timeout_s;
    while (sent < out->total || got < in->total) {
        bool idle = true;
        size_t count;
        Course course = WENT;
        if (sent < out->total) {
            const char *from = next(out, sent, &count);
            course = took(send(fd, from, count, MSG_DONTWAIT | MSG_NOSIGNAL), &sent, &idle);
        }
        if (course == WENT && got < in->total) {
            char *into = next(in, got, &count);
            course = took(recv(fd, into, count, MSG_DONTWAIT), &got, &idle);
        }
        if (course != WENT) return course;
        if (!idle) {
            tries = 0;
        } else if (++tries >= most) {
            struct pollfd wanted = {.fd = fd, .events = (short)((sent < out->total ? POLLOUT : 0) | (got < in->total ? POLLIN : 0))};
            if (now_s() > until) return LATE;
            poll(&wanted, 1, PAUSE_MS);
        }
    }
    return WENT;
}

static PyObject *measure_stream(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    Way out, in;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "iy*Kw*Kd", &fd, &out.memory, &out.total, &in.memory, &in.total, &timeout_s)) return NULL;
    bool is_possible = (!out.total || out.memory.len) && (!in.total || in.memory.len);
    Course course = WENT;
    double seconds = 0.0;
    int error = 0;
    if (is_possible) {
        Py_BEGIN_ALLOW_THREADS;
        double begin = now_s();
        course = stream(fd, &out, &in, timeout_s);
        error = errno;
        seconds = now_s() - begin;
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&out.memory);
    PyBuffer_Release(&in.memory);
    errno = error;
    if (is_possible) return answer(course, seconds);
    PyErr_SetString(PyExc_ValueError, "there is no memory for the bytes of a stream");
    return NULL;
}

/* Pings: batches of round trips, which the first side begins. The median of the batches is not that of a moment when others had the processor. */

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Sort the times of batches; return the seconds of a round trip. */
static double median(double *batches, size_t count) {
    qsort(batches, count, sizeof *batches, compare);
    return batches[count / 2] / TRIPS;
}

static bool batches_fit(unsigned long long count) {
    if (count && count <= MOST_BATCHES) return true;
    PyErr_Format(PyExc_ValueError, "expected 1 to %d batches", MOST_BATCHES);
    return false;
}

static Course flags(unsigned char *memory, bool first, double *batches, uint64_t count, double timeout_s) {
    _Atomic uint64_t *own = (_Atomic uint64_t *)(void *)(memory + (first ? 0 : APART));
    const _Atomic uint64_t *other = (_Atomic uint64_t *)(void *)(memory + (first ? APART : 0));
    uint64_t from = atomic_load_explicit(own, memory_order_relaxed), looks = 0; /* alike on both sides when all before went well */
    double begin = now_s(), until = begin + timeout_s;
    for (uint64_t i = from + 1; i <= from + count * TRIPS; i++) {
        if (first) atomic_store_explicit(own, i, memory_order_release);
        for (looks = 0; atomic_load_explicit(other, memory_order_acquire) != i;)
            if (too_late(&looks, until)) return LATE;
        if (!first) atomic_store_explicit(own, i, memory_order_release);
        if ((i - from) % TRIPS == 0) {
            double end = now_s();
            batches[(i - from) / TRIPS - 1] = end - begin;
            begin = end;
        }
    }
    return WENT;
}

static PyObject *measure_flags(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    int first;
    unsigned long long count;
    double timeout_s, batches[MOST_BATCHES];
    if (!PyArg_ParseTuple(args, "w*pKd", &memory, &first, &count, &timeout_s)) return NULL;
    if (!batches_fit(count)) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    if (memory.len < 2 * APART || (uintptr_t)memory.buf % 8) {
        PyBuffer_Release(&memory);
        PyErr_Format(PyExc_ValueError, "expected %d aligned bytes for two flags", 2 * APART);
        return NULL;
    }
    Course course;
    Py_BEGIN_ALLOW_THREADS;
    course = flags(memory.buf, first, batches, count, timeout_s);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&memory);
    return answer(course, course == WENT ? median(batches, count) : 0.0);
}

static Course pings(int fd, bool first, double *batches, uint64_t count, double timeout_s) {
    char message[8] = {0};
    double begin = now_s(), until = begin + timeout_s;
    for (uint64_t i = 0; i < 2 * TRIPS * count; i++) {
        bool sends = first == (i % 2 == 0), idle;
        uint64_t moved = 0, looks = 0;
        while (moved < sizeof message) {
            idle = true;
            size_t left = sizeof message - moved;
            ssize_t went = sends ? send(fd, message + moved, left, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, message + moved, left, MSG_DONTWAIT);
            Course course = took(went, &moved, &idle);
            if (course != WENT) return course;
            if (idle && too_late(&looks, until)) return LATE;
        }
        if ((i + 1) % (2 * TRIPS) == 0) {
            double end = now_s();
            batches[i / (2 * TRIPS)] = end - begin;
            begin = end;
        }
    }
    return WENT;
}

static PyObject *measure_pings(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd, first;
    unsigned long long count;
    double timeout_s, batches[MOST_BATCHES];
    if (!PyArg_ParseTuple(args, "ipKd", &fd, &first, &count, &timeout_s) || !batches_fit(count)) return NULL;
    Course course;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    course = pings(fd, first, batches, count, timeout_s);
    error = errno;
    Py_END_ALLOW_THREADS;
    errno = error;
    return answer(course, course == WENT ? median(batches, count) : 0.0);
}

PyMethodDef limit_methods[] = {
    {"measure_copy", measure_copy, METH_VARARGS, "Copy `times` times: (target, source, times) -> seconds."},
    {"measure_add", measure_add, METH_VARARGS, "Add arrays of float32 `times` times: (target, left, right, times) -> seconds."},
    {"measure_stream", measure_stream, METH_VARARGS, "Send and receive over a socket at once: (fd, outgoing, bytes, incoming, bytes, timeout_s) -> seconds."},
    {"measure_flags", measure_flags, METH_VARARGS, "Batches of round trips over two flags in shared memory: (memory, first, batches, timeout_s) -> seconds of one trip."},
    {"measure_pings", measure_pings, METH_VARARGS, "Batches of round trips of 8 bytes over a socket: (fd, first, batches, timeout_s) -> seconds of one trip."},
    {NULL, NULL, 0, NULL},
};
