/* Messages with tags, the common case of oneaccord.calls.post in C: a message that leaves at once, and a receive whose message is the next to come.

   A message is an opening, which begins with a `Head`, and the rest of its bytes, if there are any, as a message of its own. Whatever is unusual is for
   Python, which finds everything as if C had not looked: other threads in the office, messages and receives that wait for each other, answers that are
   due, lines that are at work. What C cannot finish, Python goes on with, from the bytes that have moved. */
#include "arguments.h"
#include "post.h"

static const char *const interned[] = {"_driver", "_step_back", "recall",  "spun",    "outgoing", "incoming", "standard", "source", "tag",  "count",     "nbytes",
                                       "dtype",   "shape",      "what",    "key",     "out",      "number",   "numbers",  "wild",   "request", "kept_by", "limits",
                                       "done",    "path",       "array",   "about",   "is_object", "arrive",  "call", "_conclude"};

/* A rank of the group, a tag: or -2 if Python must look at what was given. */
static long rank_of(const Post *post, PyObject *given) {
    if (given == post->parts[ANY_RANK]) return ANY;
    long rank = PyLong_CheckExact(given) ? PyLong_AsLong(given) : -2;
    if (rank < 0) PyErr_Clear();
    return rank >= 0 && rank < post->size ? rank : -2;
}

static long long tag_of(const Post *post, PyObject *given) {
    if (given == post->parts[ANY_TAG]) return ANY;
    long long tag = PyLong_CheckExact(given) ? PyLong_AsLongLong(given) : -2;
    if (tag < 0) PyErr_Clear();
    return tag >= 0 ? tag : -2;
}

/* Sends. */

#define TRIES 4

/* Send `data` to a rank if nothing is unusual; `to` is that rank, the tag, the mode, and the seconds. Return None, or `later` a work; NULL with an error,
   or NULL without one if nothing was done. */
static PyObject *send_now(Post *post, PyObject *object, const unsigned char *data, Head head, const npy_intp *lengths, PyObject *const *to, bool later) {
    if (to[2] != post->parts[MODE] || !in_time(to[3]) || !is_free(post, true)) return NULL;
    long rank = rank_of(post, to[0]);
    head.tag = tag_of(post, to[1]);
    if (rank < 0 || rank == post->me || head.tag < 0) return NULL;
    Lane *lane = lane_to(post, rank);
    if (!lane || lane->stopped || head.nbytes > lane->most || !is_none(lane->line, post->parts[OUTGOING])) return NULL;
    double started = now_s();
    size_t gone;
    head.kind = EAGER;
    head.context = post->context;
    How how = lane_send(lane, &head, lengths, data, &gone);
    /* There is no room: perhaps the peer waits for room as well, and takes nothing until what it has sent is taken. */
    for (int tries = 0; how == SLOW_PATH && tries < TRIES && post->posted->count; tries++) {
        progress_from(post, lane);
        if (!is_free(post, true) || lane->stopped || !is_none(lane->line, post->parts[OUTGOING])) return NULL;
        how = lane_send(lane, &head, lengths, data, &gone);
    }
    if (how == SLOW_PATH) return NULL;
    if (how == STOPPED_AT) return PyObject_CallFunction(post->parts[SEND_ON], "OOOOnO", object, to[0], to[1], to[3], (Py_ssize_t)gone, later ? Py_True : Py_False);
    PyObject *words = note(post, head.flags & OBJECT ? SENDS_OBJECT : SENDS, post->ranks[rank], head.tag, started);
    if (!later) return Py_NewRef(Py_None);
    words = Py_NewRef(words ? words : Py_None); /* another thread may let the words be forgotten */
    PyObject *sent = sent_made(post, words);
    Py_DECREF(words);
    return sent;
}

