/* Long messages in shared memory: copied once, from the sender's process into the receiver's array.

   The label of such a message has six words after its number:

       extent   the message's number times 256, plus 255
       place    the address of the payload in the sender's process
       claims   how many parts were claimed: each rank takes the next one, and copies that
       target   the address in the receiver's process, valid once
       joined   is the number of the message
       helped   how many parts the sender has copied

   The sender writes all of them before it publishes the number, but for `target` and `joined`, which are the receiver's. A receiver in Python never joins, and
   reads all parts; so does one whose sender is elsewhere. Neither waits for the other but for a part that the other has claimed, and copies just then.

   A receiver reads the sender's pledge (oneaccord_shm.lender) in one system call with each part, after it: what a failed sender has in its memory is not taken for
   its message. A sender looks at the receiver's pledge before it writes. A receiver whose call fails takes all claims that are left, and waits until the sender has
   copied its last part, so that nobody writes to the user's array afterwards. */
#define _GNU_SOURCE
#include "ring.h"

#include <sched.h>
#include <sys/uio.h>
#include <unistd.h>

#define LENT 255
#define EXTENTS 256
#define LEAST_PART ((size_t)128 << 10)
#define MOST_PART ((size_t)512 << 10)
#define PARTS 4 /* of a message of middle length */
#define BATCH 8 /* how many parts a receiver claims at once whose sender is likely to be elsewhere */
#define REVOKED ((uint64_t)1 << 62)
#define FAILED ((uint64_t)1 << 63)
#define REVOKE_S 1.0 /* a rank that copies a part needs some 50 us; one that is stopped just then may need forever */
#define DRAW_BYTES ((size_t)4 << 20) /* how much Python draws at once */

enum { PLACE = 8, CLAIMS = 16, TARGET = 24, JOINED = 32, HELPED = 40 };

static size_t part_bytes(size_t nbytes) {
    size_t part = nbytes / PARTS / 4096 * 4096;
    return part < LEAST_PART ? LEAST_PART : part > MOST_PART ? MOST_PART : part;
}

static uint64_t parts_of(size_t nbytes) { return (nbytes + part_bytes(nbytes) - 1) / part_bytes(nbytes); }

/* Some parts from that number on. */
static size_t parts_at(size_t nbytes, uint64_t number, uint64_t count, size_t *size) {
    size_t start = (size_t)number * part_bytes(nbytes), rest = nbytes - start, most = (size_t)count * part_bytes(nbytes);
    *size = rest < most ? rest : most;
    return start;
}

static bool is_pledge(const Ring *ring, const unsigned char *read) { return !memcmp(read, ring->token, TOKEN_BYTES); }

/* Read from the peer's memory, and its pledge after that. */
static bool read_with_pledge(const Ring *ring, void *into, uint64_t from, size_t nbytes) {
    unsigned char pledge[TOKEN_BYTES];
    struct iovec here[2] = {{into, nbytes}, {pledge, TOKEN_BYTES}};
    struct iovec there[2] = {{(void *)(uintptr_t)from, nbytes}, {(void *)(uintptr_t)ring->pledge_at, TOKEN_BYTES}};
    return process_vm_readv(ring->pid, here, 2, there, 2, 0) == (ssize_t)(nbytes + TOKEN_BYTES) && is_pledge(ring, pledge);
}

static bool pledge_stands(const Ring *ring) { return read_with_pledge(ring, NULL, ring->pledge_at, 0); }

static bool is_alive(const Ring *ring) {
    unsigned char pledge[TOKEN_BYTES];
    struct iovec here = {pledge, TOKEN_BYTES}, there = {(void *)(uintptr_t)ring->pledge_at, TOKEN_BYTES};
    return process_vm_readv(ring->pid, &here, 1, &there, 1, 0) == TOKEN_BYTES;
}

/* Read a part; memory that the system does not write for others, such as that of a device, is filled by this process. */
static bool read_part(const Ring *ring, unsigned char *into, uint64_t from, size_t nbytes) {
    if (read_with_pledge(ring, into, from, nbytes)) return true;
    unsigned char bounce[4096];
    for (size_t start = 0; start < nbytes; start += sizeof bounce) {
        size_t size = nbytes - start < sizeof bounce ? nbytes - start : sizeof bounce;
        if (!read_with_pledge(ring, bounce, from + start, size)) return false;
        memcpy(into + start, bounce, size);
    }
    return true;
}

/* Return whether other processes can read this memory. */
static bool is_readable(const unsigned char *payload, size_t nbytes) {
    unsigned char ends[2];
    struct iovec here = {ends, 2}, there[2] = {{(void *)(uintptr_t)payload, 1}, {(void *)(uintptr_t)(payload + nbytes - 1), 1}};
    return process_vm_readv(getpid(), &here, 1, there, 2, 0) == 2;
}

/* The sender's half. */

