/* Messages with tags, the common case of oneaccord.calls.post in C: a message that leaves at once, and a receive whose message is the next to come.

   A message is an opening, which begins with a `Head`, and the rest of its bytes, if there are any, as a message of its own. Whatever is unusual is for
   Python, which finds everything as if C had not looked: other threads in the office, messages and receives that wait for each other, answers that are
   due, lines that are at work. What C cannot finish, Python goes on with, from the bytes that have moved. */
#include "native.h"

#include <math.h>

#define EAGER 1
#define OBJECT 1
#define SYNC 2
#define ANY (-1)
#define MOST_DIMENSIONS 32
#define CODES 256
#define KNOWN 64

/* What stands in an opening in front of the data, after which comes the shape: oneaccord.calls.post.envelopes. */
typedef struct {
    uint32_t context;
    uint8_t kind, flags, code, ndim;
    int64_t tag;
    uint64_t number, nbytes;
    uint16_t fields, none;
    uint32_t padding;
} Head;
_Static_assert(sizeof(Head) == 40, "as envelopes._HEAD");

/* The records to and from one peer: oneaccord.calls.post.lines.Line. */
typedef struct {
    PyObject_HEAD
    PyObject *line, *object; /* its form in Python, and the mailbox, whose C form is `box` */
    const Mailbox *box;
    Counters *sent, *taken, *begun, *met;
    unsigned char out[HEADER_BYTES], into[HEADER_BYTES]; /* the headers of openings */
    unsigned number_at, nbytes_at, index_at;
    size_t opening_bytes, most;
    bool partial; /* the next message, or a part of it, is in the mailbox, and must be fetched there */
    bool stopped; /* C has not sent all of a message, with which Python goes on before any other */
} Lane;

static int lane_init(Lane *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"line", "box", "counters", "out", "into", "number_at", "nbytes_at", "index_at", "opening_bytes", "most", NULL};
    PyObject *line, *box, *out, *into, *counters[4];
    Py_ssize_t opening_bytes, most;
    State *state = state_of(TYPE_OF(self));
    if (!state || self->line) return -1;
    PyTypeObject *kind = state->counters;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO(O!O!O!O!)SSIIInn", names, &line, &box, kind, &counters[0], kind, &counters[1], kind, &counters[2],
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

/* The messages of one group. The parts up to LETTERS are given when the group is made, the others when its rank's office is there. */
enum { CALLER, SEND, SEND_ON, RECV, RECV_ON, IPROBE, WORDS, STATUS, ANY_RANK, ANY_TAG, GIVEN };
enum { OFFICE = GIVEN, INSIDE, PARKED, KEPT, OWING, LANES, RECEIVES, LETTERS, OPENED };
enum { DRIVER = OPENED, STEP_BACK, RECALL, SPUN, OUTGOING, INCOMING, MODE, SOURCE, TAG, COUNT, NBYTES, DTYPE, SHAPE, PARTS };
static const char *const interned[] = {"_driver", "_step_back", "recall", "spun",   "outgoing", "incoming", "standard",
                                       "source",  "tag",        "count",  "nbytes", "dtype",    "shape"};

/* The words of a call, which the flight recorder keeps. */
typedef enum { SENDS, SENDS_OBJECT, RECVS, RECVS_OBJECT } Verb;
typedef struct {
    Verb verb;
    long long peer, tag;
    PyObject *words;
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *parts[PARTS];
    Counters *shorts; /* which note calls that have ended */
    uint32_t context;
    long me, size;
    long *ranks;  /* of the world */
    Lane **lanes; /* those that have been used */
    PyArray_Descr *dtypes[CODES];
    size_t itemsizes[CODES];
    Known known[KNOWN];
    long first; /* the rank that is looked at first, for none to be preferred */
} Post;

static bool is_none(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_None;
}

/* Whether the group may be used, and no thread is in the office. A thread of the office itself that is, drives, or moves nothing. */
static bool is_free(const Post *post) {
    PyObject *const *parts = post->parts;
    return parts[OFFICE] && PySet_Size(parts[INSIDE]) == 0 && is_none(parts[OFFICE], parts[DRIVER]) && group_is_open(parts[CALLER]);
}

static bool in_time(PyObject *seconds) {
    return seconds == Py_None || (PyFloat_CheckExact(seconds) && PyFloat_AsDouble(seconds) > 0.0 && isfinite(PyFloat_AsDouble(seconds)));
}

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