static PyObject *send_array(Post *self, PyObject *const *given, Py_ssize_t count, bool later) {
    if (!counted(count, 5)) return NULL;
    PyArrayObject *array = (PyArrayObject *)given[0];
    if (PyArray_CheckExact(given[0]) && PyArray_IS_C_CONTIGUOUS(array) && PyArray_NDIM(array) <= MOST_DIMENSIONS) {
        unsigned code = self->code;
        if (!code || self->dtypes[code] != PyArray_DESCR(array)) {
            for (code = CODES - 1; code && self->dtypes[code] != PyArray_DESCR(array);) code--;
            self->code = code;
        }
        Head head = {.code = (uint8_t)code, .ndim = (uint8_t)PyArray_NDIM(array), .nbytes = (uint64_t)PyArray_NBYTES(array)};
        PyObject *done = code ? send_now(self, given[0], PyArray_DATA(array), head, PyArray_DIMS(array), given + 1, later) : NULL;
        if (done || PyErr_Occurred()) return done;
    }
    return slowly(self->parts[later ? ISEND : SEND], given, count);
}

/* send(array, dest, tag, mode, timeout_s), isend(...): as TaggedCalls._send_tagged and _send_later. */
static PyObject *post_send(Post *self, PyObject *const *given, Py_ssize_t count) { return send_array(self, given, count, false); }

static PyObject *post_isend(Post *self, PyObject *const *given, Py_ssize_t count) { return send_array(self, given, count, true); }

/* send_bytes(data, dest, tag, mode, timeout_s): send an object as bytes; return whether it was done, which is nothing unusual. */
static PyObject *post_send_bytes(Post *self, PyObject *const *given, Py_ssize_t count) {
    if (!counted(count, 5)) return NULL;
    PyObject *done = NULL;
    if (PyByteArray_CheckExact(given[0])) {
        Head head = {.flags = OBJECT, .nbytes = (uint64_t)PyByteArray_Size(given[0])};
        done = send_now(self, given[0], (const unsigned char *)PyByteArray_AsString(given[0]), head, NULL, given + 1, false);
    }
    if (!done) return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    Py_DECREF(done);
    return Py_NewRef(Py_True);
}

/* Receives. */

typedef struct {
    long source; /* a rank of the group, or ANY */
    long long tag;
    uint8_t flags;
    PyObject *seconds; /* that it may last; borrowed */
    double started;
    bool drives; /* others know that this thread waits */
} Wanted;

static bool wanted_of(const Post *post, PyObject *source, PyObject *tag, PyObject *seconds, Wanted *wanted) {
    *wanted = (Wanted){rank_of(post, source), tag_of(post, tag), 0, seconds, now_s(), false};
    return in_time(seconds) && wanted->source != -2 && wanted->source != post->me && wanted->tag != -2;
}

/* Whether no message waits for a receive like this. */
static bool is_first(const Post *post, const Wanted *wanted) {
    if (!PyDict_Size(post->parts[LETTERS])) return true;
    PyObject *key = key_of(post->context, wanted->source == ANY ? ANY : post->ranks[wanted->source], wanted->tag);
    bool waits = !key || PyDict_GetItemWithError(post->parts[LETTERS], key);
    Py_XDECREF(key);
    PyErr_Clear();
    return !waits;
}

/* The same, and no other receive waits for a message. */
static bool is_next(const Post *post, const Wanted *wanted) { return is_first(post, wanted) && !PyDict_Size(post->parts[RECEIVES]) && !post->posted->count; }

/* Whether this receive may look for its message on the lines of the ranks of the group from..to, which are idle and wait for their next openings. */
static bool may_look(Post *post, const Wanted *wanted, long *from, long *to) {
    *from = wanted->source == ANY ? 0 : wanted->source;
    *to = wanted->source == ANY ? post->size : wanted->source + 1;
    if (*to - *from <= (wanted->source == ANY)) return false; /* nobody can send it */
    for (int tries = 0; tries < 3; tries++) {
        for (long rank = *from; rank < *to; rank++) { /* which may wake the peer, in Python */
            Lane *lane = !post->parts[OFFICE] || rank == post->me ? NULL : lane_to(post, rank);
            if (lane && !is_still(post)) return false;
            if (lane) lane->box->release(lane->box->mailbox);
        }
        if (!post->parts[OFFICE] || !group_is_open(post->parts[CALLER]) || !is_next(post, wanted) || !is_free(post, false)) return false;
        bool all = true;
        for (long rank = *from; rank < *to; rank++) {
            const Lane *lane = rank == post->me ? NULL : lane_to(post, rank);
            int listens = rank == post->me ? 1 : lane ? is_listening(post, lane) : 0;
            if (!listens) return false;
            all = all && listens > 0;
        }
        for (long rank = *from; all && rank < *to; rank++) {
            Lane *lane = post->lanes[rank];
            if (rank == post->me) continue;
            memcpy(lane->into + lane->number_at, &(uint64_t){lane->taken->next}, 8);
        }
        if (all) return true;
    }
    return false;
}

