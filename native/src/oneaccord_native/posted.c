/* Receives with tags that wait for their messages: oneaccord.calls.post.matching, for receives of arrays from one rank and with one tag.

   C keeps those that it has posted to itself. Where Python looks for receives it has them handed over first, so that it finds everything as if C had not
   looked. Those that wait here were posted after all that wait there. */
#include "post.h"

#include <math.h>

/* The receives that wait for the same are a queue, whose first one stands for it. It is found by a hash of what they wait for. */

static size_t hash_of(uint32_t context, long source, long long tag) {
    uint64_t mixed = (uint64_t)tag * 0x9E3779B97F4A7C15u ^ ((uint64_t)source + 1) * 0xC2B2AE3D27D4EB4Fu ^ ((uint64_t)context + 1) * 0x165667B19E3779F9u;
    return (size_t)(mixed ^ mixed >> 29 ^ mixed >> 47);
}

static size_t hash_for(const Request *request) { return hash_of(request->post->context, request->source, request->tag); }

static Request **place_of(Posted *posted, uint32_t context, long source, long long tag) {
    Request **at = &posted->places[hash_of(context, source, tag) & posted->mask], *here;
    while ((here = *at) && !(here->tag == tag && here->source == source && here->post->context == context)) {
        at = &here->other;
        posted->looks++;
    }
    return at;
}

static Request **place_for(Posted *posted, const Request *request) { return place_of(posted, request->post->context, request->source, request->tag); }

/* Make room for one more queue; return whether that failed. */
static int grow(Posted *posted) {
    size_t room = posted->places ? 2 * (posted->mask + 1) : 16;
    if (posted->places && posted->keys <= posted->mask) return 0;
    Request **places = PyMem_Calloc(room, sizeof *places);
    if (!places) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; posted->places && i <= posted->mask; i++) {
        for (Request *here = posted->places[i], *other; here; here = other) {
            Request **at = &places[hash_for(here) & (room - 1)];
            other = here->other;
            here->other = *at;
            *at = here;
            posted->looks++;
        }
    }
    PyMem_Free(posted->places);
    posted->places = places;
    posted->mask = room - 1;
    return 0;
}

static void add(Posted *posted, Request *request) {
    Request **at = place_for(posted, request);
    request->posted = posted;
    request->before = posted->last;
    *(posted->last ? &posted->last->behind : &posted->first) = request;
    posted->last = request;
    posted->count++;
    if (request->until < posted->earliest) posted->earliest = request->until;
    if (*at) {
        (*at)->last->next = request;
        (*at)->last = request;
    } else {
        posted->keys++;
        request->last = request;
        *at = request;
    }
    Py_INCREF(request->object);
}

/* Let the first receive of its queue wait no longer; the caller owns what the list owned. */
static void drop(Posted *posted, Request *request) {
    Request **at = place_for(posted, request), *next = request->next;
    *(request->before ? &request->before->behind : &posted->first) = request->behind;
    *(request->behind ? &request->behind->before : &posted->last) = request->before;
    posted->count--;
    if (next) {
        next->last = request->last;
        next->other = request->other;
        *at = next;
    } else {
        posted->keys--;
        *at = request->other;
    }
    request->posted = NULL;
    request->before = request->behind = request->next = request->last = request->other = NULL;
}

PyObject *posted(Post *post, long rank, long long tag, PyObject *given, double started, PyObject *out) {
    PyObject *const *parts = post->parts;
    Posted *list = post->posted;
    Request *request = request_made(post);
    if (!request) return NULL;
    request->rank = rank;
    request->source = post->ranks[rank];
    request->tag = tag;
    request->seconds = PyFloat_AsDouble(given == Py_None ? parts[SECONDS] : given);
    request->until = started + request->seconds;
    request->out = Py_NewRef(out);
    PyObject *words = note(post, RECVS, request->source, tag, started), *key = NULL;
    request->words = Py_NewRef(words ? words : Py_None);
    bool waits = parts[OFFICE] && PyDict_Size(parts[LETTERS]) && (key = key_of(post->context, request->source, tag)) && PyDict_GetItemWithError(parts[LETTERS], key);
    Py_XDECREF(key);
    /* While all this was made, other threads may have run: the message may have come, or another thread is about to look. */
    if (waits || PyErr_Occurred() || !is_free(post, true) || grow(list) < 0) {
        Py_DECREF(request->object);
        return NULL;
    }
    add(list, request);
    if (list->count == 1 && !PyDict_Size(parts[KEPT])) {
        PyObject *done = PyObject_CallMethodObjArgs(parts[COURIER], parts[CALL], NULL);
        if (!done) PyErr_WriteUnraisable(parts[OFFICE]);
        Py_XDECREF(done);
    }
    return request->object;
}