/* The line to a rank, if it is idle in one direction; NULL otherwise. */
static Lane *lane_to(Post *post, long rank, int direction) {
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
    if (lane->stopped) return NULL;
    if (is_none(lane->line, post->parts[direction])) return lane;
    if (direction != INCOMING) return NULL;
    PyObject *idle = PyObject_CallMethodObjArgs(lane->line, post->parts[RECALL], NULL); /* which still waits for the next message */
    PyErr_Clear();
    Py_XDECREF(idle);
    return idle == Py_True ? lane : NULL;
}

/* Note a call that has ended. */
static void note(Post *post, Verb verb, long long peer, long long tag, double started) {
    static const char *const verbs[] = {"send", "send_object", "recv", "recv_object"};
    Known *known = &post->known[(size_t)(peer * 31 + tag * 4 + (long long)verb) % KNOWN];
    if (!known->words || known->verb != verb || known->peer != peer || known->tag != tag) {
        PyObject *words = PyObject_CallFunction(post->parts[WORDS], "ssLL", verbs[verb], verb < RECVS ? "to" : "from", peer, tag);
        if (!words) {
            PyErr_Clear();
            return;
        }
        PyObject *before = known->words;
        *known = (Known){verb, peer, tag, words};
        Py_XDECREF(before);
    }
    counters_note(post->shorts, known->words, started);
}

/* The header of a message that follows an opening. */
static void rest_header(const Lane *lane, unsigned char *header, uint64_t number, uint64_t nbytes) {
    uint32_t index = 1;
    memcpy(header + lane->number_at, &number, 8);
    memcpy(header + lane->nbytes_at, &nbytes, 8);
    memcpy(header + lane->index_at, &index, 4);
}

/* Sends. */

static bool has_room(const Mailbox *box) {
    oneaccord_answer answer = ONEACCORD_NOT_YET;
    /* With the interpreter's lock, so that no other thread uses the line. */
    for (unsigned tries = box->tries + 1; tries && (answer = box->room(box->mailbox)) == ONEACCORD_NOT_YET; tries--) continue;
    return answer == ONEACCORD_YES;
}

/* Send a message over a line that is idle; `gone` bytes of it have left where Python goes on. */
static How lane_send(Lane *lane, const Head *head, const npy_intp *lengths, const unsigned char *data, size_t *gone) {
    const Mailbox *box = lane->box;
    if (box->room(box->mailbox) != ONEACCORD_YES) return SLOW_PATH;
    unsigned char *slot = box->slot(box->mailbox), header[HEADER_BYTES];
    size_t nbytes = head->nbytes, start = sizeof *head + 8 * (size_t)head->ndim;
    size_t first = nbytes < lane->opening_bytes - start ? nbytes : lane->opening_bytes - start;
    memcpy(slot, head, sizeof *head);
    for (int i = 0; i < head->ndim; i++) memcpy(slot + sizeof *head + 8 * i, &(uint64_t){(uint64_t)lengths[i]}, 8);
    if (first) memcpy(slot + start, data, first);
    uint64_t number = lane->sent->next;
    memcpy(lane->out + lane->number_at, &number, 8);
    if (box->post(box->mailbox, lane->out, slot, lane->opening_bytes) != ONEACCORD_YES) return SLOW_PATH;
    lane->sent->next++;
    lane->begun->next++;
    *gone = first;
    if (!has_room(box)) return STOPPED_AT;
    if (first == nbytes) return ENDED;
    memcpy(header, lane->out, HEADER_BYTES);
    rest_header(lane, header, number, nbytes - first);
    if (box->post(box->mailbox, header, data + first, nbytes - first) != ONEACCORD_YES) return STOPPED_AT;
    *gone = nbytes;
    return has_room(box) ? ENDED : STOPPED_AT;
}

/* Send `data` to a rank if nothing is unusual; `to` is that rank, the tag, the mode, and the seconds. Return None, NULL with an error, or NULL without
   one if nothing was done. */
