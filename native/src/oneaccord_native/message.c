/* The fast way of messages whose dtype and shape have travelled before, and that go through a mailbox: oneaccord.calls.messages.fast in C.

   Such a message is an opening of fixed length, a tag of 8 bytes that stands for dtype and shape and the beginning of the array, and then the rest of
   the array, if there is any, as a message of its own. How far it has got is said in the steps of oneaccord.calls.messages.point_to_point.move. */
#include "native.h"

#define TAG_BYTES 8
#define KNOWN 8
enum { AT_BEGINNING, OPENED, OVER, DONE };

/* One direction to or from a peer. */
typedef struct {
    PyObject *object; /* the mailbox, whose C form is `box` */
    const Mailbox *box;
    size_t opening_bytes;
    unsigned number_at;
    unsigned char header[HEADER_BYTES];
} Port;

static int port_init(Port *port, PyObject *object, PyObject *header, int number_at, Py_ssize_t opening_bytes) {
    if (!(port->box = mailbox_of(object))) return -1;
    port->object = Py_NewRef(object);
    if (PyBytes_Size(header) != HEADER_BYTES || number_at < 0 || number_at > HEADER_BYTES - 8 || opening_bytes < TAG_BYTES ||
        (size_t)opening_bytes > port->box->slot_bytes) {
        PyErr_SetString(PyExc_ValueError, "another header, or a mailbox with shorter slots");
        return -1;
    }
    memcpy(port->header, PyBytes_AsString(header), HEADER_BYTES);
    port->number_at = (unsigned)number_at;
    port->opening_bytes = (size_t)opening_bytes;
    return 0;
}

/* What follows an opening: its header, and how many bytes. */
typedef struct {
    unsigned char header[HEADER_BYTES];
    size_t nbytes;
} Rest;

/* How many bytes of an array travel in its opening. */
static size_t first_of(const Port *port, const Kind *kind) {
    size_t most = port->opening_bytes - TAG_BYTES;
    return kind->nbytes < most ? kind->nbytes : most;
}

static int rest_init(Rest *rest, const Port *port, const Kind *kind, PyObject *header) {
    rest->nbytes = kind->nbytes - first_of(port, kind);
    if ((rest->nbytes > port->box->slot_bytes && !mailbox_lends(port->box, rest->nbytes)) || PyBytes_Size(header) != (rest->nbytes ? HEADER_BYTES : 0)) {
        PyErr_SetString(PyExc_ValueError, "what follows the opening has a header, and goes into a slot or is lent");
        return -1;
    }
    if (rest->nbytes) memcpy(rest->header, PyBytes_AsString(header), HEADER_BYTES);
    return 0;
}

/* Send. */

typedef struct {
    Fast fast;
    Port port;
    Rest rest;
    uint64_t tag;
    bool stale; /* the two ends may have forgotten the tag */
} Send;

/* Wait a moment until the peer has what was lent, and the next message can be posted. */
static bool is_sent(const Send *send) {
    const Mailbox *box = send->port.box;
    Patience patience = {NULL};
    bool sent = mailbox_lent(box, &patience);
    patience_end(&patience);
    return sent && box->room(box->mailbox) == ONEACCORD_YES;
}

/* Post a message; return how far it got. */
static How send_post(Send *send, PyArrayObject *array, uint64_t number, Py_ssize_t *step) {
    Port *port = &send->port;
    const Mailbox *box = port->box;
    Rest *rest = &send->rest;
    size_t first = first_of(port, &send->fast.given);
    const unsigned char *data = PyArray_DATA(array);
    memcpy(port->header + port->number_at, &number, 8);
    if (rest->nbytes) memcpy(rest->header + port->number_at, &number, 8);
    *step = AT_BEGINNING;
    if (box->room(box->mailbox) != ONEACCORD_YES) return STOPPED_AT;
    unsigned char *slot = box->slot(box->mailbox);
    memcpy(slot, &send->tag, TAG_BYTES);
    if (first) memcpy(slot + TAG_BYTES, data, first);
    if (box->post(box->mailbox, port->header, slot, port->opening_bytes) != ONEACCORD_YES) return STOPPED_AT;
    bool more = box->room(box->mailbox) == ONEACCORD_YES;
    *step = rest->nbytes ? OPENED : OVER;
    if (!more || !rest->nbytes) return more ? ENDED : STOPPED_AT;
    if (mailbox_lends(box, rest->nbytes)) {
        if (box->lend(box->mailbox, rest->header, data + first, rest->nbytes) == ONEACCORD_YES) *step = OVER;
        return STOPPED_AT; /* the caller waits until the peer has it */
    }
    if (box->post(box->mailbox, rest->header, data + first, rest->nbytes) != ONEACCORD_YES) return STOPPED_AT;
    *step = OVER;
    return box->room(box->mailbox) == ONEACCORD_YES ? ENDED : STOPPED_AT;
}