/* Look once at the lines; return the rank whose opening has come, or ANY if none has. */
static long look(Post *post, long from, long to, oneaccord_answer *answer) {
    *answer = ONEACCORD_NOT_YET;
    for (long i = 0, rank = post->first; i < to - from; i++, rank++) {
        if (rank < from || rank >= to) rank = from;
        Lane *lane = post->lanes[rank];
        if (rank == post->me) continue;
        oneaccord_answer now = lane->box->poll(lane->box->mailbox, lane->into, lane->opening_bytes);
        lane->partial = lane->partial || now != ONEACCORD_NOT_YET;
        if (now == ONEACCORD_PART) *answer = now;
        if (now == ONEACCORD_NOT_YET || now == ONEACCORD_PART) continue;
        *answer = now;
        return rank;
    }
    return ANY;
}

/* Wait a moment for the next opening; return the rank that it came from, still to be taken, or ANY if Python must look. */
static long arrived(Post *post, Wanted *wanted) {
    long from, to, rank;
    if (!may_look(post, wanted, &from, &to)) return ANY;
    const Mailbox *box = post->lanes[from == post->me ? from + 1 : from]->box;
    Looks looks = {box->tries, 0.0};
    Patience patience = {NULL};
    oneaccord_answer answer;
    while ((rank = look(post, from, to, &answer)) == ANY) {
        if (answer == ONEACCORD_PART) looks = (Looks){box->tries, 0.0};
        if (releases_next(&looks, &patience)) drive(post, &wanted->drives);
        if (!look_again(box, &looks, &patience)) break;
    }
    bool same = !patience.released;
    patience_end(&patience);
    if (rank == ANY && wanted->drives && PyObject_SetAttr(post->parts[OFFICE], post->parts[SPUN], Py_True)) PyErr_Clear();
    if (rank == ANY || answer != ONEACCORD_YES) return ANY;
    /* While other threads ran, they may have begun receives, or closed the group. */
    if (!same && (PySet_Size(post->parts[INSIDE]) || !is_next(post, wanted) || !group_is_open(post->parts[CALLER]))) return ANY;
    return rank;
}

static bool meets(const Post *post, const Wanted *wanted, const Head *head) {
    return head->context == post->context && (wanted->tag == ANY || wanted->tag == head->tag) && (head->flags & OBJECT) == wanted->flags;
}

/* Take an opening that has come, into memory for all of the message, and what follows it. Return whether Python had to take that, or -1 with an error. */
static int take(Post *post, long rank, Wanted *wanted, PyObject *into, char *memory, const Head *head, size_t start, const unsigned char *opening) {
    Lane *lane = post->lanes[rank];
    const Mailbox *box = lane->box;
    size_t nbytes = head->nbytes, first = nbytes < lane->opening_bytes - start ? nbytes : lane->opening_bytes - start;
    unsigned char header[HEADER_BYTES], about[sizeof *head + 8 * MOST_DIMENSIONS];
    uint64_t number = lane->taken->next++;
    lane->met->next++;
    lane->partial = false;
    if (first) memcpy(memory, opening + start, first);
    if (first < nbytes) memcpy(about, opening, start);
    box->take(box->mailbox);
    post->first = rank + 1 < post->size ? rank + 1 : 0;
    if (first == nbytes) return 0;
    memcpy(header, lane->into, HEADER_BYTES);
    rest_header(lane, header, number, nbytes - first);
    drive(post, &wanted->drives); /* nobody else may look at this line meanwhile */
    Patience patience = {NULL};
    const unsigned char *rest = mailbox_fetch(box, header, nbytes - first, &patience);
    patience_end(&patience);
    if (rest) {
        memcpy(memory + first, rest, nbytes - first);
        box->take(box->mailbox);
        return 0;
    }
    lane->partial = true;
    PyObject *done = PyObject_CallFunction(post->parts[RECV_ON], "Oly#nO", into, post->ranks[rank], about, (Py_ssize_t)start, (Py_ssize_t)first, wanted->seconds);
    Py_XDECREF(done);
    return done ? 1 : -1;
}

