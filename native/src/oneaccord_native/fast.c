/* The fast way of calls that were made before: oneaccord.calls.runner.Calls._call and oneaccord.calls.host.fast.CachedCall in C.

   Whatever is unusual goes the long way, in Python, before anything was done. What C cannot finish, Python goes on with. So an error is the same in
   both forms. */
#include "native.h"

#include <math.h>

/* Kinds of arrays. */

bool kind_of(PyObject *example, Kind *kind) {
    if (!PyArray_CheckExact(example)) {
        PyErr_SetString(PyExc_TypeError, "an array shows what kind is meant");
        return false;
    }
    PyArrayObject *array = (PyArrayObject *)example;
    *kind = (Kind){PyArray_DESCR(array), PyArray_NDIM(array), NULL, (size_t)PyArray_NBYTES(array)};
    Py_INCREF((PyObject *)kind->dtype);
    kind->lengths = PyMem_Malloc(sizeof(npy_intp) * (size_t)(kind->ndim + 1));
    if (!kind->lengths) {
        kind_release(kind);
        PyErr_NoMemory();
        return false;
    }
    for (int i = 0; i < kind->ndim; i++) kind->lengths[i] = PyArray_DIM(array, i);
    return true;
}

void kind_release(Kind *kind) {
    PyMem_Free(kind->lengths);
    kind->lengths = NULL;
    PyArray_Descr *dtype = kind->dtype;
    kind->dtype = NULL;
    Py_XDECREF((PyObject *)dtype);
}

bool kind_fits(const Kind *kind, PyArrayObject *array) {
    if (PyArray_DESCR(array) != kind->dtype || PyArray_NDIM(array) != kind->ndim) return false;
    for (int i = 0; i < kind->ndim; i++)
        if (PyArray_DIM(array, i) != kind->lengths[i]) return false;
    return true;
}

/* Return where a result goes, `out` or a new array; NULL, without an error, where Python must say what is wrong. */
PyArrayObject *kind_place(const Kind *kind, PyObject *out) {
    if (out == Py_None) {
        Py_INCREF((PyObject *)kind->dtype);
        PyObject *made = PyArray_NewFromDescr(&PyArray_Type, kind->dtype, kind->ndim, kind->lengths, NULL, NULL, 0, NULL);
        if (!made) PyErr_Clear();
        return (PyArrayObject *)made;
    }
    if (!PyArray_CheckExact(out) || !PyArray_ISCARRAY((PyArrayObject *)out) || !kind_fits(kind, (PyArrayObject *)out)) return NULL;
    return (PyArrayObject *)Py_NewRef(out);
}

/* What all fast calls have. */

int fast_init(Fast *fast, PyObject *python, PyObject *turns, PyObject *counters, PyObject *what, PyObject *example) {
    State *state = state_of(TYPE_OF(fast));
    if (!state) return -1;
    if (fast->counters || !PyObject_TypeCheck(counters, state->counters)) {
        PyErr_SetString(PyExc_TypeError, "a fast call is made once, with counters of C");
        return -1;
    }
    if (!kind_of(example, &fast->given)) return -1;
    fast->python = Py_NewRef(python);
    fast->turns = Py_NewRef(turns);
    fast->what = Py_NewRef(what);
    fast->counters = (Counters *)Py_NewRef(counters);
    return 0;
}

int fast_traverse(Fast *fast, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(fast));
    Py_VISIT(fast->python);
    Py_VISIT(fast->turns);
    Py_VISIT(fast->what);
    Py_VISIT((PyObject *)fast->counters);
    return 0;
}

int fast_clear(Fast *fast) {
    Py_CLEAR(fast->python); /* which alone may be part of a circle that the garbage collector must open */
    Py_CLEAR(fast->turns);
    return 0;
}

void fast_release(Fast *fast) {
    fast_clear(fast);
    Py_CLEAR(fast->what);
    Py_CLEAR(fast->counters);
    kind_release(&fast->given);
}

/* Collectives. */