/* Python takes over. */

static bool hand_over(Posted *posted, Request *request) {
    const Post *post = request->post;
    PyObject *const *parts = post->parts, *queue = NULL;
    PyObject *view = view_of(request), *key = view ? PyObject_GetAttr(view, parts[KEY]) : NULL, *limits = key ? PyObject_GetAttr(view, parts[LIMITS]) : NULL;
    PyObject *numbers = limits ? PyObject_GetAttr(parts[MATCHING], parts[NUMBERS]) : NULL, *fresh = numbers ? PyObject_CallNoArgs(parts[QUEUE]) : NULL;
    bool failed = !fresh;
    /* While all this was made, other threads may have run: they may have handed it over, or its message may have come. Nothing here calls them any more. */
    if (fresh && request->posted && posted->first == request) {
        PyObject *number = PyIter_Next(numbers);
        queue = number ? PyDict_GetItemWithError(parts[RECEIVES], key) : NULL;
        if (number && !queue && !PyErr_Occurred() && !PyDict_SetItem(parts[RECEIVES], key, fresh)) queue = fresh;
        failed = !queue || PyObject_SetItem(queue, number, view) || set(post, view, NUMBER, Py_NewRef(number)) || PyDict_SetItem(parts[KEPT], view, limits);
        Py_XDECREF(number);
        drop(posted, request);
        Py_DECREF(request->object);
    }
    PyObject *all[] = {view, key, limits, numbers, fresh};
    for (int i = 0; i < 5; i++) Py_XDECREF(all[i]);
    return !failed;
}