static void lend(Ring *ring, const unsigned char *header, const unsigned char *payload, size_t nbytes) {
    unsigned char *label = ring->out + ring->labels + ring->next_out * ring->line, *words = label + ring->extent_at;
    uint64_t number = ring->sent + 1;
    memcpy(label, header, HEADER_BYTES);
    atomic_store_explicit(word(words, 0), number * EXTENTS + LENT, memory_order_relaxed);
    atomic_store_explicit(word(words, PLACE), (uint64_t)(uintptr_t)payload, memory_order_relaxed);
    atomic_store_explicit(word(words, CLAIMS), 0, memory_order_relaxed);
    atomic_store_explicit(word(words, HELPED), 0, memory_order_relaxed);
    ring->lending = number;
    ring->lent = payload;
    ring->lent_bytes = nbytes;
    ring->stands = ring->refuses = false;
    ring->sent = number;
    ring->next_out = ring->next_out + 1 == ring->slots ? 0 : ring->next_out + 1;
    ring_publish(ring, word(label, ring->number_at), number);
}

oneaccord_answer ring_lend(void *mailbox, const unsigned char *header, const unsigned char *payload, size_t nbytes) {
    Ring *ring = mailbox;
    if (ring_lent(ring) != ONEACCORD_YES) return ONEACCORD_NOT_YET;
    /* The same memory as last time is not looked at again: that would take a tenth of a short message. */
    if ((payload != ring->readable || nbytes != ring->readable_bytes) && !is_readable(payload, nbytes)) return ONEACCORD_UNUSUAL;
    ring->readable = payload;
    ring->readable_bytes = nbytes;
    lend(ring, header, payload, nbytes);
    return ONEACCORD_YES;
}

/* Copy one part, if the receiver has joined, and any is left. */
static bool help(Ring *ring) {
    unsigned char *words = ring->out + ring->labels + (ring->lending - 1) % ring->slots * ring->line + ring->extent_at;
    uint64_t parts = parts_of(ring->lent_bytes);
    if (ring->refuses || atomic_load_explicit(word(words, JOINED), memory_order_acquire) != ring->lending) return false;
    if (atomic_load_explicit(word(words, CLAIMS), memory_order_relaxed) >= parts) return false;
    if (!ring->stands) {
        ring->stands = pledge_stands(ring);
        ring->refuses = !ring->stands;
        if (ring->refuses) return false;
    }
    uint64_t number = atomic_fetch_add_explicit(word(words, CLAIMS), 1, memory_order_acq_rel);
    if (number >= parts) return false;
    size_t size, start = parts_at(ring->lent_bytes, number, 1, &size);
    uint64_t target = atomic_load_explicit(word(words, TARGET), memory_order_relaxed);
    struct iovec here = {(void *)(uintptr_t)(ring->lent + start), size}, there = {(void *)(uintptr_t)(target + start), size};
    uint64_t helped = atomic_load_explicit(word(words, HELPED), memory_order_relaxed);
    ring->refuses = process_vm_writev(ring->pid, &here, 1, &there, 1, 0) != (ssize_t)size;
    ring_publish(ring, word(words, HELPED), ring->refuses ? helped | FAILED : helped + 1);
    return true;
}

oneaccord_answer ring_lent(void *mailbox) {
    Ring *ring = mailbox;
    if (!ring->lending) return ONEACCORD_YES;
    uint64_t emptied = atomic_load_explicit(word(ring->out, 0), memory_order_acquire);
    if (emptied < ring->lending) return help(ring) ? ONEACCORD_PART : ONEACCORD_NOT_YET;
    ring->lending = 0;
    ring->room = emptied + ring->slots;
    return ONEACCORD_YES;
}

/* The receiver's half. */

static unsigned char *words_in(const Ring *ring) { return label_in(ring) + ring->extent_at; }

/* How many parts this rank claims at once. A peer to which it lends, too, copies that message first: fewer and longer parts take less time. That the peer has
   taken such a message, this rank need not have noticed yet. */
static uint64_t batch_of(const Ring *ring) {
    return ring->lending && atomic_load_explicit(word(ring->out, 0), memory_order_relaxed) < ring->lending ? BATCH : 1;
}