typedef struct {
    Fast fast;
    Program *program;
    Kind result;
    PyArrayObject *nothing; /* stands for an input or an output that this rank does not have */
    bool gives, takes, in_place;
    Kernel quotient; /* for a mean, what divides the sum by the number of ranks */
    PyArrayObject *divisor;
    PyArrayObject *identity; /* the result, where it comes from no rank */
} Call;

static void divide(const Call *call, PyArrayObject *total) {
    char *operands[] = {PyArray_BYTES(total), PyArray_BYTES(call->divisor), PyArray_BYTES(total)};
    Py_ssize_t length = PyArray_SIZE(total), itemsize = PyArray_ITEMSIZE(total), steps[] = {itemsize, 0, itemsize};
    if (length) call->quotient.loop(operands, &length, steps, call->quotient.data);
}

#define FILLED (size_t)16384

static void fill(const Call *call, PyArrayObject *result) {
    char *to = PyArray_BYTES(result);
    size_t nbytes = (size_t)PyArray_NBYTES(result), done = (size_t)PyArray_ITEMSIZE(result);
    if (!nbytes) return;
    memcpy(to, PyArray_BYTES(call->identity), done);
    for (size_t part = done; done < nbytes; done += part) { /* twice as much each time, as long as the source stays in the cache */
        if (done < FILLED) part = done;
        if (part > nbytes - done) part = nbytes - done;
        memcpy(to + done, to, part);
    }
}

static How call_make(Fast *fast, PyArrayObject *array, PyObject *out, PyObject **result, uint64_t *number, Py_ssize_t *step) {
    const Call *call = (const Call *)fast;
    if (!PyArray_IS_C_CONTIGUOUS(array)) return SLOW_PATH;
    PyArrayObject *into = call->nothing;
    *result = Py_None;
    if (call->takes) {
        into = kind_place(&call->result, out);
        if (!into) return SLOW_PATH;
        *result = (PyObject *)into;
        const char *read = PyArray_BYTES(array), *written = PyArray_BYTES(into);
        bool overlap = read < written + call->result.nbytes && written < read + fast->given.nbytes;
        if (overlap && !(call->in_place && into == array)) {
            Py_DECREF(*result);
            return SLOW_PATH;
        }
    }
    if (!counters_take(fast->counters)) {
        if (call->takes) Py_DECREF(*result);
        return SLOW_PATH;
    }
    if (!call->takes) Py_INCREF(*result);
    *number = counters_begin(fast->counters, fast->what);
    PyArrayObject *source = call->gives ? array : call->nothing;
    *step = program_carry(call->program, PyArray_DATA(source), (size_t)PyArray_NBYTES(source), PyArray_DATA(into),
                          (size_t)PyArray_NBYTES(into), *number);
    if (*step >= 0) return STOPPED_AT;
    if (call->divisor) divide(call, into);
    if (call->identity) fill(call, into);
    return ENDED;
}

