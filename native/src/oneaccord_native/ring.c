/* One peer in shared memory.

   A ring belongs to the sender. Slot n gets the number n + 1 when it is filled, and the receiver writes into the ring's first word how many slots it has
   emptied. Labels hold a header of 64 bytes, then the number. Numbers are stored with release and read with acquire, so the order also holds on
   machines that reorder stores. A rank that goes to sleep passes a barrier that all ranks pass with it (oneaccord_shm.bell), so a look at the
   sleepers needs no fence here, unless the system has no such barrier. */
#include "ring.h"

void ring_publish(Ring *ring, _Atomic uint64_t *where, uint64_t value) {
    atomic_store_explicit(where, value, memory_order_release);
    if (ring->fenced)
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(ring->sleepers, memory_order_relaxed)) return;
    PyGILState_STATE held = PyGILState_Ensure();
    PyObject *done = PyObject_CallNoArgs(ring->ring);
    if (done)
        Py_DECREF(done);
    else
        PyErr_Clear(); /* it cannot fail, and a rank that sleeps looks again after a while */
    PyGILState_Release(held);
}

bool ring_has_room(Ring *ring) {
    if (ring->sent >= ring->room)
        ring->room = atomic_load_explicit(word(ring->out, 0), memory_order_acquire) + ring->slots;
    return ring->sent < ring->room;
}

static oneaccord_answer room(void *mailbox) { return ring_has_room(mailbox) ? ONEACCORD_YES : ONEACCORD_NOT_YET; }

static unsigned char *slot(void *mailbox) {
    const Ring *ring = mailbox;
    return ring->out + ring->payloads + ring->next_out * ring->mailbox.slot_bytes;
}

static oneaccord_answer post(void *mailbox, const unsigned char *header, const unsigned char *payload, size_t nbytes) {
    Ring *ring = mailbox;
    unsigned char *label = ring->out + ring->labels + ring->next_out * ring->line, *to = slot(ring);
    if (nbytes && payload != to) memcpy(to, payload, nbytes);
    memcpy(label, header, HEADER_BYTES);
    ring->sent++;
    ring->next_out = ring->next_out + 1 == ring->slots ? 0 : ring->next_out + 1;
    ring_publish(ring, word(label, ring->number_at), ring->sent);
    return ONEACCORD_YES;
}

static void release(void *mailbox) {
    Ring *ring = mailbox;
    ring_publish(ring, word(ring->into, 0), ring->received);
}

bool ring_arrived(const Ring *ring) {
    return atomic_load_explicit(word(label_in(ring), ring->number_at), memory_order_acquire) == ring->received + 1;
}

static oneaccord_answer poll(void *mailbox, const unsigned char *header, size_t Py_UNUSED(nbytes)) {
    const Ring *ring = mailbox;
    if (!ring_arrived(ring)) return ONEACCORD_NOT_YET;
    return memcmp(label_in(ring), header, HEADER_BYTES) ? ONEACCORD_UNUSUAL : ONEACCORD_YES;
}

static const unsigned char *payload(void *mailbox) {
    const Ring *ring = mailbox;
    return ring->into + ring->payloads + ring->received % ring->slots * ring->mailbox.slot_bytes;
}

static void take(void *mailbox) {
    Ring *ring = mailbox;
    ring->next_in = ring->received % ring->slots;
    ring->received++;
}

/* The type. */

