/* The handles of sends and receives with tags that C makes: oneaccord.calls.post.requests.Receiving and Sent.

   Their types are derived from those of Python, whose methods find here what they set and read. What only the unusual needs, as a lock and a list of
   callbacks, or the receive in the form that Python's office works with, is made when it is first asked for. */
#include "post.h"

/* What C has of a send that has ended. */
typedef struct {
    Post *post;
    PyObject *words;
} Gone;

/* Behind which parts of Python's types these begin. It does not change, and must be known when the types themselves are cleared. */
static Py_ssize_t receiving_at, sent_at;

static void *part_of(void *self, Py_ssize_t at) { return (char *)self + at; }

static Request *request_of(PyObject *self) { return part_of(self, receiving_at); }

static Gone *gone_of(PyObject *self) { return part_of(self, sent_at); }

PyObject *sent_made(Post *post, PyObject *words) {
    const State *state = state_of(TYPE_OF(post));
    PyObject *self = PyType_GenericAlloc(state->sent, 0);
    if (self) *gone_of(self) = (Gone){(Post *)Py_NewRef((PyObject *)post), Py_NewRef(words)};
    return self;
}

Request *request_made(Post *post) {
    const State *state = state_of(TYPE_OF(post));
    PyObject *self = PyType_GenericAlloc(state->receiving, 0);
    if (!self) return NULL;
    Request *request = request_of(self);
    request->object = self;
    request->post = (Post *)Py_NewRef((PyObject *)post);
    return request;
}

/* What is known of the message that has come: its sender, and the beginning of its opening. */
static PyObject *about(const Request *request) {
    unsigned char opening[sizeof request->head + sizeof request->lengths];
    size_t lengths = 8 * (size_t)request->head.ndim;
    memcpy(opening, &request->head, sizeof request->head);
    memcpy(opening + sizeof request->head, request->lengths, lengths);
    return Py_BuildValue("ly#", request->source, opening, (Py_ssize_t)(sizeof request->head + lengths));
}

PyObject *view_of(Request *request) {
    const Post *post = request->post;
    PyObject *const *parts = post->parts;
    if (request->view) return Py_NewRef(request->view);
    if (!parts[OFFICE]) return PyErr_Format(PyExc_RuntimeError, "the group of this receive is no more");
    PyObject *view = made(post, RECEIVE);
    if (!view || set(post, view, WHAT, Py_NewRef(request->words)) || set(post, view, KEY, key_of(post->context, request->source, request->tag)) ||
        (request->out != Py_None && set(post, view, OUT, Py_NewRef(request->out))) || set(post, view, NUMBER, PyLong_FromLong(0)) ||
        set(post, view, PATH_OF, Py_NewRef(parts[PATH])) || set(post, view, REQUEST, Py_NewRef(request->object)) ||
        set(post, view, KEPT_BY, Py_NewRef(parts[KEPT])) || set(post, view, LIMITS, Py_BuildValue("dd", request->until, request->seconds))) {
        Py_XDECREF(view);
        return NULL;
    }
    if (!request->view) {
        request->view = Py_NewRef(view);
        if (!request->posted && (set(post, view, ABOUT, about(request)) || set(post, view, ARRAY, Py_NewRef(request->array)) || set(post, view, DONE, Py_NewRef(Py_True))))
            Py_CLEAR(request->view);
    }
    Py_DECREF(view); /* another thread may have made one meanwhile */
    return Py_XNewRef(request->view);
}

