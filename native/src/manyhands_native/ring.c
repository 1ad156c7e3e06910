/* One peer in shared memory.

   A ring belongs to the sender. Slot n is numbered n + 1 once it is filled, and the receiver says in the ring's first word how many it has
   emptied. Labels hold a header of 64 bytes, then the number. What is published is stored with release, and read with acquire: so it is right on
   machines that reorder, too. Whoever sleeps passes a barrier that all ranks pass with it (manyhands_shm.bell), so that a look at the
   sleepers need not be fenced here, unless the system has no such barrier. */
#include "native.h"

#include <sched.h>
#include <time.h>

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void patience_release(Patience *patience) {
    if (!patience->released) patience->released = PyEval_SaveThread();
}

void patience_end(Patience *patience) {
    if (patience->released) PyEval_RestoreThread(patience->released);
    patience->released = NULL;
}

/* Ranks that wait for each other on one processor: the peer cannot come before this thread gives way. So who saw several times in a row that somebody else
   ran while it gave way, and shortly, looks no more before it does. The system moves one of the two sooner or later; giving way then takes no time. */
static _Thread_local unsigned shared; /* how many times in a row that was so */

#define SWITCHED_S 1e-6 /* giving way takes less where nobody else wants the processor */
#define SLICE_S 50e-6   /* and more where somebody computes */
#define ENOUGH 3

/* Tell whether to look once more: first at once, then without the interpreter's lock, giving way to others, until the time is up. */
bool patience_allows(Patience *patience, unsigned *tries, double *until) {
    if (*tries && shared < ENOUGH) {
        --*tries;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        return true;
    }
    patience_release(patience);
    double now = now_s();
    if (*until == 0.0)
        *until = now + patience->spin_s;
    else if (now >= *until)
        return false;
    sched_yield();
    double took = now_s() - now;
    shared = took > SWITCHED_S && took < SLICE_S ? shared + 1 : 0;
    return true;
}

static _Atomic uint64_t *word(unsigned char *memory, uint64_t at) { return (_Atomic uint64_t *)(void *)(memory + at); }

static void publish(Ring *ring, _Atomic uint64_t *where, uint64_t value, Patience *patience) {
    atomic_store_explicit(where, value, memory_order_release);
    if (ring->fenced)
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(ring->sleepers, memory_order_relaxed)) return;
    PyThreadState *released = patience ? patience->released : NULL;
    if (released) PyEval_RestoreThread(released);
    PyObject *done = PyObject_CallNoArgs(ring->ring);
    if (done)
        Py_DECREF(done);
    else
        PyErr_Clear(); /* nothing can be wrong with it; and who sleeps looks again after a while */
    if (released) patience->released = PyEval_SaveThread();
}

bool ring_has_room(Ring *ring) {
    if (ring->sent >= ring->room)
        ring->room = atomic_load_explicit(word(ring->out, 0), memory_order_acquire) + ring->slots;
    return ring->sent < ring->room;
}

void ring_post(Ring *ring, const unsigned char *header, const unsigned char *payload, size_t nbytes, Patience *patience) {
    uint64_t slot = ring->next_out;
    unsigned char *label = ring->out + ring->labels + slot * ring->line;
    if (nbytes && payload) memcpy(ring->out + ring->payloads + slot * ring->slot_bytes, payload, nbytes);
    memcpy(label, header, HEADER_BYTES);
    ring->sent++;
    ring->next_out = slot + 1 == ring->slots ? 0 : slot + 1;
    publish(ring, word(label, ring->number_at), ring->sent, patience);
}

/* Say that what was fetched before has been read. */
void ring_taken(Ring *ring, Patience *patience) { publish(ring, word(ring->into, 0), ring->received, patience); }

static unsigned char *label_in(const Ring *ring) {
    return ring->into + ring->labels + ring->received % ring->slots * ring->line;
}

bool ring_arrived(const Ring *ring) {
    return atomic_load_explicit(word(label_in(ring), ring->number_at), memory_order_acquire) == ring->received + 1;
}

const unsigned char *ring_header(const Ring *ring) { return label_in(ring); }

const unsigned char *ring_payload(const Ring *ring) {
    return ring->into + ring->payloads + ring->received % ring->slots * ring->slot_bytes;
}

void ring_take(Ring *ring) {
    ring->next_in = ring->received % ring->slots;
    ring->received++;
}

/* The type. */