/* Move one part of the message that has come; after the last one it is taken. */
static oneaccord_answer draw(Ring *ring, unsigned char *into, size_t nbytes) {
    uint64_t number = ring->received + 1, parts = parts_of(nbytes);
    unsigned char *words = words_in(ring);
    if (ring->over) return ONEACCORD_UNUSUAL;
    uint64_t batch = batch_of(ring);
    if (ring->drawing != number) {
        atomic_store_explicit(&ring->own, 0, memory_order_relaxed);
        ring->drawn_bytes = nbytes;
        atomic_store_explicit(word(words, TARGET), (uint64_t)(uintptr_t)into, memory_order_relaxed);
        ring->drawing = number;
        if (batch < parts) ring_publish(ring, word(words, JOINED), number);
    }
    uint64_t from = atomic_load_explicit(word(words, PLACE), memory_order_relaxed);
    uint64_t claim = atomic_fetch_add_explicit(word(words, CLAIMS), batch, memory_order_acq_rel);
    if (claim < parts) {
        size_t size, start = parts_at(nbytes, claim, batch, &size);
        bool done = read_part(ring, into + start, from + start, size);
        atomic_fetch_add_explicit(&ring->own, parts - claim < batch ? parts - claim : batch, memory_order_release);
        return done ? ONEACCORD_PART : ONEACCORD_UNUSUAL;
    }
    if (claim >= REVOKED) return ONEACCORD_UNUSUAL;
    uint64_t helped = atomic_load_explicit(word(words, HELPED), memory_order_acquire);
    if (helped & FAILED) {
        /* The sender cannot write to this memory, and which part it had claimed is not known. */
        for (uint64_t each = 0; each < parts; each += BATCH) {
            size_t size, start = parts_at(nbytes, each, BATCH, &size);
            if (!read_part(ring, into + start, from + start, size)) return ONEACCORD_UNUSUAL;
        }
    } else if (atomic_load_explicit(&ring->own, memory_order_relaxed) + helped < parts) {
        return ONEACCORD_NOT_YET;
    }
    ring->drawing = 0;
    ring->next_in = ring->received % ring->slots;
    ring->received++;
    ring_publish(ring, word(ring->into, 0), ring->received);
    return ONEACCORD_YES;
}

oneaccord_answer ring_borrow(void *mailbox, const unsigned char *header, unsigned char *into, size_t nbytes) {
    Ring *ring = mailbox;
    if (ring->drawing != ring->received + 1) {
        if (!ring_arrived(ring)) return ONEACCORD_NOT_YET;
        if (memcmp(label_in(ring), header, HEADER_BYTES)) return ONEACCORD_UNUSUAL;
        uint64_t extent = atomic_load_explicit(word(words_in(ring), 0), memory_order_relaxed);
        if (extent != (ring->received + 1) * EXTENTS + LENT) return ONEACCORD_UNUSUAL; /* it is in slots */
    }
    return draw(ring, into, nbytes);
}

/* What Python calls. */

PyObject *ring_py_lend(Ring *self, PyObject *args) {
    PyObject *header;
    Py_buffer payload;
    if (!PyArg_ParseTuple(args, "Sy*", &header, &payload)) return NULL;
    if (PyBytes_Size(header) != HEADER_BYTES || !payload.len || ring_lent(self) != ONEACCORD_YES) {
        PyErr_SetString(PyExc_ValueError, "one message at a time is lent, with a header");
        PyBuffer_Release(&payload);
        return NULL;
    }
    lend(self, (const unsigned char *)PyBytes_AsString(header), payload.buf, (size_t)payload.len);
    PyBuffer_Release(&payload); /* the caller keeps it */
    return PyLong_FromUnsignedLongLong(self->sent);
}

PyObject *ring_py_help(Ring *self, PyObject *Py_UNUSED(ignored)) {
    bool helped = false;
    Py_BEGIN_ALLOW_THREADS
    helped = self->lending && help(self);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(helped);
}

PyObject *ring_py_draw(Ring *self, PyObject *args) {
    Py_buffer payload;
    if (!PyArg_ParseTuple(args, "w*", &payload)) return NULL;
    size_t nbytes = (size_t)payload.len, moved = 0;
    oneaccord_answer answer;
    Py_BEGIN_ALLOW_THREADS
    do {
        answer = draw(self, payload.buf, nbytes);
        moved += part_bytes(nbytes) * batch_of(self);
    } while (answer == ONEACCORD_PART && moved < DRAW_BYTES);
    Py_END_ALLOW_THREADS
    size_t here = nbytes;
    if (answer != ONEACCORD_YES) {
        uint64_t helped = atomic_load_explicit(word(words_in(self), HELPED), memory_order_relaxed) & ~FAILED;
        here = (size_t)(atomic_load_explicit(&self->own, memory_order_relaxed) + helped) * part_bytes(nbytes);
        if (here >= nbytes) here = nbytes - 1; /* not over as long as it is not taken */
    }
    PyBuffer_Release(&payload);
    return answer == ONEACCORD_UNUSUAL ? PyLong_FromLong(-1) : PyLong_FromSize_t(here);
}

PyObject *ring_py_revoke(Ring *self, PyObject *Py_UNUSED(ignored)) {
    /* This thread is another one than that which receives: what it reads here may just change. */
    uint64_t number = self->drawing;
    self->over = true;
    if (!number) Py_RETURN_NONE;
    unsigned char *words = self->into + self->labels + (number - 1) % self->slots * self->line + self->extent_at;
    Py_BEGIN_ALLOW_THREADS
    uint64_t parts = parts_of(self->drawn_bytes), claimed = atomic_exchange_explicit(word(words, CLAIMS), REVOKED, memory_order_acq_rel);
    if (claimed < REVOKED) {
        double until = now_s() + REVOKE_S;
        if (claimed > parts) claimed = parts;
        for (;;) {
            uint64_t helped = atomic_load_explicit(word(words, HELPED), memory_order_acquire);
            if (self->drawing != number || helped & FAILED || atomic_load_explicit(&self->own, memory_order_acquire) + helped >= claimed) break;
            if (!is_alive(self) || now_s() > until) break;
            sched_yield();
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