static How send_make(Fast *fast, PyArrayObject *array, PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step) {
    Send *send = (Send *)fast;
    if (send->stale || out != Py_None || !PyArray_IS_C_CONTIGUOUS(array) || !counters_take(fast->counters)) return SLOW_PATH;
    *number = counters_begin(fast->counters, fast->what);
    *result = Py_NewRef(Py_None);
    How how = send_post(send, array, *number, step);
    if (how == STOPPED_AT && *step == OVER && mailbox_lends(send->port.box, send->rest.nbytes) && is_sent(send)) return ENDED;
    return how;
}

static int send_init(Send *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"python", "turns", "counters", "what", "given", "box", "header", "number_at", "opening_bytes", "tag", "rest_header", NULL};
    PyObject *python, *turns, *counters, *what, *given, *box;
    PyObject *header, *rest_header;
    Py_ssize_t opening_bytes;
    int number_at;
    unsigned long long tag;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOSinKS", names, &python, &turns, &counters, &what, &given, &box, &header, &number_at,
                                     &opening_bytes, &tag, &rest_header))
        return -1;
    if (fast_init(&self->fast, python, turns, counters, what, given) < 0) return -1;
    if (port_init(&self->port, box, header, number_at, opening_bytes) < 0) return -1;
    self->tag = tag;
    self->fast.make = send_make;
    return rest_init(&self->rest, &self->port, &self->fast.given, rest_header);
}

static int send_traverse(Send *self, visitproc visit, void *arg) {
    Py_VISIT(self->port.object);
    return fast_traverse(&self->fast, visit, arg);
}

static void send_dealloc(Send *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    fast_release(&self->fast);
    Py_XDECREF(self->port.object);
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
    .name = "oneaccord_native._core.Send",
    .basicsize = sizeof(Send),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = send_slots,
};

/* Receive. */

/* What a tag stands for. */
typedef struct {
    uint64_t tag;
    Kind kind;
    Rest rest;
} Known;

typedef struct {
    Fast fast;
    Port port;
    Known known[KNOWN];
    unsigned count, oldest;
} Recv;

/* Wait a moment for a message, and take it; return its payload, or NULL if it did not come as it should. */
static const unsigned char *fetched(const Mailbox *box, const unsigned char *header, size_t nbytes) {
    Patience patience = {NULL};
    const unsigned char *payload = mailbox_fetch(box, header, nbytes, &patience);
    patience_end(&patience);
    if (payload) box->take(box->mailbox);
    return payload;
}

