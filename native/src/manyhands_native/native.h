/* What the files of the compiled executor share. */
#ifndef MANYHANDS_NATIVE_H
#define MANYHANDS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

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

typedef struct {
    PyTypeObject *ring, *stream, *program;
} State;

extern PyType_Spec ring_spec, stream_spec, program_spec;

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

/* Reductions: target[i] = left[i] op right[i], of `count` elements; target may be left or right, else it overlaps neither. */
typedef void (*Loop)(char **operands, const Py_ssize_t *length, const Py_ssize_t *steps, void *data);
typedef struct {
    Loop loop;
    void *data;
} Kernel;
bool kernel_of(PyObject *ufunc, int number, Kernel *kernel);
void reduce(const Kernel *kernel, void *target, const void *left, const void *right, size_t count, size_t itemsize);

#endif