static int ring_init(Ring *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"out",     "into",   "sleepers", "ring",  "slots",  "slot_bytes", "labels",
                            "payloads", "line",   "number_at", "fenced", "tries", "spin_s",     NULL};
    PyObject *out, *into, *sleepers, *ring;
    unsigned long long slots, slot_bytes, labels, payloads, line, number_at;
    int fenced;
    unsigned tries;
    double spin_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOKKKKKKpId", names, &out, &into, &sleepers, &ring, &slots, &slot_bytes, &labels,
                                     &payloads, &line, &number_at, &fenced, &tries, &spin_s))
        return -1;
    if (self->held) {
        PyErr_SetString(PyExc_RuntimeError, "a ring is made once");
        return -1;
    }
    PyObject *given[] = {out, into, sleepers};
    for (int i = 0; i < 3; i++) {
        if (PyObject_GetBuffer(given[i], &self->views[i], i < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return -1;
        self->held = i + 1;
    }
    uint64_t needed = payloads + slots * slot_bytes;
    if (!slots || number_at + 8 > line || number_at % 8 || line % 8 || labels % 8 || labels + slots * line > payloads ||
        (uint64_t)self->views[0].len < needed || (uint64_t)self->views[1].len < needed || self->views[2].len < 8) {
        PyErr_SetString(PyExc_ValueError, "these are no rings");
        return -1;
    }
    self->out = self->views[0].buf;
    self->into = self->views[1].buf;
    self->sleepers = self->views[2].buf;
    self->slots = self->room = slots;
    self->slot_bytes = slot_bytes;
    self->labels = labels;
    self->payloads = payloads;
    self->line = line;
    self->number_at = number_at;
    self->fenced = fenced;
    self->spins = tries;
    self->spin_s = spin_s;
    self->ring = Py_NewRef(ring);
    return 0;
}

static int ring_traverse(Ring *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->ring);
    return 0;
}

static int ring_clear(Ring *self) {
    Py_CLEAR(self->ring);
    return 0;
}

static void ring_dealloc(Ring *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    ring_clear(self);
    while (self->held) PyBuffer_Release(&self->views[--self->held]);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Return the header of a call, or NULL with an error. */
static int header_of(PyObject *given, Py_buffer *view) {
    if (PyObject_GetBuffer(given, view, PyBUF_SIMPLE) < 0) return -1;
    if (view->len == HEADER_BYTES) return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "a header has %d bytes", HEADER_BYTES);
    return -1;
}

static PyObject *py_post(Ring *self, PyObject *header) {
    Py_buffer view;
    if (header_of(header, &view) < 0) return NULL;
    ring_post(self, view.buf, NULL, 0, NULL);
    PyBuffer_Release(&view);
    return PyBool_FromLong(ring_has_room(self));
}

static PyObject *py_fetch(Ring *self, PyObject *header) {
    Py_buffer view;
    if (header_of(header, &view) < 0) return NULL;
    Patience patience = {NULL, self->spin_s, self->spins};
    unsigned tries = patience.spins;
    double until = 0.0;
    ring_taken(self, &patience);
    bool came;
    while (!(came = ring_arrived(self)) && patience_allows(&patience, &tries, &until)) continue;
    patience_end(&patience);
    int answer = !came ? 0 : memcmp(ring_header(self), view.buf, HEADER_BYTES) ? -1 : 1;
    PyBuffer_Release(&view);
    if (answer == 1) ring_take(self);
    return PyLong_FromLong(answer);
}

static PyMethodDef ring_methods[] = {
    {"post_short", (PyCFunction)py_post, METH_O, "Send what is in slot `next_out`; tell whether the next one is free."},
    {"fetch_short", (PyCFunction)py_fetch, METH_O, "Wait a moment for the next short message: 1 it came, 0 not yet, -1 with another header."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef ring_members[] = {
    {"_sent", T_ULONGLONG, offsetof(Ring, sent), 0, NULL},         {"_received", T_ULONGLONG, offsetof(Ring, received), 0, NULL},
    {"_room", T_ULONGLONG, offsetof(Ring, room), 0, NULL},         {"next_out", T_ULONGLONG, offsetof(Ring, next_out), 0, NULL},
    {"next_in", T_ULONGLONG, offsetof(Ring, next_in), 0, NULL},    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_doc, "The rings between this rank and one peer."},
    {Py_tp_init, ring_init},
    {Py_tp_traverse, ring_traverse},
    {Py_tp_clear, ring_clear},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},
    {Py_tp_members, ring_members},
    {0, NULL},
};

PyType_Spec ring_spec = {
    .name = "manyhands_native._core.Ring",
    .basicsize = sizeof(Ring),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = ring_slots,
};