/* Receive a message if it is the next one to come; NULL, without an error, if nothing was done. */
static PyObject *receive_now(Post *post, Wanted *wanted, PyObject *out, PyObject *status, long *rank) {
    PyObject *into = NULL;
    *rank = arrived(post, wanted);
    if (*rank != ANY) {
        Head head;
        npy_intp lengths[MOST_DIMENSIONS];
        const Lane *lane = post->lanes[*rank];
        const unsigned char *opening = lane->box->payload(lane->box->mailbox);
        size_t start = opened(post, lane, opening, &head, lengths);
        into = start && meets(post, wanted, &head) ? memory_for(post, out, &head, lengths) : NULL;
        if (!into) {
            PyErr_Clear();
        } else {
            char *memory = wanted->flags & OBJECT ? PyByteArray_AsString(into) : PyArray_BYTES((PyArrayObject *)into);
            int later = take(post, *rank, wanted, into, memory, &head, start, opening);
            if (later < 0 || (status != Py_None && fill(post, status, *rank, &head, lengths))) Py_CLEAR(into);
            if (!later) note(post, wanted->flags & OBJECT ? RECVS_OBJECT : RECVS, wanted->source == ANY ? ANY : post->ranks[wanted->source], wanted->tag, wanted->started);
        }
    }
    if (wanted->drives) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        step_back(post);
        PyErr_Restore(type, value, trace);
    }
    return into;
}

static bool is_status(const Post *post, PyObject *status) { return status == Py_None || (PyObject *)TYPE_OF(status) == post->parts[STATUS]; }

/* recv(source, tag, out, status, timeout_s): as TaggedCalls._recv_tagged. */
static PyObject *post_recv(Post *self, PyObject *const *given, Py_ssize_t count) {
    Wanted wanted;
    long rank;
    if (!counted(count, 5)) return NULL;
    PyObject *out = given[2], *into = NULL;
    bool fits = out == Py_None || (PyArray_CheckExact(out) && PyArray_ISCARRAY((PyArrayObject *)out));
    if (fits && is_status(self, given[3]) && wanted_of(self, given[0], given[1], given[4], &wanted))
        into = receive_now(self, &wanted, out, given[3], &rank);
    return into || PyErr_Occurred() ? into : slowly(self->parts[RECV], given, count);
}

/* recv_bytes(source, tag, status, timeout_s): receive an object; return its bytes and the rank that sent it, or None if nothing was done. */
static PyObject *post_recv_bytes(Post *self, PyObject *const *given, Py_ssize_t count) {
    Wanted wanted;
    long rank;
    if (!counted(count, 4)) return NULL;
    PyObject *into = NULL;
    if (is_status(self, given[2]) && wanted_of(self, given[0], given[1], given[3], &wanted)) {
        wanted.flags = OBJECT;
        into = receive_now(self, &wanted, Py_None, given[2], &rank);
    }
    if (!into) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    return Py_BuildValue("Nl", into, rank);
}