static PyObject *posted_hand_over(Posted *self, PyObject *Py_UNUSED(none)) {
    while (self->first) {
        PyObject *object = Py_NewRef(self->first->object);
        bool done = hand_over(self, self->first);
        Py_DECREF(object);
        if (!done) return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *posted_earliest(Posted *self, PyObject *now) {
    double until = PyFloat_AsDouble(now);
    if (PyErr_Occurred()) return NULL;
    if (self->earliest <= until) { /* those that have ended since counted as well */
        self->earliest = INFINITY;
        for (const Request *here = self->first; here; here = here->behind)
            if (here->until < self->earliest) self->earliest = here->until;
    }
    return PyFloat_FromDouble(self->earliest);
}

/* Messages come. */

typedef enum { NOTHING, MET, UNUSUAL, FAILED } Met; /* an opening that is unusual is for Python; FAILED with an error */

/* Return the first receive of Python's that waits for a message; NULL, perhaps with an error, if none does. It may let other threads run. */
static PyObject *first_of(const Post *post, PyObject *key, PyObject **number) {
    PyObject *queue = Py_XNewRef(PyDict_GetItemWithError(post->parts[RECEIVES], key)), *each = queue ? PyObject_GetIter(queue) : NULL, *receive = NULL;
    *number = each ? PyIter_Next(each) : NULL;
    if (*number) receive = PyObject_GetItem(queue, *number);
    if (!receive) Py_CLEAR(*number);
    Py_XDECREF(each);
    Py_XDECREF(queue);
    return receive;
}

static int taken(const Post *post, PyObject *key, PyObject *number) {
    PyObject *queue = PyDict_GetItemWithError(post->parts[RECEIVES], key);
    if (!queue && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a receive that waits has no queue");
    if (!queue || PyObject_DelItem(queue, number)) return -1;
    return PyObject_Size(queue) ? 0 : PyDict_DelItem(post->parts[RECEIVES], key);
}

static void take(Lane *lane) {
    lane->taken->next++;
    lane->met->next++;
    lane->partial = false;
    lane->box->take(lane->box->mailbox);
}

/* The memory for a message, with the message in it; NULL if Python must look. */
static PyObject *filled(const Post *post, PyObject *out, const unsigned char *data, const Head *head, npy_intp *lengths) {
    bool fits = out == Py_None || (PyArray_CheckExact(out) && PyArray_ISCARRAY((PyArrayObject *)out));
    PyObject *into = fits ? memory_for(post, out, head, lengths) : NULL;
    if (into)
        memcpy(PyArray_BYTES((PyArrayObject *)into), data, head->nbytes);
    else
        PyErr_Clear();
    return into;
}

/* Let a message meet a receive of Python's. */
static Met meet_in_python(Post *post, Lane *lane, PyObject *key, const unsigned char *opening, const Head *head, npy_intp *lengths, size_t start) {
    PyObject *number, *receive = first_of(post, key, &number), *out = receive ? PyObject_GetAttr(receive, post->parts[OUT]) : NULL, *into = NULL, *done = NULL;
    Met met = out ? UNUSUAL : FAILED;
    if (out && !is_true(receive, post->parts[IS_OBJECT]) && (into = filled(post, out, opening + start, head, lengths))) {
        met = FAILED;
        if (!set(post, receive, ABOUT, Py_BuildValue("ly#", lane->peer, opening, (Py_ssize_t)start)) && !set(post, receive, ARRAY, Py_NewRef(into)) && !taken(post, key, number)) {
            take(lane);
            lane->box->release(lane->box->mailbox); /* the peer may wait for room */
            if ((done = PyObject_CallMethodObjArgs(receive, post->parts[ARRIVE], NULL))) met = MET;
        }
    }
    PyObject *all[] = {number, receive, out, into, done};
    for (int i = 0; i < 5; i++) Py_XDECREF(all[i]);
    return PyErr_Occurred() ? FAILED : met;
}

/* Let a message meet a receive of C's. One that has a form in Python ends under the lock of the office, as all those do. */
static Met meet(Request *request, Lane *lane, bool drives, const unsigned char *opening, const Head *head, npy_intp *lengths, size_t start, bool *stops) {
    PyObject *object = request->object, *into = NULL;
    if (request->view && !drives) return UNUSUAL;
    if (head->ndim > FEW_DIMENSIONS || !(into = filled(request->post, request->out, opening + start, head, lengths))) return UNUSUAL;
    request->array = into;
    request->head = *head;
    memcpy(request->lengths, lengths, sizeof *lengths * head->ndim);
    take(lane);
    drop(request->posted, request);
    *stops = request->view || request->lock || Py_REFCNT(object) == 1; /* then Python runs */
    int failed = conclude(request);
    Py_DECREF(object);
    return failed ? FAILED : MET;
}

/* Let the next message from a peer meet its receive; `stops` is set if Python has run. With `drives` it may meet one of Python's: the caller drives, under the
   lock of the office. */
static Met meet_next(Post *post, Lane *lane, bool drives, bool *stops) {
    Head head;
    npy_intp lengths[MOST_DIMENSIONS];
    const Mailbox *box = lane->box;
    uint64_t number = lane->taken->next;
    memcpy(lane->into + lane->number_at, &number, 8);
    oneaccord_answer answer = box->poll(box->mailbox, lane->into, lane->opening_bytes);
    lane->partial = lane->partial || answer != ONEACCORD_NOT_YET;
    if (answer != ONEACCORD_YES) return answer == ONEACCORD_UNUSUAL ? UNUSUAL : NOTHING;
    const unsigned char *opening = box->payload(box->mailbox);
    size_t start = opened(post, lane, opening, &head, lengths);
    if (!start || head.flags & OBJECT || head.nbytes > lane->opening_bytes - start) return UNUSUAL;
    if (PyDict_Size(post->parts[RECEIVES])) {
        PyObject *wild = PyObject_GetAttr(post->parts[MATCHING], post->parts[WILD]), *key = key_of(head.context, lane->peer, head.tag);
        PyObject *queue = wild && key ? PyDict_GetItemWithError(post->parts[RECEIVES], key) : NULL;
        bool looks = queue ? drives : wild && key && !PyErr_Occurred();
        looks = looks && !PyObject_IsTrue(wild);
        Met met = looks && queue ? meet_in_python(post, lane, key, opening, &head, lengths, start) : PyErr_Occurred() ? FAILED : UNUSUAL;
        Py_XDECREF(wild);
        Py_XDECREF(key);
        if (!looks || queue) {
            *stops = true;
            return met;
        }
        /* While the key was made, other threads may have run. */
        if (!drives && (!is_free(post, false) || lane->taken->next != number)) return UNUSUAL;
    }
    Request *request = post->posted->count ? *place_of(post->posted, head.context, lane->peer, head.tag) : NULL;
    return request ? meet(request, lane, drives, opening, &head, lengths, start, stops) : UNUSUAL;
}

#define MANY 4 /* messages after which the peer learns that there is room again */

/* deliver(lane): let messages that have come meet receives that wait, up to the first that is unusual; return how many. The caller drives. */
PyObject *post_deliver(Post *self, PyObject *object) {
    Lane *lane = (Lane *)object;
    const State *state = state_of(TYPE_OF(self));
    if (!state || !PyObject_TypeCheck(object, state->lane)) return PyErr_Format(PyExc_TypeError, "deliver() needs a lane");
    for (long count = 0;; count++) {
        if (!self->posted || (!self->posted->count && !PyDict_Size(self->parts[RECEIVES]))) return PyLong_FromLong(count);
        if (count % MANY == 0) lane->box->release(lane->box->mailbox);
        bool stops;
        Met met = meet_next(self, lane, true, &stops);
        if (met == MET) continue;
        lane->box->release(lane->box->mailbox);
        return met == FAILED ? NULL : PyLong_FromLong(count);
    }
}

/* Whether this thread may look for the next opening from a peer. */
static bool may_look(const Post *post, const Lane *lane) {
    for (int tries = 0; tries < 3; tries++) {
        if (!is_free(post, false)) return false;
        int listens = is_listening(post, lane);
        if (listens >= 0) return listens;
    }
    return false;
}

/* Let messages that have come from a peer meet their receives, and no more once this one has ended, if one is given. */
static Met meet_some(Post *post, Lane *lane, const Request *request) {
    if (!is_still(post)) return UNUSUAL;
    lane->box->release(lane->box->mailbox); /* which may wake the peer, in Python */
    if (!may_look(post, lane)) return UNUSUAL;
    Met met = MET;
    bool stops = false;
    for (int i = 0; i < MANY && met == MET && !stops && (!request || request->posted); i++) met = meet_next(post, lane, false, &stops);
    if (met == FAILED) PyErr_WriteUnraisable(post->parts[OFFICE]);
    return met;
}

/* Wait a moment for the next opening from a peer; return whether one has come. */
static bool comes(Post *post, Lane *lane) {
    const Mailbox *box = lane->box;
    Looks looks = {box->tries, 0.0};
    Patience patience = {NULL};
    bool drives = false;
    oneaccord_answer answer;
    while ((answer = box->poll(box->mailbox, lane->into, lane->opening_bytes)) == ONEACCORD_NOT_YET || answer == ONEACCORD_PART) {
        if (answer == ONEACCORD_PART) looks = (Looks){box->tries, 0.0};
        if (releases_next(&looks, &patience)) drive(post, &drives);
        if (!look_again(box, &looks, &patience)) break;
    }
    lane->partial = lane->partial || answer != ONEACCORD_NOT_YET;
    patience_end(&patience);
    bool came = answer == ONEACCORD_YES;
    if (drives && !came && PyObject_SetAttr(post->parts[OFFICE], post->parts[SPUN], Py_True)) PyErr_Clear();
    if (drives) step_back(post);
    return came;
}

bool progress(Request *request, bool waits) {
    Post *post = request->post;
    Lane *lane = request->posted && post->parts[OFFICE] ? lane_to(post, request->rank) : NULL;
    if (!lane) return false;
    post->posted->drives++;
    for (Met met = MET; request->posted;) {
        if ((met = meet_some(post, lane, request)) == MET) continue;
        if (met != NOTHING || !waits) return met == NOTHING;
        /* Python moves what waits to be sent, for the peer may wait for that. */
        if (!post->parts[OWING] || PySet_Size(post->parts[OWING]) || !comes(post, lane)) return false;
    }
    return false;
}

void progress_from(Post *post, Lane *lane) {
    while (post->posted && post->posted->count && meet_some(post, lane, NULL) == MET) continue;
}

/* The type. */

static int posted_init(Posted *self, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    self->earliest = INFINITY;
    return grow(self);
}

static int posted_traverse(Posted *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    for (const Request *here = self->first; here; here = here->behind) Py_VISIT(here->object);
    return 0;
}

static int posted_clear(Posted *self) {
    while (self->first) {
        PyObject *object = self->first->object;
        drop(self, self->first);
        Py_DECREF(object);
    }
    return 0;
}

static void posted_dealloc(Posted *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    posted_clear(self);
    PyMem_Free(self->places);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static Py_ssize_t posted_count(Posted *self) { return (Py_ssize_t)self->count; }

static PyMethodDef posted_methods[] = {
    {"hand_over", (PyCFunction)posted_hand_over, METH_NOARGS, "Let Python have all receives that wait, in order."},
    {"earliest", (PyCFunction)posted_earliest, METH_O, "earliest(now): return when the first time of theirs is up, or something between now and then."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef posted_members[] = {
    {"drives", T_ULONGLONG, offsetof(Posted, drives), READONLY, NULL},
    {"looks", T_ULONGLONG, offsetof(Posted, looks), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot posted_slots[] = {
    {Py_tp_doc, "The receives that C has posted and that wait for their messages, of one rank."},
    {Py_tp_init, posted_init},
    {Py_tp_traverse, posted_traverse},
    {Py_tp_clear, posted_clear},
    {Py_tp_dealloc, posted_dealloc},
    {Py_tp_methods, posted_methods},
    {Py_tp_members, posted_members},
    {Py_sq_length, posted_count},
    {0, NULL},
};

PyType_Spec posted_spec = {
    .name = "oneaccord_native._core.Posted",
    .basicsize = sizeof(Posted),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = posted_slots,
};
