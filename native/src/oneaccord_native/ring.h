/* The rings of ring.c, as lend.c knows them, too. */
#ifndef ONEACCORD_RING_H
#define ONEACCORD_RING_H

#include "native.h"

#include <sys/types.h>

#define TOKEN_BYTES 32
#define LENDING_BYTES 48 /* of the words of a label from its extent on: see lend.c */

/* The two rings of oneaccord_shm.link, whose words both forms read and write. */
typedef struct {
    PyObject_HEAD
    Mailbox mailbox;
    uint64_t sent, received, room; /* slots that were filled, read, and may be filled */
    uint64_t next_out, next_in;
    unsigned char *out, *into;
    uint64_t slots, labels, payloads, line, number_at, extent_at;
    const _Atomic uint64_t *sleepers;
    bool fenced;
    Py_buffer views[3]; /* out, into, sleepers: held as long as this lives */
    int held;
    PyObject *ring; /* wakes the peer's sleepers */
    /* Messages that are read where they lie. */
    pid_t pid; /* the peer's process, and where its pledge lies there */
    uint64_t pledge_at;
    unsigned char token[TOKEN_BYTES];
    _Atomic uint64_t lending; /* the number of the message that is lent, 0 if none is; the receiving thread looks at it, too */
    const unsigned char *lent;
    size_t lent_bytes;
    const unsigned char *readable; /* the memory that was lent last, and so can be */
    size_t readable_bytes;
    bool stands, refuses; /* whether the peer's pledge was seen since the message was lent; whether its memory cannot be written */
    _Atomic bool over;    /* whether the peer may write no more */
    _Atomic uint64_t drawing; /* the number of the message that is copied from the peer, 0 if none is */
    size_t drawn_bytes;
    _Atomic uint64_t own; /* how many parts of it this rank has copied itself */
} Ring;

static inline _Atomic uint64_t *word(unsigned char *memory, uint64_t at) { return (_Atomic uint64_t *)(void *)(memory + at); }

static inline unsigned char *label_in(const Ring *ring) { return ring->into + ring->labels + ring->received % ring->slots * ring->line; }

/* Write a word, and wake the peer if it sleeps. */
void ring_publish(Ring *ring, _Atomic uint64_t *where, uint64_t value);
bool ring_has_room(Ring *ring);
bool ring_arrived(const Ring *ring);

oneaccord_answer ring_lend(void *mailbox, const unsigned char *header, const unsigned char *payload, size_t nbytes);
oneaccord_answer ring_lent(void *mailbox);
oneaccord_answer ring_borrow(void *mailbox, const unsigned char *header, unsigned char *into, size_t nbytes);

PyObject *ring_py_lend(Ring *self, PyObject *args);
PyObject *ring_py_help(Ring *self, PyObject *ignored);
PyObject *ring_py_draw(Ring *self, PyObject *args);
PyObject *ring_py_revoke(Ring *self, PyObject *ignored);

#endif