static int ring_init(Ring *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"out",     "into",   "sleepers", "ring",  "slots",  "slot_bytes", "labels",
                            "payloads", "line",   "number_at", "fenced", "tries", "spin_s",     "extent_at", "pid", "pledge_at", "token", "lent_bytes", NULL};
    PyObject *out, *into, *sleepers, *ring, *token;
    unsigned long long extent_at, pledge_at, lent_bytes;
    long pid;
    unsigned long long slots, slot_bytes, labels, payloads, line, number_at;
    int fenced;
    unsigned tries;
    double spin_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOKKKKKKpIdKlKSK", names, &out, &into, &sleepers, &ring, &slots, &slot_bytes, &labels,
                                     &payloads, &line, &number_at, &fenced, &tries, &spin_s, &extent_at, &pid, &pledge_at, &token, &lent_bytes))
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
    if (!slots || number_at + 8 > line || extent_at + LENDING_BYTES > line || extent_at % 8 || PyBytes_Size(token) != TOKEN_BYTES || number_at % 8 || line % 8 || labels % 8 || labels + slots * line > payloads ||
        (uint64_t)self->views[0].len < needed || (uint64_t)self->views[1].len < needed || self->views[2].len < 8) {
        PyErr_SetString(PyExc_ValueError, "these are no rings");
        return -1;
    }
    self->out = self->views[0].buf;
    self->into = self->views[1].buf;
    self->sleepers = self->views[2].buf;
    self->slots = self->room = slots;
    self->labels = labels;
    self->payloads = payloads;
    self->line = line;
    self->number_at = number_at;
    self->fenced = fenced;
    self->extent_at = extent_at;
    self->pid = (pid_t)pid;
    self->pledge_at = pledge_at;
    memcpy(self->token, PyBytes_AsString(token), TOKEN_BYTES);
    self->ring = Py_NewRef(ring);
    self->mailbox = (Mailbox){sizeof(Mailbox), self, (size_t)slot_bytes, tries, spin_s, room, slot, post, release, poll, payload, take,
                              (size_t)lent_bytes, ring_lend, ring_lent, ring_borrow};
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

/* Read a header; return -1 with an error if it is none. */
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
    post(self, view.buf, NULL, 0);
    PyBuffer_Release(&view);
    return PyBool_FromLong(ring_has_room(self));
}

static PyObject *py_fetch(Ring *self, PyObject *header) {
    Py_buffer view;
    if (header_of(header, &view) < 0) return NULL;
    Patience patience = {NULL};
    bool came = mailbox_fetch(&self->mailbox, view.buf, 0, &patience);
    patience_end(&patience);
    /* A message that came since is the right one, and comes with the next call. */
    int answer = came ? 1 : ring_arrived(self) && memcmp(label_in(self), view.buf, HEADER_BYTES) ? -1 : 0;
    PyBuffer_Release(&view);
    if (came) take(self);
    return PyLong_FromLong(answer);
}

static PyObject *c_mailbox(PyObject *self, void *Py_UNUSED(closure)) { return mailbox_capsule(&((Ring *)self)->mailbox); }

static PyMethodDef ring_methods[] = {
    {"post_short", (PyCFunction)py_post, METH_O, "Send what is in slot `next_out`; return whether the next one is free."},
    {"fetch_short", (PyCFunction)py_fetch, METH_O, "Wait a moment for the next short message: 1 it came, 0 not yet, -1 with another header."},
    {"lend_whole", (PyCFunction)ring_py_lend, METH_VARARGS, "lend_whole(header, payload): send a message from the memory where it lies; return its number."},
    {"help_peer", (PyCFunction)ring_py_help, METH_NOARGS, "Copy a part of the lent message, if the peer is there and there is one left; return whether it did."},
    {"draw_parts", (PyCFunction)ring_py_draw, METH_VARARGS, "draw_parts(payload): copy parts of the lent message that has come; return how many bytes are here, -1 if it is lost."},
    {"revoke_parts", (PyCFunction)ring_py_revoke, METH_NOARGS, "Let the peer write no more of the message that it lends."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ring_attributes[] = {
    {"c_mailbox", c_mailbox, NULL, "The rings as C sees them.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef ring_members[] = {
    {"_sent", T_ULONGLONG, offsetof(Ring, sent), 0, NULL},         {"_received", T_ULONGLONG, offsetof(Ring, received), 0, NULL},
    {"_room", T_ULONGLONG, offsetof(Ring, room), 0, NULL},         {"next_out", T_ULONGLONG, offsetof(Ring, next_out), 0, NULL},
    {"next_in", T_ULONGLONG, offsetof(Ring, next_in), 0, NULL},    {"_lending", T_ULONGLONG, offsetof(Ring, lending), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_doc, "The rings between this rank and one peer."},
    {Py_tp_init, ring_init},
    {Py_tp_traverse, ring_traverse},
    {Py_tp_clear, ring_clear},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},
    {Py_tp_members, ring_members},
    {Py_tp_getset, ring_attributes},
    {0, NULL},
};

PyType_Spec ring_spec = {
    .name = "oneaccord_native._core.Ring",
    .basicsize = sizeof(Ring),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = ring_slots,
};
