/* The records with tags to and from one peer: what C needs of oneaccord.calls.post.lines.Line. */
#include "post.h"

static int lane_init(Lane *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"line", "peer", "box", "counters", "out", "into", "number_at", "nbytes_at", "index_at", "opening_bytes", "most", NULL};
    PyObject *line, *box, *out, *into, *counters[4];
    Py_ssize_t opening_bytes, most;
    State *state = state_of(TYPE_OF(self));
    if (!state || self->line) return -1;
    PyTypeObject *kind = state->counters;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OlO(O!O!O!O!)SSIIInn", names, &line, &self->peer, &box, kind, &counters[0], kind, &counters[1], kind, &counters[2],
                                     kind, &counters[3], &out, &into, &self->number_at, &self->nbytes_at, &self->index_at, &opening_bytes, &most))
        return -1;
    if (!(self->box = mailbox_of(box))) return -1;
    if (PyBytes_Size(out) != HEADER_BYTES || PyBytes_Size(into) != HEADER_BYTES || self->number_at > HEADER_BYTES - 8 ||
        self->nbytes_at > HEADER_BYTES - 8 || self->index_at > HEADER_BYTES - 4 || opening_bytes < (Py_ssize_t)sizeof(Head) + 8 * MOST_DIMENSIONS ||
        (size_t)opening_bytes > self->box->slot_bytes || most < 0 || (size_t)most > self->box->slot_bytes) {
        PyErr_SetString(PyExc_ValueError, "another header, or a mailbox with shorter slots");
        return -1;
    }
    memcpy(self->out, PyBytes_AsString(out), HEADER_BYTES);
    memcpy(self->into, PyBytes_AsString(into), HEADER_BYTES);
    self->opening_bytes = (size_t)opening_bytes;
    self->most = (size_t)most;
    Counters **of[] = {&self->sent, &self->taken, &self->begun, &self->met};
    for (int i = 0; i < 4; i++) *of[i] = (Counters *)Py_NewRef(counters[i]);
    self->line = Py_NewRef(line);
    self->object = Py_NewRef(box);
    return 0;
}

static int lane_traverse(Lane *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->line);
    Py_VISIT(self->object);
    return 0;
}

static int lane_clear(Lane *self) {
    Py_CLEAR(self->line);
    return 0;
}