static int call_init(Call *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"python", "turns", "counters", "what", "given", "result", "nothing", "program", "gives", "takes", "in_place", "quotient", "divisor", "identity", NULL};
    PyObject *python, *turns, *counters, *what, *given, *result, *nothing, *program, *quotient = Py_None, *divisor = Py_None, *identity = Py_None;
    int gives, takes, in_place;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOOOppp|OOO", names, &python, &turns, &counters, &what, &given, &result, &nothing, &program,
                                     &gives, &takes, &in_place, &quotient, &divisor, &identity))
        return -1;
    if (fast_init(&self->fast, python, turns, counters, what, given) < 0) return -1;
    State *state = state_of(TYPE_OF(self));
    if (!state || !PyObject_TypeCheck(program, state->program) || !PyArray_CheckExact(nothing)) {
        PyErr_SetString(PyExc_TypeError, "a call has a program, and an array that stands for none");
        return -1;
    }
    if (!kind_of(result, &self->result)) return -1;
    if (divisor != Py_None) {
        if (!PyArray_CheckExact(divisor) || PyArray_DESCR((PyArrayObject *)divisor) != self->result.dtype || PyArray_NDIM((PyArrayObject *)divisor) ||
            !kernel_of(quotient, self->result.dtype->type_num, &self->quotient)) {
            PyErr_SetString(PyExc_ValueError, "a mean is divided by a number of its dtype");
            return -1;
        }
        self->divisor = (PyArrayObject *)Py_NewRef(divisor);
    }
    if (identity != Py_None) {
        if (!PyArray_CheckExact(identity) || PyArray_DESCR((PyArrayObject *)identity) != self->result.dtype || PyArray_NDIM((PyArrayObject *)identity)) {
            PyErr_SetString(PyExc_ValueError, "an identity is an array of one element, of the dtype of the result");
            return -1;
        }
        self->identity = (PyArrayObject *)Py_NewRef(identity);
    }
    self->fast.make = call_make;
    self->program = (Program *)Py_NewRef(program);
    self->nothing = (PyArrayObject *)Py_NewRef(nothing);
    self->gives = gives;
    self->takes = takes;
    self->in_place = in_place;
    return 0;
}

static int call_traverse(Call *self, visitproc visit, void *arg) {
    Py_VISIT((PyObject *)self->program);
    return fast_traverse(&self->fast, visit, arg);
}

static void call_dealloc(Call *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    fast_release(&self->fast);
    Py_XDECREF((PyObject *)self->program);
    Py_XDECREF((PyObject *)self->nothing);
    Py_XDECREF((PyObject *)self->divisor);
    Py_XDECREF((PyObject *)self->identity);
    kind_release(&self->result);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot call_slots[] = {
    {Py_tp_doc, "A collective that was made before."},
    {Py_tp_init, call_init},
    {Py_tp_traverse, call_traverse},
    {Py_tp_clear, fast_clear},
    {Py_tp_dealloc, call_dealloc},
    {0, NULL},
};

PyType_Spec call_spec = {
    .name = "oneaccord_native._core.Call",
    .basicsize = sizeof(Call),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = call_slots,
};

/* From a key to the fast call. */

typedef struct {
    PyObject_HEAD
    PyObject *table; /* for each key a list of fast calls, of arrays of different kinds */
    PyObject *otherwise, *resume;
    PyObject *job, *control, *left, *group, *plugins;
    PyObject *seconds;
    PyObject *closed, *verdict, *observed, *give; /* names */
} Caller;

static const size_t caller_parts[] = {
    offsetof(Caller, table),   offsetof(Caller, otherwise), offsetof(Caller, resume), offsetof(Caller, job),    offsetof(Caller, control),
    offsetof(Caller, left),    offsetof(Caller, group),     offsetof(Caller, plugins), offsetof(Caller, seconds), offsetof(Caller, closed),
    offsetof(Caller, verdict), offsetof(Caller, observed),  offsetof(Caller, give),
};
#define CALLER_PARTS (sizeof caller_parts / sizeof *caller_parts)

static PyObject **part_of(Caller *caller, size_t i) { return (PyObject **)(void *)((char *)caller + caller_parts[i]); }

int is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) return -1;
    int answer = value == Py_True ? 1 : value == Py_False || value == Py_None ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return answer;
}

bool group_is_open(PyObject *of) {
    const Caller *caller = (const Caller *)of;
    bool open = is_true(caller->job, caller->closed) == 0 && is_true(caller->control, caller->verdict) == 0 &&
                is_true(caller->plugins, caller->observed) == 0 && PySet_Contains(caller->left, caller->group) == 0;
    if (!open) PyErr_Clear();
    return open;
}

static Fast *find(const Caller *caller, PyObject *key, PyArrayObject *array) {
    PyObject *found = PyDict_GetItemWithError(caller->table, key);
    if (!found) {
        PyErr_Clear(); /* an argument that cannot be a key */
        return NULL;
    }
    for (Py_ssize_t i = 0, size = PyList_Size(found); i < size; i++) {
        Fast *fast = (Fast *)PyList_GetItem(found, i);
        if (kind_fits(&fast->given, array)) return fast;
    }
    return NULL;
}