/* Fetch an array; `result` is that array, or `out` as it was where Python goes on before there is one. */
static How recv_fetch(Recv *recv, PyObject *out, PyObject **result, uint64_t number, Py_ssize_t *step) {
    Port *port = &recv->port;
    memcpy(port->header + port->number_at, &number, 8);
    const unsigned char *opening = fetched(port->box, port->header, port->opening_bytes);
    *step = opening ? OPENED : AT_BEGINNING;
    uint64_t tag = 0;
    if (opening) memcpy(&tag, opening, TAG_BYTES);
    unsigned i = 0;
    while (i < recv->count && recv->known[i].tag != tag) i++;
    Known *known = &recv->known[i];
    PyArrayObject *into = opening && i < recv->count ? kind_place(&known->kind, out) : NULL;
    if (!into) {
        *result = Py_NewRef(out);
        return STOPPED_AT;
    }
    *result = (PyObject *)into;
    *step = OVER;
    char *data = PyArray_BYTES(into);
    size_t first = first_of(port, &known->kind);
    if (first) memcpy(data, opening + TAG_BYTES, first);
    if (!known->rest.nbytes) return ENDED;
    unsigned char header[HEADER_BYTES];
    size_t nbytes = known->rest.nbytes;
    memcpy(header, known->rest.header, HEADER_BYTES); /* while it waits, another thread may let it know other kinds */
    memcpy(header + port->number_at, &number, 8);
    if (mailbox_lends(port->box, nbytes)) {
        Patience patience = {NULL};
        bool came = mailbox_borrow(port->box, header, (unsigned char *)data + first, nbytes, &patience);
        patience_end(&patience);
        return came ? ENDED : STOPPED_AT;
    }
    const unsigned char *rest = fetched(port->box, header, nbytes);
    if (!rest) return STOPPED_AT;
    memcpy(data + first, rest, nbytes);
    return ENDED;
}

static How recv_make(Fast *fast, PyArrayObject *Py_UNUSED(array), PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step) {
    if (out != Py_None && !(PyArray_CheckExact(out) && PyArray_ISCARRAY((PyArrayObject *)out))) return SLOW_PATH;
    if (!counters_take(fast->counters)) return SLOW_PATH;
    *number = counters_begin(fast->counters, fast->what);
    return recv_fetch((Recv *)fast, out, result, *number, step);
}

static int recv_init(Recv *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"python", "turns", "counters", "what", "given", "box", "header", "number_at", "opening_bytes", NULL};
    PyObject *python, *turns, *counters, *what, *given, *box;
    PyObject *header;
    Py_ssize_t opening_bytes;
    int number_at;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOSin", names, &python, &turns, &counters, &what, &given, &box, &header, &number_at,
                                     &opening_bytes))
        return -1;
    if (fast_init(&self->fast, python, turns, counters, what, given) < 0) return -1;
    self->fast.make = recv_make;
    return port_init(&self->port, box, header, number_at, opening_bytes);
}

static int recv_traverse(Recv *self, visitproc visit, void *arg) {
    Py_VISIT(self->port.object);
    return fast_traverse(&self->fast, visit, arg);
}

