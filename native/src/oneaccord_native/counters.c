/* The counters of calls that run one after the other: oneaccord.calls.order.counters.PythonCounters in C. The interpreter's lock is held wherever they are touched. */
#include "native.h"

bool counters_take(Counters *counters) {
    bool free = !counters->busy;
    counters->busy = true;
    return free;
}

/* Make the turn free, unless somebody waits for it: that is for Python. */
bool counters_free(Counters *counters) {
    if (counters->first < PyList_Size(counters->queue)) return false;
    counters->busy = false;
    return true;
}

uint64_t counters_begin(Counters *counters, PyObject *what) {
    uint64_t number = counters->next++;
    counters->call = counters->counted ? ++counters->counted->messages : number;
    counters->started = now_s();
    PyObject *before = counters->what;
    counters->what = Py_NewRef(what);
    Py_XDECREF(before);
    return number;
}

void counters_leave(Counters *counters) {
    if (!counters->kept) { /* counters that were never made: there is nowhere to keep the call */
        Py_CLEAR(counters->what);
        return;
    }
    Short *kept = &counters->ended[counters->ended_count++ % counters->kept];
    PyObject *before = kept->what;
    *kept = (Short){counters->what, counters->call, counters->started, now_s()};
    counters->what = NULL;
    Py_XDECREF(before);
}

void counters_note(Counters *counters, PyObject *what, double started) {
    counters->call = counters->counted ? ++counters->counted->messages : counters->next++;
    counters->started = started;
    PyObject *before = counters->what;
    counters->what = Py_NewRef(what);
    Py_XDECREF(before);
    counters_leave(counters);
}

static int counters_init(Counters *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"channel", "counted", "kept", NULL};
    PyObject *counted = Py_None;
    long long kept = 32;
    if (self->queue) {
        PyErr_SetString(PyExc_RuntimeError, "counters are made once");
        return -1;
    }
    self->channel = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|LOL", names, &self->channel, &counted, &kept)) return -1;
    if (kept < 1) {
        PyErr_Format(PyExc_ValueError, "counters keep at least one call, and %lld was given", kept);
        return -1;
    }
    if (counted != Py_None) {
        if (!PyObject_TypeCheck(counted, TYPE_OF(self))) {
            PyErr_SetString(PyExc_TypeError, "calls are counted in other counters of this form");
            return -1;
        }
        self->counted = (Counters *)Py_NewRef(counted);
    }
    self->ended = PyMem_Calloc((size_t)kept, sizeof(Short));
    if (!self->ended) {
        PyErr_NoMemory();
        return -1;
    }
    self->kept = (uint64_t)kept;
    self->queue = PyList_New(0);
    return self->queue ? 0 : -1;
}

static int counters_traverse(Counters *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->queue);
    Py_VISIT(self->counted);
    Py_VISIT(self->what);
    for (uint64_t i = 0; i < self->kept && i < self->ended_count; i++) Py_VISIT(self->ended[i].what);
    return 0;
}

static int counters_clear(Counters *self) {
    Py_CLEAR(self->what);
    for (uint64_t i = 0; i < self->kept && i < self->ended_count; i++) Py_CLEAR(self->ended[i].what);
    return 0; /* the queue and the other counters stay: whoever has these may still ask for its turn */
}