/* call(key, array, out, timeout_s): as Calls._call. */
static PyObject *caller_call(Caller *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "call(key, array, out, timeout_s)");
        return NULL;
    }
    PyObject *array = given[1], *out = given[2], *seconds = given[3];
    if (seconds == Py_None) seconds = self->seconds;
    bool in_time = PyFloat_CheckExact(seconds) && PyFloat_AsDouble(seconds) > 0.0 && isfinite(PyFloat_AsDouble(seconds));
    Fast *fast = PyArray_CheckExact(array) && in_time && group_is_open((PyObject *)self) ? find(self, given[0], (PyArrayObject *)array) : NULL;
    if (!fast) return PyObject_CallFunctionObjArgs(self->otherwise, given[0], array, out, given[3], NULL);
    Py_INCREF((PyObject *)fast); /* another thread may forget it while this one waits */
    uint64_t number;
    Py_ssize_t step;
    PyObject *result;
    How how = fast->make(fast, (PyArrayObject *)array, out, &result, &number, &step);
    if (how == SLOW_PATH) {
        result = PyObject_CallFunctionObjArgs(self->otherwise, given[0], array, out, given[3], NULL);
    } else if (how == STOPPED_AT) {
        PyObject *target = result, *at = Py_BuildValue("Kn", (unsigned long long)number, step);
        result = at ? PyObject_CallFunctionObjArgs(self->resume, fast->python, array, target, at, seconds, NULL) : NULL;
        Py_XDECREF(at);
        Py_DECREF(target);
    } else {
        counters_leave(fast->counters);
        if (!counters_free(fast->counters)) {
            PyObject *done = PyObject_CallMethodObjArgs(fast->turns, self->give, NULL);
            if (!done) Py_CLEAR(result);
            Py_XDECREF(done);
        }
    }
    Py_DECREF((PyObject *)fast);
    return result;
}

static int caller_init(Caller *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"table", "otherwise", "resume", "job", "control", "left", "group", "plugins", "seconds", NULL};
    PyObject *given[9];
    if (self->table) {
        PyErr_SetString(PyExc_RuntimeError, "a caller is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOO!OOO!", names, &PyDict_Type, &given[0], &given[1], &given[2], &given[3], &given[4],
                                     &PySet_Type, &given[5], &given[6], &given[7], &PyFloat_Type, &given[8]))
        return -1;
    for (size_t i = 0; i < 9; i++) *part_of(self, i) = Py_NewRef(given[i]);
    const char *attributes[] = {"closed", "verdict", "observed", "give"};
    for (size_t i = 9; i < CALLER_PARTS; i++)
        if (!(*part_of(self, i) = PyUnicode_InternFromString(attributes[i - 9]))) return -1;
    return 0;
}

static int caller_traverse(Caller *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    for (size_t i = 0; i < CALLER_PARTS; i++) Py_VISIT(*part_of(self, i));
    return 0;
}

static int caller_clear(Caller *self) {
    for (size_t i = 0; i < CALLER_PARTS; i++) Py_CLEAR(*part_of(self, i));
    return 0;
}

static void caller_dealloc(Caller *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    caller_clear(self);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef caller_methods[] = {
    {"call", (PyCFunction)(void (*)(void))caller_call, METH_FASTCALL, "call(key, array, out, timeout_s): make a call, and return its result."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot caller_slots[] = {
    {Py_tp_doc, "What leads from a call to the fast way that it has."},
    {Py_tp_init, caller_init},
    {Py_tp_traverse, caller_traverse},
    {Py_tp_clear, caller_clear},
    {Py_tp_dealloc, caller_dealloc},
    {Py_tp_methods, caller_methods},
    {0, NULL},
};

PyType_Spec caller_spec = {
    .name = "oneaccord_native._core.Caller",
    .basicsize = sizeof(Caller),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = caller_slots,
};
