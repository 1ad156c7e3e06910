/* Receives with tags that wait for their messages: oneaccord.calls.post.matching, for receives of arrays from one rank and with one tag. */
#include "post.h"

static PyObject *replaced(PyObject *before, PyObject *after) {
    Py_DECREF(before);
    return after;
}

PyObject *posted(Post *post, long source, long long tag, PyObject *given, double started, PyObject *out) {
    PyObject *const *parts = post->parts;
    double seconds = PyFloat_AsDouble(given == Py_None ? parts[SECONDS] : given);
    PyObject *receive = made(post, RECEIVE), *work = made(post, RECEIVING), *key = key_of(post->context, source, tag);
    PyObject *numbers = PyObject_GetAttr(parts[MATCHING], parts[NUMBERS]), *queue = NULL, *until = NULL, *done = NULL;
    if (!receive || !work || !key || !numbers || !(until = Py_BuildValue("dd", started + seconds, seconds))) goto end;
    PyObject *words = note(post, RECVS, source, tag, started);
    if (set(post, receive, WHAT, Py_NewRef(words ? words : Py_None)) || set(post, receive, KEY, Py_NewRef(key)) ||
        (out != Py_None && set(post, receive, OUT, Py_NewRef(out))) || set(post, receive, NUMBER, PyIter_Next(numbers)) ||
        set(post, receive, PATH_OF, Py_NewRef(parts[PATH])) || set(post, receive, REQUEST, Py_NewRef(work)) ||
        set(post, receive, KEPT_BY, Py_NewRef(parts[KEPT])) || set(post, work, LOCK_NAME, PyObject_CallObject(parts[LOCK], NULL)) ||
        set(post, work, PATH_NAME, Py_NewRef(parts[PATH])) || set(post, work, OPERATIONS, PyTuple_Pack(1, receive)))
        goto end;
    PyObject *fresh = PyTuple_Pack(1, receive);
    if (fresh) fresh = replaced(fresh, PyObject_CallFunctionObjArgs(parts[DEQUE], fresh, NULL));
    /* While all this was made, other threads may have run: the message may have come, or another thread is about to look. */
    if (!fresh || !is_free(post) || PyDict_GetItemWithError(parts[LETTERS], key)) {
        Py_XDECREF(fresh);
        goto end;
    }
    bool calls = !PyDict_Size(parts[KEPT]);
    queue = Py_XNewRef(PyDict_GetItemWithError(parts[RECEIVES], key));
    if (queue) {
        done = PyObject_CallMethodObjArgs(queue, parts[APPEND], receive, NULL);
    } else if (!PyErr_Occurred() && !PyDict_SetItem(parts[RECEIVES], key, fresh)) {
        done = Py_NewRef(Py_None);
    }
    Py_DECREF(fresh);
    if (!done || PyDict_SetItem(parts[KEPT], receive, until)) Py_CLEAR(done);
    if (done && calls) done = replaced(done, PyObject_CallNoArgs(parts[COURIER]));
end:
    if (!done) Py_CLEAR(work);
    PyObject *all[] = {receive, key, numbers, queue, until, done};
    for (int i = 0; i < 6; i++) Py_XDECREF(all[i]);
    return work;
}

/* Let the message of an opening meet a receive; return whether it has, or -1 with an error. */
static int meet(Post *post, Lane *lane, PyObject *key, PyObject *queue, const unsigned char *opening, const Head *head, npy_intp *lengths, size_t start) {
    PyObject *receive = PySequence_GetItem(queue, 0), *out = NULL, *into = NULL, *done = NULL;
    int met = -1;
    if (!receive || !(out = PyObject_GetAttr(receive, post->parts[OUT]))) goto end;
    met = is_true(receive, post->parts[IS_OBJECT]);
    if (met || (out != Py_None && !(PyArray_CheckExact(out) && PyArray_ISCARRAY((PyArrayObject *)out))) || !(into = memory_for(post, out, head, lengths))) {
        met = 0;
        PyErr_Clear();
        goto end;
    }
    met = -1;
    memcpy(PyArray_BYTES((PyArrayObject *)into), opening + start, head->nbytes);
    if (set(post, receive, ABOUT, Py_BuildValue("ly#", lane->peer, opening, (Py_ssize_t)start)) || set(post, receive, ARRAY, Py_NewRef(into))) goto end;
    done = PyObject_CallMethodObjArgs(queue, post->parts[POPLEFT], NULL);
    if (!done || (!PyObject_Size(queue) && PyDict_DelItem(post->parts[RECEIVES], key))) goto end;
    lane->taken->next++;
    lane->met->next++;
    lane->partial = false;
    lane->box->take(lane->box->mailbox);
    lane->box->release(lane->box->mailbox); /* the peer may wait for room */
    done = replaced(done, PyObject_CallMethodObjArgs(receive, post->parts[ARRIVE], NULL));
    met = done ? 1 : -1;
end:;
    PyObject *all[] = {receive, out, into, done};
    for (int i = 0; i < 4; i++) Py_XDECREF(all[i]);
    return met;
}

/* deliver(lane): let messages that have come meet receives that wait, up to the first that is unusual; return how many. The caller drives. */
PyObject *post_deliver(Post *self, PyObject *object) {
    Lane *lane = (Lane *)object;
    Head head;
    npy_intp lengths[MOST_DIMENSIONS];
    State *state = state_of(TYPE_OF(self));
    if (!state || !PyObject_TypeCheck(object, state->lane)) return PyErr_Format(PyExc_TypeError, "deliver() needs a lane");
    for (long count = 0;; count++) {
        PyObject *wild = PyDict_Size(self->parts[RECEIVES]) ? PyObject_GetAttr(self->parts[MATCHING], self->parts[WILD]) : NULL;
        bool looks = wild && !PyObject_IsTrue(wild);
        Py_XDECREF(wild);
        if (!looks) return PyErr_Occurred() ? NULL : PyLong_FromLong(count);
        memcpy(lane->into + lane->number_at, &(uint64_t){lane->taken->next}, 8);
        lane->box->release(lane->box->mailbox);
        oneaccord_answer answer = lane->box->poll(lane->box->mailbox, lane->into, lane->opening_bytes);
        lane->partial = lane->partial || answer != ONEACCORD_NOT_YET;
        if (answer != ONEACCORD_YES) return PyLong_FromLong(count);
        const unsigned char *opening = lane->box->payload(lane->box->mailbox);
        size_t start = opened(self, lane, opening, &head, lengths);
        if (!start || head.flags & OBJECT || head.nbytes > lane->opening_bytes - start) return PyLong_FromLong(count);
        PyObject *key = key_of(head.context, lane->peer, head.tag), *queue = key ? PyDict_GetItemWithError(self->parts[RECEIVES], key) : NULL;
        int met = queue ? meet(self, lane, key, Py_NewRef(queue), opening, &head, lengths, start) : 0;
        Py_XDECREF(queue);
        Py_XDECREF(key);
        if (met < 0 || PyErr_Occurred()) return NULL;
        if (!met) return PyLong_FromLong(count);
    }
}