/* irecv(source, tag, out, timeout_s): as TaggedCalls._recv_later. */
static PyObject *post_irecv(Post *self, PyObject *const *given, Py_ssize_t count) {
    Wanted wanted;
    if (!counted(count, 4)) return NULL;
    bool fits = given[2] == Py_None || (PyArray_CheckExact(given[2]) && PyArray_ISCARRAY((PyArrayObject *)given[2]));
    if (fits && wanted_of(self, given[0], given[1], given[3], &wanted) && wanted.source != ANY && wanted.tag != ANY && is_free(self, true) &&
        is_first(self, &wanted) && lane_to(self, wanted.source)) {
        PyObject *work = posted(self, wanted.source, wanted.tag, given[3], wanted.started, given[2]);
        if (work || PyErr_Occurred()) return work;
    }
    return slowly(self->parts[IRECV], given, count);
}

/* iprobe(source, tag): as TaggedCalls._iprobe. */
static PyObject *post_iprobe(Post *self, PyObject *const *given, Py_ssize_t count) {
    Wanted wanted;
    long from, to;
    oneaccord_answer answer;
    if (!counted(count, 2)) return NULL;
    if (wanted_of(self, given[0], given[1], Py_None, &wanted) && self->parts[OFFICE] && !PyDict_Size(self->parts[KEPT]) && !self->posted->count &&
        !PySet_Size(self->parts[OWING]) && may_look(self, &wanted, &from, &to) && look(self, from, to, &answer) == ANY && answer == ONEACCORD_NOT_YET)
        return Py_NewRef(Py_None);
    return slowly(self->parts[IPROBE], given, count);
}

/* The type. */

/* open(office, inside, parked, kept, owing, lanes, receives, letters, shorts, matching, courier, posted): the office of this rank is there. */
static PyObject *post_open(Post *self, PyObject *args) {
    PyObject *given[OPENED - OFFICE], *shorts, *waiting;
    State *state = state_of(TYPE_OF(self));
    if (!state || !PyArg_ParseTuple(args, "OO!O!O!O!O!O!O!O!OOO!", &given[0], &PySet_Type, &given[1], &PyDict_Type, &given[2], &PyDict_Type, &given[3],
                                    &PySet_Type, &given[4], &PyDict_Type, &given[5], &PyDict_Type, &given[6], &PyDict_Type, &given[7], state->counters, &shorts, &given[8], &given[9], state->posted, &waiting))
        return NULL;
    if (self->parts[OFFICE]) Py_RETURN_NONE;
    self->shorts = (Counters *)Py_NewRef(shorts);
    self->posted = (Posted *)Py_NewRef(waiting);
    for (int i = OFFICE; i < OPENED; i++) self->parts[i] = Py_NewRef(given[i - OFFICE]);
    Py_RETURN_NONE;
}

static int post_init(Post *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"caller", "send", "send_on", "recv", "recv_on", "iprobe", "isend", "irecv", "words", "status", "any_rank", "any_tag", "sent",
                            "receive", "receiving", "lock", "queue", "path", "seconds", "context", "rank", "ranks", "codes", NULL};
    PyObject *given[GIVEN], *ranks, *codes, *dtype, *number;
    unsigned long context;
    State *state = state_of(TYPE_OF(self));
    if (!state || self->ranks) return -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOOOOOOOOOOOOOOO!klO!O!", names, state->caller, &given[0], &given[1], &given[2], &given[3], &given[4],
                                     &given[5], &given[6], &given[7], &given[8], &given[9], &given[10], &given[11], &given[12], &given[13], &given[14],
                                     &given[15], &given[16], &given[17], &PyFloat_Type, &given[18], &context, &self->me, &PyTuple_Type, &ranks,
                                     &PyDict_Type, &codes))
        return -1;
    self->context = (uint32_t)context;
    self->size = (long)PyTuple_Size(ranks);
    self->ranks = PyMem_Calloc((size_t)self->size + 1, sizeof *self->ranks);
    self->lanes = PyMem_Calloc((size_t)self->size + 1, sizeof *self->lanes);
    if (!self->ranks || !self->lanes) {
        PyErr_NoMemory();
        return -1;
    }
    for (long i = 0; i < self->size; i++) self->ranks[i] = PyLong_AsLong(PyTuple_GetItem(ranks, i));
    for (Py_ssize_t at = 0; PyDict_Next(codes, &at, &dtype, &number);) {
        unsigned long code = PyLong_AsUnsignedLong(number);
        PyObject *itemsize = PyArray_DescrCheck(dtype) ? PyObject_GetAttrString(dtype, "itemsize") : NULL;
        if (!itemsize || !code || code >= CODES || self->dtypes[code]) {
            Py_XDECREF(itemsize);
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "codes are numbers of dtypes, of one byte");
            return -1;
        }
        self->itemsizes[code] = PyLong_AsSize_t(itemsize);
        self->dtypes[code] = (PyArray_Descr *)Py_NewRef(dtype);
        Py_DECREF(itemsize);
    }
    for (int i = 0; i < GIVEN; i++) self->parts[i] = Py_NewRef(given[i]);
    for (int i = DRIVER; i <= CONCLUDE; i++)
        if (!(self->parts[i] = PyUnicode_InternFromString(interned[i - DRIVER]))) return -1;
    self->parts[FINISH] = PyObject_GetAttrString(given[RECEIVING], "_finish");
    self->parts[IS_DONE] = PyObject_GetAttrString(given[RECEIVING], "done");
    return PyErr_Occurred() ? -1 : handles_init(self);
}

