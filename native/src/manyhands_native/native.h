/* What the files of the compiled executor share. */
#ifndef MANYHANDS_NATIVE_H
#define MANYHANDS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL manyhands_native_numpy
#ifndef IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HEADER_BYTES 64
#define TYPE_OF(self) Py_TYPE((PyObject *)(self))

/* How one end of a conversation is carried: the two kinds of mailboxes that C knows. */
typedef enum { NO_PORT, RING_PORT, STREAM_PORT } PortKind;

/* What came of trying to move a message. Whatever is unusual is STOPPED, with nothing done that could not be done again: Python goes on from
   there, and says what is wrong. */
typedef enum { MOVED, STOPPED } Outcome;

/* One peer in shared memory: the two rings of manyhands_shm.link, whose words both forms read and write. */
typedef struct {
    PyObject_HEAD
    uint64_t sent, received, room; /* slots that were filled, read, and may be filled */
    uint64_t next_out, next_in;
    unsigned char *out, *into;
    uint64_t slots, slot_bytes, labels, payloads, line, number_at;
    const _Atomic uint64_t *sleepers;
    bool fenced;
    unsigned spins;
    double spin_s;
    Py_buffer views[3]; /* out, into, sleepers: held as long as this lives */
    int held;
    PyObject *ring; /* wakes the peer's sleepers */
} Ring;

/* One peer over a socket: the mailbox of manyhands_tcp.mailbox. */
typedef struct {
    PyObject_HEAD
    int fd;
    unsigned spins;
    double spin_s;
    unsigned char *outgoing, *incoming; /* HEADER_BYTES, then the slot */
    uint64_t slot_bytes;
    uint64_t sent, sending; /* of the message in `outgoing`: bytes that the kernel took, and all; equal where nothing is left */
    uint64_t got;           /* bytes of the next message that have come */
    Py_buffer views[2];
    int held;
} Stream;

/* The turn and the numbers of calls that run one after the other: manyhands.calls.order.books. */
typedef struct {
    PyObject *what;
    uint64_t call;
    double started, finished;
} Short;
typedef struct Books {
    PyObject_HEAD
    PyObject *queue; /* what stands for turns that are waited for, from `first` on */
    Py_ssize_t first;
    bool busy;
    long long channel;
    uint64_t next, messages, call, ended_count;
    double started;
    PyObject *what; /* the short call that runs */
    struct Books *counted;
    Short *ended; /* a circle of the last `kept` */
    uint64_t kept;
} Books;

bool books_take(Books *books);
bool books_free(Books *books);
uint64_t books_begin(Books *books, PyObject *what);
void books_leave(Books *books);

/* A dtype and a shape. */
typedef struct {
    PyArray_Descr *dtype;
    int ndim;
    npy_intp *lengths;
    size_t nbytes;
} Kind;

bool kind_of(PyObject *example, Kind *kind);
void kind_release(Kind *kind);
bool kind_fits(const Kind *kind, PyArrayObject *array);
PyArrayObject *kind_place(const Kind *kind, PyObject *out);

typedef struct {
    PyTypeObject *ring, *stream, *program, *books, *caller, *call, *send, *recv, *exchange, *low;
} State;

extern PyType_Spec ring_spec, stream_spec, program_spec, books_spec, caller_spec, call_spec, send_spec, recv_spec, exchange_spec, low_spec;

extern PyType_Spec ring_spec, stream_spec, program_spec;
extern PyMethodDef limit_methods[];

State *state_of(PyTypeObject *type);

/* Both return with the lock of the interpreter held as they were called; `idle` is set once the lock was released to wait. */
typedef struct {
    PyThreadState *released; /* NULL while this thread holds the interpreter's lock */
    double spin_s;
    unsigned spins;
} Patience;

double now_s(void);
bool patience_allows(Patience *patience, unsigned *tries, double *until);
void patience_release(Patience *patience);
void patience_end(Patience *patience);

/* Rings. */
bool ring_has_room(Ring *ring);
void ring_post(Ring *ring, const unsigned char *header, const unsigned char *payload, size_t nbytes, Patience *patience);
void ring_taken(Ring *ring, Patience *patience);
bool ring_arrived(const Ring *ring);
const unsigned char *ring_header(const Ring *ring);
const unsigned char *ring_payload(const Ring *ring);
void ring_take(Ring *ring);

/* Streams. */
Outcome stream_post(Stream *stream, const unsigned char *header, const unsigned char *payload, size_t nbytes);
Outcome stream_fetch(Stream *stream, const unsigned char *header, size_t nbytes, Patience *patience);

/* Programs. */
typedef struct Program Program;
Py_ssize_t program_carry(Program *program, void *source, size_t source_bytes, void *target, size_t target_bytes, uint64_t number);

/* A call that was made before. `make` begins it in the books, and carries it out; `result` is what the caller gets. Where it stops, Python goes on
   with the number that the call has, at a step. */
typedef enum { ENDED, STOPPED_AT, SLOW_PATH } How;
typedef struct Fast {
    PyObject_HEAD
    How (*make)(struct Fast *fast, PyArrayObject *array, PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step);
    PyObject *python; /* its form in Python */
    PyObject *turns, *what;
    Books *books;
    Kind given; /* what the array must be */
} Fast;

int fast_init(Fast *fast, PyObject *python, PyObject *turns, PyObject *books, PyObject *what, PyObject *example);
int fast_traverse(Fast *fast, visitproc visit, void *arg);
int fast_clear(Fast *fast);
void fast_release(Fast *fast);

/* Reductions: target[i] = left[i] op right[i], of `count` elements; target may be left or right, else it overlaps neither. */
typedef void (*Loop)(char **operands, const Py_ssize_t *length, const Py_ssize_t *steps, void *data);
typedef struct {
    Loop loop;
    void *data;
} Kernel;
bool kernel_of(PyObject *ufunc, int number, Kernel *kernel);
void reduce(const Kernel *kernel, void *target, const void *left, const void *right, size_t count, size_t itemsize);

/* Reductions of floats of 16 and 8 bits. */
typedef struct Low Low;
size_t low_combine(const Low *low, void *target, const void *left, const void *right, size_t count);

#endif