static void recv_dealloc(Recv *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    fast_release(&self->fast);
    Py_XDECREF(self->port.object);
    for (unsigned i = 0; i < self->count; i++) kind_release(&self->known[i].kind);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* know(tag, example, rest_header): what a tag stands for; the oldest of too many is forgotten. */
static PyObject *recv_know(Recv *self, PyObject *args) {
    unsigned long long tag;
    PyObject *example;
    PyObject *rest_header;
    Known made;
    if (!PyArg_ParseTuple(args, "KOS", &tag, &example, &rest_header) || !kind_of(example, &made.kind)) return NULL;
    if (rest_init(&made.rest, &self->port, &made.kind, rest_header) < 0) {
        kind_release(&made.kind);
        return NULL;
    }
    made.tag = tag;
    unsigned place = 0;
    while (place < self->count && self->known[place].tag != tag) place++;
    if (place == KNOWN) place = self->oldest++ % KNOWN;
    Kind before = {NULL, 0, NULL, 0};
    if (place == self->count)
        self->count++;
    else
        before = self->known[place].kind;
    self->known[place] = made;
    if (before.dtype) kind_release(&before);
    Py_RETURN_NONE;
}

static PyMethodDef recv_methods[] = {
    {"know", (PyCFunction)recv_know, METH_VARARGS, "know(tag, example, rest_header): say of what dtype and shape the arrays are that a tag stands for."},
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
    .name = "oneaccord_native._core.Recv",
    .basicsize = sizeof(Recv),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = recv_slots,
};

/* Send and receive at once. */

typedef struct {
    Fast fast; /* with the counters of what is received */
    Send *send;
    Recv *recv;
} Exchange;

static void give(Fast *fast) {
    counters_leave(fast->counters);
    if (counters_free(fast->counters)) return;
    PyObject *done = PyObject_CallMethod(fast->turns, "give", NULL);
    if (!done) PyErr_WriteUnraisable(fast->turns);
    Py_XDECREF(done);
}

static bool overlap(PyArrayObject *one, PyArrayObject *other) {
    const char *first = PyArray_BYTES(one), *second = PyArray_BYTES(other);
    return first < second + PyArray_NBYTES(other) && second < first + PyArray_NBYTES(one);
}

static How exchange_make(Fast *fast, PyArrayObject *array, PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step) {
    Exchange *both = (Exchange *)fast;
    Fast *send = &both->send->fast;
    if (both->send->stale || !PyArray_IS_C_CONTIGUOUS(array) || send->counters == fast->counters) return SLOW_PATH;
    if (out != Py_None && !(PyArray_CheckExact(out) && PyArray_ISCARRAY((PyArrayObject *)out))) return SLOW_PATH;
    /* What is lent is read while the other array comes. */
    if (out != Py_None && mailbox_lends(both->send->port.box, both->send->rest.nbytes) && overlap(array, (PyArrayObject *)out)) return SLOW_PATH;
    if (send->counters->busy || !counters_take(fast->counters)) return SLOW_PATH;
    counters_take(send->counters);
    uint64_t sent = counters_begin(send->counters, fast->what);
    *number = counters_begin(fast->counters, fast->what);
    /* Both have begun before either is waited for: the peers do the same. */
    Py_ssize_t steps[2];
    How posted = send_post(both->send, array, sent, &steps[0]);
    if (posted == ENDED || steps[0] == OVER) {
        if (recv_fetch(both->recv, out, result, *number, &steps[1]) == ENDED) {
            steps[1] = DONE;
            if (posted != ENDED && mailbox_lends(both->send->port.box, both->send->rest.nbytes) && is_sent(both->send)) posted = ENDED;
            if (posted == ENDED) {
                give(send);
                return ENDED;
            }
        }
    } else {
        steps[1] = AT_BEGINNING;
        *result = Py_NewRef(out);
    }
    *step = (posted == ENDED ? OVER : steps[0]) * 4 + steps[1];
    return STOPPED_AT;
}

static int exchange_init(Exchange *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"python", "send", "recv", "what", NULL};
    PyObject *python, *send, *recv, *what;
    State *state = state_of(TYPE_OF(self));
    if (!state || self->send) return -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O", names, &python, state->send, &send, state->recv, &recv, &what)) return -1;
    const Fast *sending = &((Send *)send)->fast, *receiving = &((Recv *)recv)->fast;
    PyArray_Descr *dtype = sending->given.dtype;
    Py_INCREF((PyObject *)dtype);
    PyObject *example = PyArray_NewFromDescr(&PyArray_Type, dtype, sending->given.ndim, sending->given.lengths, NULL, NULL, 0, NULL);
    int failed = example ? fast_init(&self->fast, python, receiving->turns, (PyObject *)receiving->counters, what, example) : -1;
    Py_XDECREF(example);
    if (failed) return -1;
    self->send = (Send *)Py_NewRef(send);
    self->recv = (Recv *)Py_NewRef(recv);
    self->fast.make = exchange_make;
    return 0;
}

static int exchange_traverse(Exchange *self, visitproc visit, void *arg) {
    Py_VISIT((PyObject *)self->send);
    Py_VISIT((PyObject *)self->recv);
    return fast_traverse(&self->fast, visit, arg);
}

static void exchange_dealloc(Exchange *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    fast_release(&self->fast);
    Py_XDECREF((PyObject *)self->send);
    Py_XDECREF((PyObject *)self->recv);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot exchange_slots[] = {
    {Py_tp_doc, "Sends to one rank and receives from one, at once."},
    {Py_tp_init, exchange_init},
    {Py_tp_traverse, exchange_traverse},
    {Py_tp_clear, fast_clear},
    {Py_tp_dealloc, exchange_dealloc},
    {0, NULL},
};

PyType_Spec exchange_spec = {
    .name = "oneaccord_native._core.Exchange",
    .basicsize = sizeof(Exchange),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = exchange_slots,
};