static int post_traverse(Post *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    for (int i = 0; i < PARTS; i++) Py_VISIT(self->parts[i]);
    for (long i = 0; self->lanes && i < self->size; i++) Py_VISIT((PyObject *)self->lanes[i]);
    Py_VISIT((PyObject *)self->posted);
    return 0;
}

static int post_clear(Post *self) {
    for (int i = 0; i < PARTS; i++) Py_CLEAR(self->parts[i]); /* without an office, each call is for Python */
    for (long i = 0; self->lanes && i < self->size; i++) Py_CLEAR(self->lanes[i]);
    return 0;
}

static void post_dealloc(Post *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    post_clear(self);
    for (int i = 0; i < CODES; i++) Py_XDECREF((PyObject *)self->dtypes[i]);
    for (int i = 0; i < KNOWN; i++) Py_XDECREF(self->known[i].words);
    Py_XDECREF((PyObject *)self->shorts);
    Py_XDECREF((PyObject *)self->posted);
    PyMem_Free(self->ranks);
    PyMem_Free(self->lanes);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define FAST(name) (PyCFunction)(void (*)(void))name, METH_FASTCALL
static PyMethodDef post_methods[] = {
    {"open", (PyCFunction)post_open, METH_VARARGS, "open(office, ...): begin to make calls."},
    {"isend", FAST(post_isend), "isend(array, dest, tag, mode, timeout_s): begin to send an array; return its work."},
    {"irecv", FAST(post_irecv), "irecv(source, tag, out, timeout_s): begin to receive an array; return its work."},
    {"deliver", (PyCFunction)post_deliver, METH_O, "deliver(lane): let messages that have come meet receives that wait; return how many."},
    {"send", FAST(post_send), "send(array, dest, tag, mode, timeout_s): send an array."},
    {"send_bytes", FAST(post_send_bytes), "send_bytes(data, dest, tag, mode, timeout_s): send an object as bytes; return whether that was done."},
    {"recv", FAST(post_recv), "recv(source, tag, out, status, timeout_s): receive an array."},
    {"recv_bytes", FAST(post_recv_bytes), "recv_bytes(source, tag, status, timeout_s): receive an object; return its bytes and its sender, or None."},
    {"iprobe", FAST(post_iprobe), "iprobe(source, tag): say whether a message is there."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot post_slots[] = {
    {Py_tp_doc, "The messages with tags of one group."},
    {Py_tp_init, post_init},
    {Py_tp_traverse, post_traverse},
    {Py_tp_clear, post_clear},
    {Py_tp_dealloc, post_dealloc},
    {Py_tp_methods, post_methods},
    {0, NULL},
};

PyType_Spec post_spec = {
    .name = "oneaccord_native._core.Post",
    .basicsize = sizeof(Post),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = post_slots,
};
