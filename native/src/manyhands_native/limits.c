/* What the machine itself allows, with nothing of manyhands between: each function does one thing a number of times, without the lock of the
   interpreter, and returns how many seconds that took. `manyhands bench --limits` holds its results against these. */
#include "native.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#define PIECE ((uint64_t)256 << 10) /* of a stream, for each system call: more is not faster */
#define LOOKS 1000                  /* at once, before others may have the processor */
#define PAUSE_MS 10
#define APART 128 /* bytes between two flags: processors fetch lines of 64 in pairs */

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

/* A stream: both ways at once, or one way where an array is empty. */

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

static uint64_t piece(uint64_t at, uint64_t length) { return length - at < PIECE ? length - at : PIECE; }

static Course stream(int fd, const Py_buffer *out, const Py_buffer *in, uint64_t times, double timeout_s) {
    uint64_t sent = 0, got = 0, out_bytes = (uint64_t)out->len, in_bytes = (uint64_t)in->len, looks = 0;
    double until = now_s() + timeout_s;
    while (sent < out_bytes * times || got < in_bytes * times) {
        bool idle = true;
        Course course = WENT;
        if (sent < out_bytes * times) {
            uint64_t at = sent % out_bytes;
            course = took(send(fd, (char *)out->buf + at, piece(at, out_bytes), MSG_DONTWAIT | MSG_NOSIGNAL), &sent, &idle);
        }
        if (course == WENT && got < in_bytes * times) {
            uint64_t at = got % in_bytes;
            course = took(recv(fd, (char *)in->buf + at, piece(at, in_bytes), MSG_DONTWAIT), &got, &idle);
        }
        if (course != WENT) return course;
        if (!idle) {
            looks = 0;
        } else if (++looks >= LOOKS) {
            struct pollfd wanted = {.fd = fd, .events = (short)((sent < out_bytes * times ? POLLOUT : 0) | (got < in_bytes * times ? POLLIN : 0))};
            if (now_s() > until) return LATE;
            poll(&wanted, 1, PAUSE_MS);
        }
    }
    return WENT;
}

static PyObject *measure_stream(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd;
    Py_buffer out, in;
    unsigned long long times;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "iy*w*Kd", &fd, &out, &in, &times, &timeout_s)) return NULL;
    Course course;
    double seconds;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    double begin = now_s();
    course = stream(fd, &out, &in, times, timeout_s);
    error = errno;
    seconds = now_s() - begin;
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&out);
    PyBuffer_Release(&in);
    errno = error;
    return answer(course, seconds);
}

/* Pings: round trips, which the first side begins. */

static Course flags(unsigned char *memory, bool first, uint64_t times, double timeout_s) {
    _Atomic uint64_t *own = (_Atomic uint64_t *)(void *)(memory + (first ? 0 : APART));
    const _Atomic uint64_t *other = (_Atomic uint64_t *)(void *)(memory + (first ? APART : 0));
    uint64_t from = atomic_load_explicit(own, memory_order_relaxed), looks = 0; /* alike on both sides when all before went well */
    double until = now_s() + timeout_s;
    for (uint64_t i = from + 1; i <= from + times; i++) {
        if (first) atomic_store_explicit(own, i, memory_order_release);
        for (looks = 0; atomic_load_explicit(other, memory_order_acquire) != i;)
            if (too_late(&looks, until)) return LATE;
        if (!first) atomic_store_explicit(own, i, memory_order_release);
    }
    return WENT;
}

static PyObject *measure_flags(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    int first;
    unsigned long long times;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "w*pKd", &memory, &first, &times, &timeout_s)) return NULL;
    if (memory.len < 2 * APART || (uintptr_t)memory.buf % 8) {
        PyBuffer_Release(&memory);
        PyErr_Format(PyExc_ValueError, "expected %d aligned bytes for two flags", 2 * APART);
        return NULL;
    }
    Course course;
    double seconds;
    Py_BEGIN_ALLOW_THREADS;
    double begin = now_s();
    course = flags(memory.buf, first, times, timeout_s);
    seconds = now_s() - begin;
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&memory);
    return answer(course, seconds);
}

static Course pings(int fd, bool first, uint64_t times, double timeout_s) {
    char message[8] = {0};
    double until = now_s() + timeout_s;
    for (uint64_t i = 0; i < 2 * times; i++) {
        bool sends = first == (i % 2 == 0), idle;
        uint64_t moved = 0, looks = 0;
        while (moved < sizeof message) {
            idle = true;
            size_t left = sizeof message - moved;
            ssize_t count = sends ? send(fd, message + moved, left, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, message + moved, left, MSG_DONTWAIT);
            Course course = took(count, &moved, &idle);
            if (course != WENT) return course;
            if (idle && too_late(&looks, until)) return LATE;
        }
    }
    return WENT;
}

static PyObject *measure_pings(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd, first;
    unsigned long long times;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "ipKd", &fd, &first, &times, &timeout_s)) return NULL;
    Course course;
    double seconds;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    double begin = now_s();
    course = pings(fd, first, times, timeout_s);
    error = errno;
    seconds = now_s() - begin;
    Py_END_ALLOW_THREADS;
    errno = error;
    return answer(course, seconds);
}

PyMethodDef limit_methods[] = {
    {"measure_copy", measure_copy, METH_VARARGS, "Copy `times` times: (target, source, times) -> seconds."},
    {"measure_add", measure_add, METH_VARARGS, "Add arrays of float32 `times` times: (target, left, right, times) -> seconds."},
    {"measure_stream", measure_stream, METH_VARARGS, "Send and receive arrays over a socket at once: (fd, outgoing, incoming, times, timeout_s) -> seconds."},
    {"measure_flags", measure_flags, METH_VARARGS, "Round trips over two flags in shared memory: (memory, first, times, timeout_s) -> seconds."},
    {"measure_pings", measure_pings, METH_VARARGS, "Round trips of 8 bytes over a socket: (fd, first, times, timeout_s) -> seconds."},
    {NULL, NULL, 0, NULL},
};