static void lane_dealloc(Lane *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->line);
    Py_XDECREF(self->object);
    Counters *counters[] = {self->sent, self->taken, self->begun, self->met};
    for (int i = 0; i < 4; i++) Py_XDECREF((PyObject *)counters[i]);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMemberDef lane_members[] = {
    {"partial", T_BOOL, offsetof(Lane, partial), 0, NULL},
    {"stopped", T_BOOL, offsetof(Lane, stopped), 0, NULL},
    {"full", T_BOOL, offsetof(Lane, full), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot lane_slots[] = {
    {Py_tp_doc, "What C needs of the records to and from one peer."},
    {Py_tp_init, lane_init},
    {Py_tp_traverse, lane_traverse},
    {Py_tp_clear, lane_clear},
    {Py_tp_dealloc, lane_dealloc},
    {Py_tp_members, lane_members},
    {0, NULL},
};

PyType_Spec lane_spec = {
    .name = "oneaccord_native._core.Lane",
    .basicsize = sizeof(Lane),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = lane_slots,
};

/* Sends. */

void rest_header(const Lane *lane, unsigned char *header, uint64_t number, uint64_t nbytes) {
    uint32_t index = 1;
    memcpy(header + lane->number_at, &number, 8);
    memcpy(header + lane->nbytes_at, &nbytes, 8);
    memcpy(header + lane->index_at, &index, 4);
}

/* Wait a moment for room, with the interpreter's lock, so that no other thread uses the line. */
static oneaccord_answer room_on(const Mailbox *box) {
    oneaccord_answer answer = ONEACCORD_NOT_YET;
    for (unsigned tries = box->tries + 1; tries && (answer = box->room(box->mailbox)) == ONEACCORD_NOT_YET; tries--) continue;
    return answer;
}

/* Return whether Python must go on: with the last bytes of a message, of which those in the caller's memory have left, or with records that wait behind it. */
static How lane_end(Lane *lane, uint64_t number) {
    oneaccord_answer answer = lane->box->room(lane->box->mailbox);
    lane->full = answer == ONEACCORD_NOT_YET;
    return answer == ONEACCORD_UNUSUAL || lane->sent->next != number + 1 ? STOPPED_AT : ENDED;
}

/* Waking the peer is Python, in which other threads may send as well. So the record has its number before, and the line is stopped meanwhile: what others
   send waits in its queue. */
static How send_stopped(Lane *lane, const Head *head, const npy_intp *lengths, const unsigned char *data, size_t *gone) {
    const Mailbox *box = lane->box;
    unsigned char *slot = box->slot(box->mailbox), header[HEADER_BYTES];
    size_t nbytes = head->nbytes, start = sizeof *head + 8 * (size_t)head->ndim;
    size_t first = nbytes < lane->opening_bytes - start ? nbytes : lane->opening_bytes - start;
    memcpy(slot, head, sizeof *head);
    for (int i = 0; i < head->ndim; i++) memcpy(slot + sizeof *head + 8 * i, &(uint64_t){(uint64_t)lengths[i]}, 8);
    if (first) memcpy(slot + start, data, first);
    uint64_t number = lane->sent->next++;
    lane->begun->next++;
    memcpy(lane->out + lane->number_at, &number, 8);
    if (box->post(box->mailbox, lane->out, slot, lane->opening_bytes) != ONEACCORD_YES) { /* which has called no Python */
        lane->sent->next--;
        lane->begun->next--;
        return SLOW_PATH;
    }
    *gone = first;
    if (first < nbytes) {
        if (room_on(box) != ONEACCORD_YES) return STOPPED_AT;
        memcpy(header, lane->out, HEADER_BYTES);
        rest_header(lane, header, number, nbytes - first);
        if (box->post(box->mailbox, header, data + first, nbytes - first) != ONEACCORD_YES) return STOPPED_AT;
        *gone = nbytes;
    }
    return lane_end(lane, number);
}

How lane_send(Lane *lane, const Head *head, const npy_intp *lengths, const unsigned char *data, size_t *gone) {
    if (room_on(lane->box) != ONEACCORD_YES) return SLOW_PATH;
    lane->full = false;
    lane->stopped = true;
    How how = send_stopped(lane, head, lengths, data, gone);
    lane->stopped = how == STOPPED_AT;
    return how;
}

/* Receives. */

size_t opened(const Post *post, const Lane *lane, const unsigned char *opening, Head *head, npy_intp *lengths) {
    memcpy(head, opening, sizeof *head);
    size_t start = sizeof *head + 8 * (size_t)head->ndim;
    if (head->kind != EAGER || head->number || head->fields || head->flags & SYNC || head->ndim > MOST_DIMENSIONS || head->nbytes > lane->most) return 0;
    if (head->flags & OBJECT) return head->code || head->ndim ? 0 : start;
    uint64_t nbytes = post->itemsizes[head->code];
    for (int i = 0; i < head->ndim; i++) {
        uint64_t length;
        memcpy(&length, opening + sizeof *head + 8 * i, 8);
        if (length > lane->most || (nbytes *= length) > lane->most) return 0; /* also of arrays without elements, which may be of any length */
        lengths[i] = (npy_intp)length;
    }
    return post->dtypes[head->code] && nbytes == head->nbytes ? start : 0;
}

PyObject *memory_for(const Post *post, PyObject *out, const Head *head, npy_intp *lengths) {
    if (head->flags & OBJECT) return PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)head->nbytes);
    PyArray_Descr *dtype = post->dtypes[head->code];
    if (out != Py_None) return PyArray_DESCR((PyArrayObject *)out) == dtype && (uint64_t)PyArray_NBYTES((PyArrayObject *)out) >= head->nbytes ? Py_NewRef(out) : NULL;
    Py_INCREF((PyObject *)dtype);
    return PyArray_NewFromDescr(&PyArray_Type, dtype, head->ndim, lengths, NULL, NULL, 0, NULL);
}

int fill(Post *post, PyObject *status, long rank, const Head *head, const npy_intp *lengths) {
    size_t itemsize = post->itemsizes[head->code];
    PyObject *dtype = head->code ? (PyObject *)post->dtypes[head->code] : Py_None, *shape = head->code ? PyTuple_New(head->ndim) : Py_NewRef(Py_None);
    for (int i = 0; shape && i < head->ndim; i++) PyTuple_SetItem(shape, i, PyLong_FromSsize_t(lengths[i]));
    uint64_t count = !head->code ? 1 : itemsize ? head->nbytes / itemsize : 0;
    return set(post, status, SHAPE, shape) || set(post, status, DTYPE, Py_NewRef(dtype)) || set(post, status, SOURCE, PyLong_FromLong(rank)) ||
           set(post, status, TAG, PyLong_FromLongLong(head->tag)) || set(post, status, COUNT, PyLong_FromUnsignedLongLong(count)) ||
           set(post, status, NBYTES, PyLong_FromUnsignedLongLong(head->nbytes));
}

/* What all calls ask and note. */

bool is_none(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_None;
}

Lane *lane_to(Post *post, long rank) {
    Lane *lane = post->lanes[rank];
    if (!lane) {
        PyObject *world = PyLong_FromLong(post->ranks[rank]);
        PyObject *found = world ? PyDict_GetItemWithError(post->parts[LANES], world) : NULL;
        Py_XDECREF(world);
        PyErr_Clear();
        State *state = state_of(TYPE_OF(post));
        if (!found || !state || !PyObject_TypeCheck(found, state->lane)) return NULL;
        lane = post->lanes[rank] = (Lane *)Py_NewRef(found);
    }
    return lane;
}