int conclude(Request *request) {
    const Post *post = request->post;
    PyObject *done, *view = request->view;
    if (view) {
        Py_INCREF(view);
        bool failed = set(post, view, ABOUT, about(request)) || set(post, view, ARRAY, Py_NewRef(request->array));
        done = failed ? NULL : PyObject_CallMethodObjArgs(view, post->parts[ARRIVE], NULL);
        Py_DECREF(view);
    } else {
        request->ended = true;
        if (!request->lock) return 0;
        done = PyObject_CallMethodObjArgs(request->object, post->parts[CONCLUDE], NULL);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Receives: what Python's methods set and read. */

static PyObject *get_object(PyObject *self, void *at) {
    PyObject *value = *(PyObject **)part_of(request_of(self), (Py_ssize_t)at);
    return Py_NewRef(value ? value : Py_None);
}

static PyObject *get_sequence(PyObject *self, void *at) {
    PyObject *value = *(PyObject **)part_of(request_of(self), (Py_ssize_t)at);
    return value ? Py_NewRef(value) : PyTuple_New(0);
}

static int set_object(PyObject *self, PyObject *value, void *at) {
    PyObject **place = part_of(request_of(self), (Py_ssize_t)at), *before = *place;
    *place = Py_XNewRef(value);
    Py_XDECREF(before);
    return 0;
}

static PyObject *get_bool(PyObject *self, void *at) { return PyBool_FromLong(*(bool *)part_of(request_of(self), (Py_ssize_t)at)); }

static int set_bool(PyObject *self, PyObject *value, void *at) {
    int truth = value ? PyObject_IsTrue(value) : 0;
    if (truth >= 0) *(bool *)part_of(request_of(self), (Py_ssize_t)at) = truth;
    return truth < 0 ? -1 : 0;
}

static PyObject *get_lock(PyObject *self, void *Py_UNUSED(none)) {
    Request *request = request_of(self);
    if (!request->lock) {
        PyObject *lock = PyObject_CallNoArgs(request->post->parts[LOCK]);
        if (!lock) return NULL;
        if (request->lock)
            Py_DECREF(lock); /* another thread has made one meanwhile */
        else
            request->lock = lock;
    }
    return Py_NewRef(request->lock);
}

static PyObject *get_path(PyObject *self, void *Py_UNUSED(none)) { return Py_NewRef(request_of(self)->post->parts[PATH]); }

static PyObject *get_what(PyObject *self, void *Py_UNUSED(none)) { return PyObject_Str(request_of(self)->words); }

static PyObject *get_operations(PyObject *self, void *Py_UNUSED(none)) {
    PyObject *view = view_of(request_of(self)), *all = view ? PyTuple_Pack(1, view) : NULL;
    Py_XDECREF(view);
    return all;
}

#define AT(field) (void *)offsetof(Request, field)
static PyGetSetDef receiving_attributes[] = {
    {"_ended", get_bool, set_bool, NULL, AT(ended)},
    {"_takes_stock", get_bool, set_bool, NULL, AT(takes_stock)},
    {"_error", get_object, set_object, NULL, AT(error)},
    {"_trace", get_object, set_object, NULL, AT(trace)},
    {"_callbacks", get_sequence, set_object, NULL, AT(callbacks)},
    {"_places", get_sequence, set_object, NULL, AT(places)},
    {"_lock", get_lock, NULL, NULL, NULL},
    {"_path", get_path, NULL, NULL, NULL},
    {"_what", get_what, NULL, NULL, NULL},
    {"operations", get_operations, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *receiving_finish(PyObject *self, PyObject *deadline) {
    Request *request = request_of(self);
    if (!request->ended) progress(request, true);
    if (request->ended && request->array && !request->view) return Py_NewRef(request->array);
    return PyObject_CallFunctionObjArgs(request->post->parts[FINISH], self, deadline, NULL);
}

static PyObject *receiving_done(PyObject *self, PyObject *Py_UNUSED(none)) {
    Request *request = request_of(self);
    PyObject *const *parts = request->post->parts;
    if (!request->ended && progress(request, false) && !PyDict_Size(parts[KEPT]) && !PySet_Size(parts[OWING])) return Py_NewRef(Py_False);
    if (request->ended && !request->takes_stock) return Py_NewRef(Py_True);
    return PyObject_CallFunctionObjArgs(parts[IS_DONE], self, NULL);
}

static PyMethodDef receiving_methods[] = {
    {"_finish", receiving_finish, METH_O, "As for `Work`."},
    {"done", receiving_done, METH_NOARGS, "Return whether the call has ended, successfully or not. Moves what can be moved now, and never blocks."},
    {NULL, NULL, 0, NULL},
};

static int receiving_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    const Request *request = request_of(self);
    Py_VISIT((PyObject *)request->post);
    PyObject *all[] = {request->out, request->array, request->view, request->lock, request->callbacks, request->places, request->error, request->trace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) Py_VISIT(all[i]);
    return 0;
}

static int receiving_clear(PyObject *self) {
    Request *request = request_of(self);
    Py_CLEAR(request->view);
    Py_CLEAR(request->callbacks);
    Py_CLEAR(request->places);
    Py_CLEAR(request->error);
    Py_CLEAR(request->trace);
    return 0;
}

static void freed(PyObject *self) {
    PyTypeObject *type = TYPE_OF(self);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void receiving_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    receiving_clear(self);
    Request *request = request_of(self);
    PyObject *rest[] = {request->words, request->out, request->array, request->lock, (PyObject *)request->post};
    for (size_t i = 0; i < sizeof rest / sizeof *rest; i++) Py_XDECREF(rest[i]);
    freed(self);
}

static PyType_Slot receiving_slots[] = {
    {Py_tp_doc, "A receive of one array that C has begun."},
    {Py_tp_traverse, receiving_traverse},
    {Py_tp_clear, receiving_clear},
    {Py_tp_dealloc, receiving_dealloc},
    {Py_tp_methods, receiving_methods},
    {Py_tp_getset, receiving_attributes},
    {0, NULL},
};

/* Sends. */

static PyObject *gone_path(PyObject *self, void *Py_UNUSED(none)) { return Py_NewRef(gone_of(self)->post->parts[PATH]); }

static PyObject *gone_what(PyObject *self, void *Py_UNUSED(none)) { return PyObject_Str(gone_of(self)->words); }

static PyGetSetDef sent_attributes[] = {
    {"_path", gone_path, NULL, NULL, NULL},
    {"_what", gone_what, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *sent_finish(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(deadline)) { Py_RETURN_NONE; }

static PyObject *sent_done(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) { Py_RETURN_TRUE; }

static PyMethodDef sent_methods[] = {
    {"_finish", sent_finish, METH_O, "As for `Work`."},
    {"done", sent_done, METH_NOARGS, "Return that the call has ended."},
    {NULL, NULL, 0, NULL},
};

static int sent_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT((PyObject *)gone_of(self)->post);
    return 0;
}

static int sent_clear(PyObject *Py_UNUSED(self)) { return 0; }

static void sent_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Gone *gone = gone_of(self);
    Py_XDECREF(gone->words);
    Py_XDECREF((PyObject *)gone->post);
    freed(self);
}

static PyType_Slot sent_slots[] = {
    {Py_tp_doc, "A send that had ended when it had begun."},
    {Py_tp_traverse, sent_traverse},
    {Py_tp_clear, sent_clear},
    {Py_tp_dealloc, sent_dealloc},
    {Py_tp_methods, sent_methods},
    {Py_tp_getset, sent_attributes},
    {0, NULL},
};

/* The types. */

#define HANDLE Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION
static const PyType_Spec receiving_spec = {"oneaccord_native._core.Receiving", sizeof(Request), 0, HANDLE, receiving_slots};
static const PyType_Spec sent_spec = {"oneaccord_native._core.Sent", sizeof(Gone), 0, HANDLE, sent_slots};

/* Make a type that adds a part to a type of Python. */
static int derived(PyTypeObject **made, Py_ssize_t *at, PyObject *module, const PyType_Spec *spec, PyObject *base) {
    PyObject *size = PyObject_GetAttrString(base, "__basicsize__"), *bases = size ? PyTuple_Pack(1, base) : NULL;
    PyType_Spec whole = *spec;
    Py_ssize_t begins = size ? PyLong_AsSsize_t(size) : -1;
    if (bases && *at && *at != begins) PyErr_SetString(PyExc_TypeError, "the handles of another oneaccord are in use");
    whole.basicsize += (int)begins;
    if (bases && !PyErr_Occurred()) *at = begins;
    if (bases && !PyErr_Occurred()) *made = (PyTypeObject *)PyType_FromModuleAndSpec(module, &whole, bases);
    Py_XDECREF(size);
    Py_XDECREF(bases);
    return *made ? 0 : -1;
}

int handles_init(Post *post) {
    PyObject *module = PyType_GetModule(TYPE_OF(post));
    State *state = state_of(TYPE_OF(post));
    if (state->receiving && state->sent) return 0;
    if (derived(&state->receiving, &receiving_at, module, &receiving_spec, post->parts[RECEIVING]) < 0) return -1;
    return derived(&state->sent, &sent_at, module, &sent_spec, post->parts[SENT]);
}