static void counters_dealloc(Counters *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    counters_clear(self);
    PyMem_Free(self->ended);
    Py_XDECREF(self->queue);
    Py_XDECREF((PyObject *)self->counted);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *py_take(Counters *self, PyObject *args) {
    PyObject *turn = Py_None;
    if (!PyArg_ParseTuple(args, "|O", &turn)) return NULL;
    if (self->busy && turn != Py_None && PyList_Append(self->queue, turn) < 0) return NULL;
    return PyBool_FromLong(counters_take(self));
}

static PyObject *py_give(Counters *self, PyObject *Py_UNUSED(none)) {
    if (counters_free(self)) Py_RETURN_NONE;
    PyObject *turn = Py_NewRef(PyList_GetItem(self->queue, self->first));
    /* The list gives up what was had in one go, now and then. */
    Py_ssize_t had = self->first + 1, all = PyList_Size(self->queue);
    if (had == all || had >= 64) {
        if (PyList_SetSlice(self->queue, 0, had, NULL) < 0) {
            Py_DECREF(turn);
            return NULL;
        }
        had = 0;
    } else if (PyList_SetItem(self->queue, self->first, Py_NewRef(Py_None)) < 0) {
        Py_DECREF(turn);
        return NULL;
    }
    self->first = had;
    return turn;
}

static PyObject *py_drop(Counters *self, PyObject *turn) {
    for (Py_ssize_t i = self->first; i < PyList_Size(self->queue); i++) {
        if (PyList_GetItem(self->queue, i) != turn) continue;
        if (PyList_SetSlice(self->queue, i, i + 1, NULL) < 0) return NULL;
        Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

static PyObject *py_begin(Counters *self, PyObject *what) { return PyLong_FromUnsignedLongLong(counters_begin(self, what)); }

static PyObject *py_leave(Counters *self, PyObject *Py_UNUSED(none)) {
    if (self->what) counters_leave(self);
    Py_RETURN_NONE;
}

static PyObject *py_undo(Counters *self, PyObject *Py_UNUSED(none)) {
    Py_CLEAR(self->what);
    self->next--;
    Py_RETURN_NONE;
}

static PyObject *py_count_message(Counters *self, PyObject *Py_UNUSED(none)) { return PyLong_FromUnsignedLongLong(++self->messages); }

static int add_short(PyObject *list, const Counters *counters, PyObject *what, uint64_t call, double started, double finished) {
    Py_INCREF(what); /* making a tuple may let the garbage collector run, and that anything */
    PyObject *made = Py_BuildValue("LKOdd", counters->channel, (unsigned long long)call, what, started, finished);
    int failed = made ? PyList_Append(list, made) : -1;
    Py_XDECREF(made);
    Py_DECREF(what);
    return failed;
}

static PyObject *py_short(Counters *self, PyObject *Py_UNUSED(none)) {
    PyObject *list = PyList_New(0);
    uint64_t end = self->ended_count;
    for (uint64_t i = end > self->kept ? end - self->kept : 0; list && i < end; i++) {
        const Short *kept = &self->ended[i % self->kept];
        if (kept->what && add_short(list, self, kept->what, kept->call, kept->started, kept->finished) < 0) Py_CLEAR(list);
    }
    if (list && self->what && add_short(list, self, self->what, self->call, self->started, 0.0) < 0) Py_CLEAR(list);
    return list;
}

static PyMethodDef counters_methods[] = {
    {"take", (PyCFunction)py_take, METH_VARARGS, "Take the turn where nobody has it, else queue up a turn that is given; tell which."},
    {"give", (PyCFunction)py_give, METH_NOARGS, "Give the turn to the first in the queue, which is returned; None where it is free now."},
    {"drop", (PyCFunction)py_drop, METH_O, "Take a turn out of the queue; tell whether it was there."},
    {"begin", (PyCFunction)py_begin, METH_O, "Begin a short call whose turn it is; return its number."},
    {"leave", (PyCFunction)py_leave, METH_NOARGS, "End the short call that runs."},
    {"undo", (PyCFunction)py_undo, METH_NOARGS, "Undo begin."},
    {"count_message", (PyCFunction)py_count_message, METH_NOARGS, "Count a call that moves messages; return its number."},
    {"short", (PyCFunction)py_short, METH_NOARGS, "Return the last short calls, the oldest first, also the one that runs."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef counters_members[] = {
    {"busy", T_BOOL, offsetof(Counters, busy), READONLY, NULL},
    {"next", T_ULONGLONG, offsetof(Counters, next), 0, NULL},
    {"messages", T_ULONGLONG, offsetof(Counters, messages), READONLY, NULL},
    {"call", T_ULONGLONG, offsetof(Counters, call), READONLY, NULL},
    {"started", T_DOUBLE, offsetof(Counters, started), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot counters_slots[] = {
    {Py_tp_doc, "The turn and the numbers of calls that run one after the other, and the last of them that were short."},
    {Py_tp_init, counters_init},
    {Py_tp_traverse, counters_traverse},
    {Py_tp_clear, counters_clear},
    {Py_tp_dealloc, counters_dealloc},
    {Py_tp_methods, counters_methods},
    {Py_tp_members, counters_members},
    {0, NULL},
};

PyType_Spec counters_spec = {
    .name = "oneaccord_native._core.Counters",
    .basicsize = sizeof(Counters),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = counters_slots,
};
