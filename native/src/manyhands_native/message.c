/* The fast way of messages whose dtype and shape have travelled before, and that are short: manyhands.calls.fast_messages in C.

   Such a message is an opening of fixed length: a tag of 8 bytes that stands for dtype and shape, and the array. */
#include "native.h"

#define TAG_BYTES 8
#define KNOWN 8

/* One direction to or from a peer. */
typedef struct {
    PyObject *box;
    Ring *ring; /* the box, if it is one */
    Stream *stream;
    size_t opening_bytes;
    unsigned number_at;
    unsigned char header[HEADER_BYTES];
} Port;

static int port_init(Port *port, State *state, PyObject *box, const char *header, Py_ssize_t header_bytes, int number_at, Py_ssize_t opening_bytes) {
    bool is_ring = PyObject_TypeCheck(box, state->ring), is_stream = PyObject_TypeCheck(box, state->stream);
    uint64_t most = is_ring ? ((Ring *)box)->slot_bytes : is_stream ? ((Stream *)box)->slot_bytes : 0;
    if (header_bytes != HEADER_BYTES || number_at < 0 || number_at > HEADER_BYTES - 8 || opening_bytes < TAG_BYTES || (uint64_t)opening_bytes > most) {
        PyErr_SetString(PyExc_ValueError, "no mailbox of C, or one with another header or with shorter slots");
        return -1;
    }
    memcpy(port->header, header, HEADER_BYTES);
    port->number_at = (unsigned)number_at;
    port->opening_bytes = (size_t)opening_bytes;
    port->box = Py_NewRef(box);
    if (is_ring)
        port->ring = (Ring *)box;
    else
        port->stream = (Stream *)box;
    return 0;
}

/* Send. */

typedef struct {
    Fast fast;
    Port port;
    uint64_t tag;
    bool stale; /* the two ends may have forgotten the tag */
} Send;

enum { AT_BEGINNING, AT_END };

/* Post the opening of a message; return whether it has gone, else where Python must go on. */
static How send_post(Send *send, PyArrayObject *array, uint64_t number, Py_ssize_t *step) {
    Port *port = &send->port;
    memcpy(port->header + port->number_at, &number, 8);
    unsigned char *opening =
        port->ring ? port->ring->out + port->ring->payloads + port->ring->next_out * port->ring->slot_bytes : port->stream->outgoing + HEADER_BYTES;
    memcpy(opening, &send->tag, TAG_BYTES);
    if (send->fast.given.nbytes) memcpy(opening + TAG_BYTES, PyArray_DATA(array), send->fast.given.nbytes);
    if (port->ring) {
        ring_post(port->ring, port->header, NULL, port->opening_bytes, NULL);
        *step = AT_END;
        return ring_has_room(port->ring) ? ENDED : STOPPED_AT;
    }
    if (stream_post(port->stream, port->header, opening, port->opening_bytes) == STOPPED) {
        *step = AT_BEGINNING;
        return STOPPED_AT;
    }
    *step = AT_END;
    return port->stream->sent == port->stream->sending ? ENDED : STOPPED_AT;
}

static How send_make(Fast *fast, PyArrayObject *array, PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step) {
    Send *send = (Send *)fast;
    if (send->stale || out != Py_None || !PyArray_IS_C_CONTIGUOUS(array) || !books_take(fast->books)) return LONG_WAY;
    *number = books_begin(fast->books, fast->what);
    *result = Py_NewRef(Py_None);
    return send_post(send, array, *number, step);
}

static int send_init(Send *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"python", "turns", "books", "what", "given", "box", "header", "number_at", "opening_bytes", "tag", NULL};
    PyObject *python, *turns, *books, *what, *given, *box;
    const char *header;
    Py_ssize_t header_bytes, opening_bytes;
    int number_at;
    unsigned long long tag;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOy#inK", names, &python, &turns, &books, &what, &given, &box, &header, &header_bytes,
                                     &number_at, &opening_bytes, &tag))
        return -1;
    if (fast_init(&self->fast, python, turns, books, what, given) < 0) return -1;
    if (port_init(&self->port, state_of(TYPE_OF(self)), box, header, header_bytes, number_at, opening_bytes) < 0) return -1;
    if (self->fast.given.nbytes > self->port.opening_bytes - TAG_BYTES) {
        PyErr_SetString(PyExc_ValueError, "an array that does not travel in its opening alone");
        return -1;
    }
    self->tag = tag;
    self->fast.make = send_make;
    return 0;
}

static int send_traverse(Send *self, visitproc visit, void *arg) {
    Py_VISIT(self->port.box);
    return fast_traverse(&self->fast, visit, arg);
}