static PyObject *send_now(Post *post, PyObject *object, const unsigned char *data, Head head, const npy_intp *lengths, PyObject *const *to) {
    if (to[2] != post->parts[MODE] || !in_time(to[3]) || !is_free(post)) return NULL;
    long rank = rank_of(post, to[0]);
    head.tag = tag_of(post, to[1]);
    if (rank < 0 || rank == post->me || head.tag < 0) return NULL;
    Lane *lane = lane_to(post, rank, OUTGOING);
    if (!lane || head.nbytes > lane->most) return NULL;
    double started = now_s();
    size_t gone;
    head.kind = EAGER;
    head.context = post->context;
    How how = lane_send(lane, &head, lengths, data, &gone);
    if (how == SLOW_PATH) return NULL;
    lane->stopped = how == STOPPED_AT;
    if (lane->stopped) return PyObject_CallFunction(post->parts[SEND_ON], "OOOOn", object, to[0], to[1], to[3], (Py_ssize_t)gone);
    note(post, head.flags & OBJECT ? SENDS_OBJECT : SENDS, post->ranks[rank], head.tag, started);
    return Py_NewRef(Py_None);
}

/* Call the form in Python of a call that C has not made. */
static PyObject *slowly(PyObject *call, PyObject *const *given, Py_ssize_t count) {
    PyObject *arguments = PyTuple_New(count);
    for (Py_ssize_t i = 0; arguments && i < count; i++) PyTuple_SetItem(arguments, i, Py_NewRef(given[i]));
    PyObject *result = arguments ? PyObject_CallObject(call, arguments) : NULL;
    Py_XDECREF(arguments);
    return result;
}

static bool counted(Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted) return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, and %zd were given", wanted, count);
    return false;
}

/* send(array, dest, tag, mode, timeout_s): as TaggedCalls._send_tagged. */
static PyObject *post_send(Post *self, PyObject *const *given, Py_ssize_t count) {
    if (!counted(count, 5)) return NULL;
    PyArrayObject *array = (PyArrayObject *)given[0];
    if (PyArray_CheckExact(given[0]) && PyArray_IS_C_CONTIGUOUS(array) && PyArray_NDIM(array) <= MOST_DIMENSIONS) {
        unsigned code = CODES - 1;
        while (code && self->dtypes[code] != PyArray_DESCR(array)) code--;
        Head head = {.code = (uint8_t)code, .ndim = (uint8_t)PyArray_NDIM(array), .nbytes = (uint64_t)PyArray_NBYTES(array)};
        PyObject *done = code ? send_now(self, given[0], PyArray_DATA(array), head, PyArray_DIMS(array), given + 1) : NULL;
        if (done || PyErr_Occurred()) return done;
    }
    return slowly(self->parts[SEND], given, count);
}

