/* What the files of the compiled executor share. */
#ifndef ONEACCORD_NATIVE_H
#define ONEACCORD_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL oneaccord_native_numpy
#ifndef IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "mailbox.h"

#define HEADER_BYTES ONEACCORD_HEADER_BYTES
#define TYPE_OF(self) Py_TYPE((PyObject *)(self))

/* Whether a message moved. Anything unusual is STOPPED, with nothing done that could not be done again: C hands the call back to Python. */
typedef enum { MOVED, STOPPED } Outcome;

/* Mailboxes. While a thread waits it lets go of the interpreter's lock; `patience_end` takes it again. */
typedef oneaccord_mailbox Mailbox;
typedef struct {
    PyThreadState *released; /* NULL while this thread holds the interpreter's lock */
} Patience;

double now_s(void);
void patience_begin(Patience *patience); /* let go of the interpreter's lock */
void patience_end(Patience *patience);
/* Return the C form of a mailbox, a borrowed pointer; NULL with an error if it has none. */
const Mailbox *mailbox_of(PyObject *object);
PyObject *mailbox_capsule(Mailbox *box);
/* Wait a moment for room; return whether there is some. */
bool mailbox_room(const Mailbox *box, Patience *patience);
/* Wait a moment for the next message; return its payload, still to be taken, or NULL if it did not come as it should. */
const unsigned char *mailbox_fetch(const Mailbox *box, const unsigned char *header, size_t nbytes, Patience *patience);
/* The looks for one message. */
typedef struct {
    unsigned tries;
    double until;
} Looks;
/* Whether the next look is made without the interpreter's lock. */
bool releases_next(const Looks *looks, const Patience *patience);
/* Return whether to look once more: first at once, then without the interpreter's lock, giving way to others, until the time is up. */
bool look_again(const Mailbox *box, Looks *looks, Patience *patience);

/* Whether a message of that length is lent. */
bool mailbox_lends(const Mailbox *box, size_t nbytes);
/* Wait a moment until the peer has the message that was lent; return whether it has. */
bool mailbox_lent(const Mailbox *box, Patience *patience);
/* Wait a moment for the next message, which the peer lends, and copy it; return whether all of it is there, and taken. */
bool mailbox_borrow(const Mailbox *box, const unsigned char *header, unsigned char *into, size_t nbytes, Patience *patience);

/* The turn and the numbers of calls that run one after the other: oneaccord.calls.order.counters. */
typedef struct {
    PyObject *what;
    uint64_t call;
    double started, finished;
} Short;
typedef struct Counters {
    PyObject_HEAD
    PyObject *queue; /* what stands for turns that are waited for, from `first` on */
    Py_ssize_t first;
    bool busy;
    long long channel;
    uint64_t next, messages, call, ended_count;
    double started;
    PyObject *what; /* the short call that runs */
    struct Counters *counted;
    Short *ended; /* a circle of the last `kept` */
    uint64_t kept;
} Counters;

bool counters_take(Counters *counters);
bool counters_free(Counters *counters);
uint64_t counters_begin(Counters *counters, PyObject *what);
void counters_leave(Counters *counters);
/* Note a call that has ended, and that had no turn. */
void counters_note(Counters *counters, PyObject *what, double started);

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
    PyTypeObject *program, *counters, *caller, *call, *send, *recv, *exchange, *low, *lane, *post, *posted, *window;
    PyTypeObject *receiving, *sent; /* made when first needed, from types of Python */
} State;

/* Whether the group of a `Caller` may be used, and nobody observes. What is wrong otherwise is for Python to say. */
bool group_is_open(PyObject *caller);
/* Whether an attribute of Python's is true: 1, 0, or -1 with an error. */
int is_true(PyObject *object, PyObject *name);

extern PyType_Spec ring_spec, stream_spec, program_spec, counters_spec, caller_spec, call_spec, send_spec, recv_spec, exchange_spec, low_spec,
    lane_spec, post_spec, posted_spec, window_spec;

extern PyMethodDef limit_methods[], mailbox_methods[], word_methods[];

State *state_of(PyTypeObject *type);

/* Take the lock of a word, looking at it so often; return 0, or its owner. Give it back; return whether it was this owner's. */
uint64_t word_take(_Atomic uint64_t *word, uint64_t owner, unsigned long long tries);
bool word_free(_Atomic uint64_t *word, uint64_t owner);

#define LONG_COPY ((size_t)512 << 10) /* longer ones are made without the interpreter's lock */

/* Programs. */
typedef struct Program Program;
Py_ssize_t program_carry(Program *program, void *source, size_t source_bytes, void *target, size_t target_bytes, uint64_t number);

/* A call that was made before. `make` begins it in the counters, and carries it out; `result` is what the caller gets. Where it stops, Python goes on
   with the number that the call has, at a step. */
typedef enum { ENDED, STOPPED_AT, SLOW_PATH } How;
typedef struct Fast {
    PyObject_HEAD
    How (*make)(struct Fast *fast, PyArrayObject *array, PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step);
    PyObject *python; /* its form in Python */
    PyObject *turns, *what;
    Counters *counters;
    Kind given; /* what the array must be */
} Fast;

int fast_init(Fast *fast, PyObject *python, PyObject *turns, PyObject *counters, PyObject *what, PyObject *example);
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