int is_listening(const Post *post, const Lane *lane) {
    if (lane->stopped) return 0;
    if (is_none(lane->line, post->parts[INCOMING])) return 1;
    PyObject *idle = PyObject_CallMethodObjArgs(lane->line, post->parts[RECALL], NULL); /* it still waits for a message */
    PyErr_Clear();
    Py_XDECREF(idle);
    return idle == Py_True ? -1 : 0;
}

void drive(Post *post, bool *drives) {
    if (*drives) return;
    *drives = !PyObject_SetAttr(post->parts[OFFICE], post->parts[DRIVER], (PyObject *)post);
    PyErr_Clear();
}

void step_back(const Post *post) {
    PyObject *const *parts = post->parts;
    PyObject *driver = PyObject_GetAttr(parts[OFFICE], parts[DRIVER]);
    bool mine = driver == (PyObject *)post; /* otherwise Python has stepped back */
    PyErr_Clear();
    Py_XDECREF(driver);
    if (!mine) return;
    int failed;
    post->posted->drives++;
    if (PyDict_Size(parts[PARKED]) || PyDict_Size(parts[KEPT]) || PySet_Size(parts[OWING])) {
        PyObject *done = PyObject_CallMethodObjArgs(parts[OFFICE], parts[STEP_BACK], NULL);
        failed = !done;
        Py_XDECREF(done);
    } else {
        failed = PyObject_SetAttr(parts[OFFICE], parts[DRIVER], Py_None);
    }
    if (failed) PyErr_WriteUnraisable(parts[OFFICE]);
}

/* What drives; NULL if that is not known. Borrowed: the office has it. */
static PyObject *driver_of(const Post *post) {
    PyObject *driver = PyObject_GetAttr(post->parts[OFFICE], post->parts[DRIVER]);
    if (!driver) PyErr_Clear();
    Py_XDECREF(driver);
    return driver;
}

/* Whether no thread looks at what has come, which is in the mailbox until it is released. */
bool is_still(const Post *post) { return post->parts[OFFICE] && !PySet_Size(post->parts[INSIDE]) && driver_of(post) == Py_None; }

/* Whether the group may be used, and no thread is in the office. A thread of the office itself that is, drives and waits for messages, or moves nothing.

   What is asked last holds until Python runs again, as it may in whatever allocates (a collection of garbage) or calls it: another thread has its turn then. */
bool is_free(const Post *post, bool begins) {
    PyObject *const *parts = post->parts;
    if (!parts[OFFICE] || !group_is_open(parts[CALLER]) || PySet_Size(parts[INSIDE])) return false;
    PyObject *driver = driver_of(post);
    return driver == Py_None || (begins && driver && driver == parts[COURIER]);
}

PyObject *note(Post *post, Verb verb, long long peer, long long tag, double started) {
    static const char *const verbs[] = {"send", "send_object", "recv", "recv_object"};
    Known *known = &post->known[(size_t)(peer * 31 + tag * 4 + (long long)verb) % KNOWN];
    if (!known->words || known->verb != verb || known->peer != peer || known->tag != tag) {
        PyObject *words = PyObject_CallFunction(post->parts[WORDS], "ssLL", verbs[verb], verb < RECVS ? "to" : "from", peer, tag);
        if (!words) {
            PyErr_Clear();
            return NULL;
        }
        PyObject *before = known->words;
        *known = (Known){verb, peer, tag, words};
        Py_XDECREF(before);
    }
    counters_note(post->shorts, known->words, started);
    return known->words;
}

/* Objects of Python. */

PyObject *made(const Post *post, int type) {
    PyTypeObject *of = (PyTypeObject *)post->parts[type];
    newfunc new = PyType_GetSlot(of, Py_tp_new);
    PyObject *nothing = PyTuple_New(0), *object = nothing ? new (of, nothing, NULL) : NULL;
    Py_XDECREF(nothing);
    return object;
}

bool set(const Post *post, PyObject *object, int name, PyObject *value) {
    bool failed = !value || PyObject_SetAttr(object, post->parts[name], value);
    Py_XDECREF(value);
    return failed;
}

PyObject *key_of(uint32_t context, long source, long long tag) {
    PyObject *key = PyTuple_New(3), *parts[] = {PyLong_FromUnsignedLong(context), PyLong_FromLong(source), PyLong_FromLongLong(tag)};
    for (int i = 0; i < 3; i++) {
        if (!parts[i]) Py_CLEAR(key);
        if (key)
            PyTuple_SetItem(key, i, parts[i]);
        else
            Py_XDECREF(parts[i]);
    }
    return key;
}