static void send_dealloc(Send *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    fast_release(&self->fast);
    Py_XDECREF(self->port.box);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef send_members[] = {
    {"stale", T_BOOL, offsetof(Send, stale), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot send_slots[] = {
    {Py_tp_doc, "Sends to one rank, of one dtype and shape."},
    {Py_tp_init, send_init},
    {Py_tp_traverse, send_traverse},
    {Py_tp_clear, fast_clear},
    {Py_tp_dealloc, send_dealloc},
    {Py_tp_members, send_members},
    {0, NULL},
};

PyType_Spec send_spec = {
    .name = "manyhands_native._core.Send",
    .basicsize = sizeof(Send),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = send_slots,
};

/* Receive. */

typedef struct {
    Fast fast;
    Port port;
    uint64_t tags[KNOWN];
    Kind kinds[KNOWN]; /* what the tags stand for */
    unsigned known, oldest;
} Recv;

static const unsigned char *fetched(Port *port, Patience *patience) {
    if (port->stream) return stream_fetch(port->stream, port->header, port->opening_bytes, patience) == MOVED ? port->stream->incoming + HEADER_BYTES : NULL;
    Ring *ring = port->ring;
    unsigned tries = ring->spins;
    double until = 0.0;
    ring_taken(ring, patience);
    while (!ring_arrived(ring))
        if (!patience_allows(patience, &tries, &until)) return NULL;
    if (memcmp(ring_header(ring), port->header, HEADER_BYTES)) return NULL;
    const unsigned char *opening = ring_payload(ring);
    ring_take(ring);
    return opening;
}

/* Fetch an opening, and copy the array that is in it; `result` is that array, or `out` as it was where Python goes on. */
static How recv_fetch(Recv *recv, PyObject *out, PyObject **result, uint64_t number, Py_ssize_t *step) {
    Port *port = &recv->port;
    Patience patience = {NULL, port->ring ? port->ring->spin_s : port->stream->spin_s, 0};
    memcpy(port->header + port->number_at, &number, 8);
    const unsigned char *opening = fetched(port, &patience);
    patience_end(&patience);
    *step = opening ? AT_END : AT_BEGINNING;
    uint64_t tag = 0;
    if (opening) memcpy(&tag, opening, TAG_BYTES);
    for (unsigned i = 0; opening && i < recv->known; i++) {
        if (recv->tags[i] != tag) continue;
        PyArrayObject *into = kind_place(&recv->kinds[i], out);
        if (!into) break;
        if (recv->kinds[i].nbytes) memcpy(PyArray_DATA(into), opening + TAG_BYTES, recv->kinds[i].nbytes);
        *result = (PyObject *)into;
        return ENDED;
    }
    *result = Py_NewRef(out);
    return STOPPED_AT;
}

static How recv_make(Fast *fast, PyArrayObject *Py_UNUSED(array), PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step) {
    if (out != Py_None && !(PyArray_CheckExact(out) && PyArray_ISCARRAY((PyArrayObject *)out))) return LONG_WAY;
    if (!books_take(fast->books)) return LONG_WAY;
    *number = books_begin(fast->books, fast->what);
    return recv_fetch((Recv *)fast, out, result, *number, step);
}

static int recv_init(Recv *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"python", "turns", "books", "what", "given", "box", "header", "number_at", "opening_bytes", NULL};
    PyObject *python, *turns, *books, *what, *given, *box;
    const char *header;
    Py_ssize_t header_bytes, opening_bytes;
    int number_at;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOy#in", names, &python, &turns, &books, &what, &given, &box, &header, &header_bytes,
                                     &number_at, &opening_bytes))
        return -1;
    if (fast_init(&self->fast, python, turns, books, what, given) < 0) return -1;
    self->fast.make = recv_make;
    return port_init(&self->port, state_of(TYPE_OF(self)), box, header, header_bytes, number_at, opening_bytes);
}

static int recv_traverse(Recv *self, visitproc visit, void *arg) {
    Py_VISIT(self->port.box);
    return fast_traverse(&self->fast, visit, arg);
}

static void recv_dealloc(Recv *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    fast_release(&self->fast);
    Py_XDECREF(self->port.box);
    for (unsigned i = 0; i < self->known; i++) kind_release(&self->kinds[i]);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* know(tag, example): what a tag stands for; the oldest of too many is forgotten. */
static PyObject *recv_know(Recv *self, PyObject *args) {
    unsigned long long tag;
    PyObject *example;
    Kind kind;
    if (!PyArg_ParseTuple(args, "KO", &tag, &example) || !kind_of(example, &kind)) return NULL;
    if (kind.nbytes > self->port.opening_bytes - TAG_BYTES) {
        kind_release(&kind);
        PyErr_SetString(PyExc_ValueError, "an array that does not travel in its opening alone");
        return NULL;
    }
    unsigned place = 0;
    while (place < self->known && self->tags[place] != tag) place++;
    if (place == KNOWN) place = self->oldest++ % KNOWN;
    Kind before = {NULL, 0, NULL, 0};
    if (place == self->known)
        self->known++;
    else
        before = self->kinds[place];
    self->tags[place] = tag;
    self->kinds[place] = kind;
    if (before.dtype) kind_release(&before);
    Py_RETURN_NONE;
}

static PyMethodDef recv_methods[] = {
    {"know", (PyCFunction)recv_know, METH_VARARGS, "know(tag, example): say of what dtype and shape the arrays are that a tag stands for."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot recv_slots[] = {
    {Py_tp_doc, "Receives from one rank."},
    {Py_tp_init, recv_init},
    {Py_tp_traverse, recv_traverse},
    {Py_tp_clear, fast_clear},
    {Py_tp_dealloc, recv_dealloc},
    {Py_tp_methods, recv_methods},
    {0, NULL},
};

PyType_Spec recv_spec = {
    .name = "manyhands_native._core.Recv",
    .basicsize = sizeof(Recv),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = recv_slots,
};