/* send_bytes(data, dest, tag, mode, timeout_s): send an object as bytes; return whether it was done, which is nothing unusual. */
static PyObject *post_send_bytes(Post *self, PyObject *const *given, Py_ssize_t count) {
    if (!counted(count, 5)) return NULL;
    PyObject *done = NULL;
    if (PyByteArray_CheckExact(given[0])) {
        Head head = {.flags = OBJECT, .nbytes = (uint64_t)PyByteArray_Size(given[0])};
        done = send_now(self, given[0], (const unsigned char *)PyByteArray_AsString(given[0]), head, NULL, given + 1);
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

/* Whether no message waits for a receive like this, and no other receive for a message. */
static bool is_next(const Post *post, const Wanted *wanted) {
    if (PyDict_Size(post->parts[RECEIVES])) return false;
    if (!PyDict_Size(post->parts[LETTERS])) return true;
    PyObject *key = Py_BuildValue("klL", (unsigned long)post->context, wanted->source == ANY ? (long)ANY : post->ranks[wanted->source], wanted->tag);
    bool waits = !key || PyDict_GetItemWithError(post->parts[LETTERS], key);
    Py_XDECREF(key);
    PyErr_Clear();
    return !waits;
}

static void drive(Post *post, Wanted *wanted) {
    if (wanted->drives) return;
    wanted->drives = !PyObject_SetAttr(post->parts[OFFICE], post->parts[DRIVER], (PyObject *)post);
    PyErr_Clear();
}

/* Let others drive. */
static void step_back(const Post *post) {
    PyObject *const *parts = post->parts;
    PyObject *driver = PyObject_GetAttr(parts[OFFICE], parts[DRIVER]);
    bool mine = driver == (PyObject *)post; /* otherwise Python has stepped back */
    PyErr_Clear();
    Py_XDECREF(driver);
    if (!mine) return;
    int failed;
    if (PyDict_Size(parts[PARKED]) || PyDict_Size(parts[KEPT]) || PySet_Size(parts[OWING])) {
        PyObject *done = PyObject_CallMethodObjArgs(parts[OFFICE], parts[STEP_BACK], NULL);
        failed = !done;
        Py_XDECREF(done);
    } else {
        failed = PyObject_SetAttr(parts[OFFICE], parts[DRIVER], Py_None);
    }
    if (failed) PyErr_WriteUnraisable(parts[OFFICE]);
}

/* The lines on which a message may come, as ranks of the group from..to; false if one of them is at work. */
static bool lanes_of(Post *post, const Wanted *wanted, long *from, long *to) {
    *from = wanted->source == ANY ? 0 : wanted->source;
    *to = wanted->source == ANY ? post->size : wanted->source + 1;
    for (long rank = *from; rank < *to; rank++) {
        if (rank == post->me) continue;
        Lane *lane = lane_to(post, rank, INCOMING);
        if (!lane) return false;
        memcpy(lane->into + lane->number_at, &(uint64_t){lane->taken->next}, 8);
        lane->box->release(lane->box->mailbox);
    }
    return *to - *from > (wanted->source == ANY); /* somebody can send it */
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
    if (!is_free(post) || !is_next(post, wanted) || !lanes_of(post, wanted, &from, &to)) return ANY;
    const Mailbox *box = post->lanes[from == post->me ? from + 1 : from]->box;
    Looks looks = {box->tries, 0.0};
    Patience patience = {NULL};
    oneaccord_answer answer;
    while ((rank = look(post, from, to, &answer)) == ANY) {
        if (answer == ONEACCORD_PART) looks = (Looks){box->tries, 0.0};
        if (releases_next(&looks, &patience)) drive(post, wanted);
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

/* Read the head and the shape of an opening that has come; return where the data begins, or 0 if it is for Python. */
static size_t opened(const Post *post, const Lane *lane, const Wanted *wanted, const unsigned char *opening, Head *head, npy_intp *lengths) {
    memcpy(head, opening, sizeof *head);
    size_t start = sizeof *head + 8 * (size_t)head->ndim;
    if (head->kind != EAGER || head->context != post->context || (wanted->tag != ANY && wanted->tag != head->tag) || head->number || head->fields ||
        (head->flags & (OBJECT | SYNC)) != wanted->flags || head->ndim > MOST_DIMENSIONS || head->nbytes > lane->most)
        return 0;
    if (wanted->flags & OBJECT) return head->code || head->ndim ? 0 : start;
    uint64_t nbytes = post->itemsizes[head->code];
    for (int i = 0; i < head->ndim; i++) {
        uint64_t length;
        memcpy(&length, opening + sizeof *head + 8 * i, 8);
        if (length > lane->most || (nbytes *= length) > lane->most) return 0; /* also of arrays without elements, which may be of any length */
        lengths[i] = (npy_intp)length;
    }
    return post->dtypes[head->code] && nbytes == head->nbytes ? start : 0;
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
    drive(post, wanted); /* nobody else may look at this line meanwhile */
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

static int set(Post *post, PyObject *status, int name, PyObject *value) {
    int failed = value ? PyObject_SetAttr(status, post->parts[name], value) : -1;
    Py_XDECREF(value);
    return failed;
}

/* As Status.fill. */
static int fill(Post *post, PyObject *status, long rank, const Head *head, const npy_intp *lengths) {
    size_t itemsize = post->itemsizes[head->code];
    PyObject *dtype = head->code ? (PyObject *)post->dtypes[head->code] : Py_None, *shape = head->code ? PyTuple_New(head->ndim) : Py_NewRef(Py_None);
    for (int i = 0; shape && i < head->ndim; i++) PyTuple_SetItem(shape, i, PyLong_FromSsize_t(lengths[i]));
    uint64_t count = !head->code ? 1 : itemsize ? head->nbytes / itemsize : 0;
    return set(post, status, SHAPE, shape) || set(post, status, DTYPE, Py_NewRef(dtype)) || set(post, status, SOURCE, PyLong_FromLong(rank)) ||
           set(post, status, TAG, PyLong_FromLongLong(head->tag)) || set(post, status, COUNT, PyLong_FromUnsignedLongLong(count)) ||
           set(post, status, NBYTES, PyLong_FromUnsignedLongLong(head->nbytes));
}

/* The memory of a message: `out`, or new memory; NULL, without an error, if Python must say what is wrong. */
static PyObject *memory_for(const Post *post, PyObject *out, const Head *head, npy_intp *lengths) {
    if (head->flags & OBJECT) return PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)head->nbytes);
    PyArray_Descr *dtype = post->dtypes[head->code];
    if (out != Py_None) return PyArray_DESCR((PyArrayObject *)out) == dtype && (uint64_t)PyArray_NBYTES((PyArrayObject *)out) >= head->nbytes ? Py_NewRef(out) : NULL;
    Py_INCREF((PyObject *)dtype);
    return PyArray_NewFromDescr(&PyArray_Type, dtype, head->ndim, lengths, NULL, NULL, 0, NULL);
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
        size_t start = opened(post, lane, wanted, opening, &head, lengths);
        into = start ? memory_for(post, out, &head, lengths) : NULL;
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

/* iprobe(source, tag): as TaggedCalls._iprobe. */
static PyObject *post_iprobe(Post *self, PyObject *const *given, Py_ssize_t count) {
    Wanted wanted;
    long from, to;
    oneaccord_answer answer;
    if (!counted(count, 2)) return NULL;
    if (wanted_of(self, given[0], given[1], Py_None, &wanted) && is_free(self) && is_next(self, &wanted) && !PyDict_Size(self->parts[KEPT]) &&
        !PySet_Size(self->parts[OWING]) && lanes_of(self, &wanted, &from, &to) && look(self, from, to, &answer) == ANY && answer == ONEACCORD_NOT_YET)
        return Py_NewRef(Py_None);
    return slowly(self->parts[IPROBE], given, count);
}

/* The type. */

/* open(office, inside, parked, kept, owing, lanes, receives, letters, shorts): the office of this rank is there. */
static PyObject *post_open(Post *self, PyObject *args) {
    PyObject *given[OPENED - OFFICE], *shorts;
    State *state = state_of(TYPE_OF(self));
    if (!state || !PyArg_ParseTuple(args, "OO!O!O!O!O!O!O!O!", &given[0], &PySet_Type, &given[1], &PyDict_Type, &given[2], &PyDict_Type, &given[3],
                                    &PySet_Type, &given[4], &PyDict_Type, &given[5], &PyDict_Type, &given[6], &PyDict_Type, &given[7], state->counters, &shorts))
        return NULL;
    if (self->parts[OFFICE]) Py_RETURN_NONE;
    self->shorts = (Counters *)Py_NewRef(shorts);
    for (int i = OFFICE; i < OPENED; i++) self->parts[i] = Py_NewRef(given[i - OFFICE]);
    Py_RETURN_NONE;
}

static int post_init(Post *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"caller", "send", "send_on", "recv", "recv_on", "iprobe", "words", "status", "any_rank", "any_tag", "context", "rank", "ranks", "codes", NULL};
    PyObject *given[GIVEN], *ranks, *codes, *dtype, *number;
    unsigned long context;
    State *state = state_of(TYPE_OF(self));
    if (!state || self->ranks) return -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOOOOOOklO!O!", names, state->caller, &given[0], &given[1], &given[2], &given[3], &given[4],
                                     &given[5], &given[6], &given[7], &given[8], &given[9], &context, &self->me, &PyTuple_Type, &ranks,
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
    for (int i = DRIVER; i < PARTS; i++)
        if (!(self->parts[i] = PyUnicode_InternFromString(interned[i - DRIVER]))) return -1;
    return PyErr_Occurred() ? -1 : 0;
}

static int post_traverse(Post *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    for (int i = 0; i < PARTS; i++) Py_VISIT(self->parts[i]);
    for (long i = 0; self->lanes && i < self->size; i++) Py_VISIT((PyObject *)self->lanes[i]);
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
    PyMem_Free(self->ranks);
    PyMem_Free(self->lanes);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define FAST(name) (PyCFunction)(void (*)(void))name, METH_FASTCALL
static PyMethodDef post_methods[] = {
    {"open", (PyCFunction)post_open, METH_VARARGS, "open(office, inside, parked, kept, owing, lanes, receives, letters, shorts): begin to make calls."},
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
