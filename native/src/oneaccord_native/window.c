/* The calls of a window in memory that the ranks of a host share: the common case of oneaccord.calls.windows.direct.

   Whatever is unusual is for Python, which finds everything as if C had not looked: other arguments, a lock that another rank has, a failed group,
   observers. From the last check of a call to its end no Python runs, and the interpreter's lock is held. So threads and signal handlers of this rank
   find each call made, or not begun. */
#include "arguments.h"

enum { CALLER, CHANGE, FLUSH, LOCK, UNLOCK, OPS, HELD, GIVEN, STOP = GIVEN, PARTS };
enum { PUT = 1, GET, ACCUMULATE, FETCH, SWAP }; /* as in oneaccord.calls.windows.wire */
enum { TAKE = SWAP + 1, SHARE, GIVE };
static const char *const verbs[] = {"", "put", "get", "accumulate", "fetch_and_op", "compare_and_swap", "lock", "lock_shared", "unlock"};
#define TRIES 200
#define MOST_OPS 16
#define KNOWN 64
#define LONGEST_SCALAR 32

/* The window of a rank; `array` is NULL if it cannot be reached. */
typedef struct {
    PyArrayObject *array;
    char *memory;
    Py_ssize_t length;
    long rank;                /* of the world */
    Py_ssize_t place;         /* among the ranks of the host */
    _Atomic uint64_t *change; /* the lock of single changes; NULL if Python's is another one */
} Target;

/* The words of a call, which the flight recorder keeps. */
typedef struct {
    int verb;
    long rank;
    Py_ssize_t start, count;
    PyObject *words;
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *parts[PARTS];
    Counters *shorts; /* which note calls that have ended */
    Target *targets;  /* by the rank of the group */
    long size;
    bool reaches_all, has_numbers;
    PyArray_Descr *dtype;
    size_t itemsize;
    Kernel kernels[MOST_OPS]; /* of `OPS` */
    uint64_t owner;
    Py_buffer changes, tickets;
    Py_ssize_t place, places;
    Known known[KNOWN];
} Window;

/* Arguments. */

static Target *target_of(const Window *self, PyObject *given) {
    long rank = PyLong_CheckExact(given) ? PyLong_AsLong(given) : -1;
    if (rank == -1) PyErr_Clear();
    return rank >= 0 && rank < self->size && self->targets[rank].array ? &self->targets[rank] : NULL;
}

/* Elements of the caller's. */
typedef struct {
    PyArrayObject *array; /* NULL for a number, which is in `own` */
    char *data;
    Py_ssize_t count;
    _Alignas(max_align_t) char own[LONGEST_SCALAR];
} Values;

static bool array_of(const Window *self, PyObject *given, Values *values) {
    PyArrayObject *array = (PyArrayObject *)given;
    if (!PyArray_CheckExact(given) || PyArray_DESCR(array) != self->dtype || !PyArray_ISCARRAY_RO(array)) return false;
    values->array = array;
    values->data = PyArray_BYTES(array);
    values->count = PyArray_SIZE(array);
    return true;
}

static bool number_of(const Window *self, PyObject *given, char *own) {
    int type = self->dtype->type_num;
    bool is_int = PyTypeNum_ISSIGNED(type) && PyTypeNum_ISINTEGER(type) && self->itemsize == 8;
    if (!self->has_numbers) return false;
    if (PyArray_IsScalar(given, Generic)) {
        PyArray_Descr *found = PyArray_DescrFromScalar(given);
        bool same = found == self->dtype;
        Py_XDECREF((PyObject *)found);
        if (same) PyArray_ScalarAsCtype(given, own);
        return same;
    }
    if (PyFloat_CheckExact(given) && type == NPY_DOUBLE) {
        memcpy(own, &(double){PyFloat_AsDouble(given)}, sizeof(double));
    } else if (PyLong_CheckExact(given) && (type == NPY_DOUBLE || is_int)) {
        int over;
        long long number = PyLong_AsLongLongAndOverflow(given, &over);
        if (over) return false;
        if (is_int)
            memcpy(own, &number, sizeof number);
        else
            memcpy(own, &(double){(double)number}, sizeof(double));
    } else {
        return false;
    }
    return true;
}

static bool values_of(const Window *self, PyObject *given, Values *values) {
    if (array_of(self, given, values)) return true;
    values->array = NULL;
    values->data = values->own;
    values->count = 1;
    return number_of(self, given, values->own);
}

/* Find `count` elements, or, if it is negative, those that are named: as many as are returned, from `start` on; 0 if Python must look. */
static Py_ssize_t elements_of(const Window *self, const Target *target, PyObject *at, Py_ssize_t count, Py_ssize_t *start) {
    Py_ssize_t length = target->length, stop, step;
    if (PyLong_CheckExact(at)) {
        *start = PyLong_AsSsize_t(at);
        if (count < 0) count = 1;
        if (*start < 0) *start = PyErr_Occurred() ? -1 : *start + length;
    } else if (PySlice_Check(at) && PySlice_Unpack(at, start, &stop, &step) == 0 && step == 1) {
        if (stop == PY_SSIZE_T_MAX) stop = is_true(at, self->parts[STOP]) ? -1 : length; /* it is true if it is a number, and too large */
        else if (stop < 0) stop += length;
        if (*start < 0) *start += length;
        if (count >= 0 && count != stop - *start) return 0;
        count = stop - *start;
    } else {
        *start = -1;
    }
    PyErr_Clear();
    return *start >= 0 && count > 0 && count <= length - *start ? count : 0;
}

static bool overlap(const void *first, const void *second, size_t nbytes) {
    uintptr_t one = (uintptr_t)first, other = (uintptr_t)second;
    return one < other + nbytes && other < one + nbytes;
}

/* Calls. */

static void note(Window *self, int verb, const Target *target, Py_ssize_t start, Py_ssize_t count, double started) {
    size_t number = (size_t)start * 64 + (size_t)count * 8 + (size_t)target->rank * 512 + (size_t)verb;
    Known *known = &self->known[number % KNOWN];
    if (!known->words || known->verb != verb || known->rank != target->rank || known->start != start || known->count != count) {
        PyObject *words;
        if (count < 0) words = PyUnicode_FromFormat("window.%s at rank %ld", verbs[verb], target->rank);
        else if (count == 1) words = PyUnicode_FromFormat("window.%s at rank %ld, [%zd]", verbs[verb], target->rank, start);
        else words = PyUnicode_FromFormat("window.%s at rank %ld, [%zd:%zd]", verbs[verb], target->rank, start, start + count);
        if (!words) {
            PyErr_Clear();
            return;
        }
        PyObject *before = known->words;
        *known = (Known){verb, target->rank, start, count, words};
        Py_XDECREF(before);
    }
    counters_note(self->shorts, known->words, started);
}

/* The number of an op; -1 if it is not one that C knows. */
static Py_ssize_t op_of(const Window *self, PyObject *op) {
    PyObject *ops = self->parts[OPS];
    Py_ssize_t size = PyTuple_Size(ops);
    for (Py_ssize_t i = 0; i < size; i++)
        if (PyTuple_GetItem(ops, i) == op) return i;
    for (Py_ssize_t i = 0; PyUnicode_CheckExact(op) && i < size; i++)
        if (PyUnicode_Compare(PyTuple_GetItem(ops, i), op) == 0) return i;
    return -1;
}

/* A call on elements, as far as it is understood. */
typedef struct {
    int kind;
    const Target *target;
    Values values, expected, into; /* `into`: where elements go, to an array or, as one number, to its own memory */
    const Kernel *kernel;
    Py_ssize_t start, count;
    size_t nbytes;
    char *memory;
    bool gives_number; /* it returns a number, and no array */
} Call;

static bool returns(int kind) { return kind == GET || kind == FETCH || kind == SWAP; }

static bool same_shape(const Values *first, const Values *second) {
    PyArrayObject *one = first->array, *other = second->array;
    if (one && other) return PyArray_SAMESHAPE(one, other);
    return (!one || !PyArray_NDIM(one)) && (!other || !PyArray_NDIM(other));
}

/* Read (kind, values, target, at, op, out, expected, timeout_s); return whether C can make the call. */
static bool understand(const Window *self, PyObject *const *given, Call *call) {
    static const Kernel no_kernel;
    PyObject *out = given[5];
    int kind = call->kind = (int)PyLong_AsLong(given[0]);
    call->values.array = NULL;
    if (kind < PUT || kind > SWAP || !(call->target = target_of(self, given[2])) || !in_time(given[7])) return false;
    if (kind != GET && !values_of(self, given[1], &call->values)) return false;
    if (kind == SWAP && (!values_of(self, given[6], &call->expected) || !same_shape(&call->values, &call->expected))) return false;
    if (out != Py_None && (!array_of(self, out, &call->into) || !PyArray_ISWRITEABLE(call->into.array))) return false;
    if (out != Py_None && kind != GET && !same_shape(&call->values, &call->into)) return false;
    Py_ssize_t wanted = kind != GET ? call->values.count : out != Py_None ? call->into.count : -1;
    call->count = elements_of(self, call->target, given[3], wanted, &call->start);
    if (!call->count || (size_t)call->count > LONG_COPY / self->itemsize) return false;
    call->nbytes = (size_t)call->count * self->itemsize;
    call->memory = call->target->memory + (size_t)call->start * self->itemsize;
    bool is_one = kind == GET ? !PySlice_Check(given[3]) : !call->values.array || !PyArray_NDIM(call->values.array);
    call->gives_number = returns(kind) && out == Py_None && is_one;
    if (call->gives_number && !self->has_numbers) return false;
    call->kernel = &no_kernel;
    if (kind == ACCUMULATE || kind == FETCH) {
        Py_ssize_t op = op_of(self, given[4]);
        if (op < 0) return false;
        call->kernel = &self->kernels[op];
    }
    if (kind < ACCUMULATE) return true;
    /* Memory of the caller's that is a part of the window, or of another argument, is for NumPy. */
    const char *parts[] = {call->memory, call->values.data, kind == SWAP ? call->expected.data : NULL, out != Py_None ? call->into.data : NULL};
    for (int i = 0; i < 4; i++)
        for (int j = i + 1; j < 4; j++)
            if (parts[i] && parts[j] && (i == 0 || j == 3) && overlap(parts[i], parts[j], call->nbytes)) return false;
    return call->target->change != NULL;
}

/* Find memory for the elements that a call returns; return the array that the caller gets, or NULL with an error, or for none. */
static PyObject *room_for(const Window *self, PyObject *out, Call *call) {
    if (!returns(call->kind)) return NULL;
    if (out != Py_None) return Py_NewRef(out);
    call->into.data = call->into.own;
    if (call->gives_number) return NULL;
    PyArrayObject *like = call->values.array;
    int ndim = call->kind == GET ? 1 : PyArray_NDIM(like);
    const npy_intp *lengths = call->kind == GET ? &call->count : PyArray_DIMS(like);
    Py_INCREF((PyObject *)self->dtype);
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, self->dtype, ndim, lengths, NULL, NULL, 0, NULL);
    if (array) call->into.data = PyArray_BYTES((PyArrayObject *)array);
    return array;
}

/* Change elements, under the lock; what they were is elsewhere already. */
static void apply(const Window *self, const Call *call) {
    size_t size = self->itemsize;
    char *memory = call->memory;
    const char *values = call->values.data, *expected = call->expected.data;
    if (call->kernel->loop) {
        reduce(call->kernel, memory, memory, values, (size_t)call->count, size);
    } else if (call->kind != SWAP) {
        memcpy(memory, values, call->nbytes);
    } else {
        for (Py_ssize_t i = 0; i < call->count; i++, memory += size, values += size, expected += size)
            if (!memcmp(memory, expected, size)) memcpy(memory, values, size);
    }
}

/* Make a call; return whether it was made. */
static bool make(const Window *self, Call *call) {
    _Atomic uint64_t *lock = call->target->change;
    if (!group_is_open(self->parts[CALLER]) || !call->target->array) return false;
    if (call->kind == PUT) {
        memmove(call->memory, call->values.data, call->nbytes);
    } else if (call->kind == GET) {
        memmove(call->into.data, call->memory, call->nbytes);
    } else {
        if (word_take(lock, self->owner, TRIES)) return false;
        if (returns(call->kind)) memcpy(call->into.data, call->memory, call->nbytes);
        apply(self, call);
        word_free(lock, self->owner);
    }
    return true;
}

/* change(kind, values, target, at, op, out, expected, timeout_s): as WindowBase._change. */
static PyObject *window_change(Window *self, PyObject *const *given, Py_ssize_t count) {
    if (!counted(count, 8)) return NULL;
    Call call;
    double started = now_s();
    bool understood = understand(self, given, &call);
    PyObject *result = understood ? room_for(self, given[5], &call) : NULL;
    if (!understood || PyErr_Occurred() || !make(self, &call)) {
        Py_XDECREF(result);
        return slowly(self->parts[CHANGE], given, count);
    }
    note(self, call.kind, call.target, call.start, call.count, started);
    if (call.gives_number) return PyArray_Scalar(call.into.data, self->dtype, NULL);
    return result ? result : Py_NewRef(Py_None);
}

/* flush(target, timeout_s, name): as WindowBase._flush. What this rank has done is done, and only its order is to be seen by others. */
static PyObject *window_flush(Window *self, PyObject *const *given, Py_ssize_t count) {
    if (!counted(count, 3)) return NULL;
    bool reached = given[0] == Py_None ? self->reaches_all : target_of(self, given[0]) != NULL;
    if (!reached || !in_time(given[1]) || !group_is_open(self->parts[CALLER])) return slowly(self->parts[FLUSH], given, count);
    atomic_thread_fence(memory_order_seq_cst);
    return Py_NewRef(Py_None);
}

/* The locks of programs: oneaccord.calls.windows.bakery. If this rank would have to wait, C takes its ticket back, and Python draws another one. */

static _Atomic uint64_t *tickets_of(const Window *self, Py_ssize_t of) {
    return (_Atomic uint64_t *)self->tickets.buf + (self->places + of) * self->places;
}

static bool draw(const Window *self, Py_ssize_t of, bool exclusive) {
    _Atomic uint64_t *tickets = tickets_of(self, of), *drawing = tickets - self->places * self->places;
    uint64_t last = 0, me = (uint64_t)self->place;
    atomic_store(&drawing[me], 1);
    for (Py_ssize_t i = 0; i < self->places; i++) {
        uint64_t ticket = atomic_load(&tickets[i]);
        last = ticket > last ? ticket : last;
    }
    uint64_t number = last / 2 + 1;
    atomic_store(&tickets[me], 2 * number + exclusive);
    atomic_store(&drawing[me], 0);
    for (uint64_t i = 0; i < (uint64_t)self->places; i++) {
        if (i == me) continue;
        bool draws = atomic_load(&drawing[i]);
        uint64_t ticket = atomic_load(&tickets[i]);
        bool excludes = ticket && (exclusive || ticket & 1), is_first = ticket / 2 < number || (ticket / 2 == number && i < me);
        if (!draws && !(excludes && is_first)) continue;
        atomic_store(&tickets[me], 0);
        return false;
    }
    return true;
}

/* lock(target, shared, timeout_s): as WindowBase._lock. */
static PyObject *window_lock(Window *self, PyObject *const *given, Py_ssize_t count) {
    if (!counted(count, 3)) return NULL;
    double started = now_s();
    const Target *target = target_of(self, given[0]);
    bool exclusive = given[1] == Py_False, taken = false;
    PyObject *rank = target ? PyLong_FromLong(target->rank) : NULL;
    PyObject *held = self->parts[HELD];
    if (rank && self->tickets.obj && (exclusive || given[1] == Py_True) && in_time(given[2]) && group_is_open(self->parts[CALLER]) &&
        !PyDict_Contains(held, rank) && !PyDict_SetItem(held, rank, exclusive ? Py_True : Py_False)) {
        taken = draw(self, target->place, exclusive);
        if (taken)
            note(self, exclusive ? TAKE : SHARE, target, 0, -1, started);
        else if (PyDict_DelItem(held, rank))
            PyErr_Clear();
    }
    Py_XDECREF(rank);
    return taken ? Py_NewRef(Py_None) : slowly(self->parts[LOCK], given, count);
}

/* unlock(target, timeout_s): as WindowBase._unlock. */
static PyObject *window_unlock(Window *self, PyObject *const *given, Py_ssize_t count) {
    if (!counted(count, 2)) return NULL;
    double started = now_s();
    const Target *target = target_of(self, given[0]);
    PyObject *rank = target ? PyLong_FromLong(target->rank) : NULL;
    bool given_back = rank && self->tickets.obj && in_time(given[1]) && group_is_open(self->parts[CALLER]) &&
                      PyDict_Contains(self->parts[HELD], rank) == 1 && !PyDict_DelItem(self->parts[HELD], rank);
    Py_XDECREF(rank);
    if (!given_back) return slowly(self->parts[UNLOCK], given, count);
    atomic_store(&tickets_of(self, target->place)[self->place], 0);
    note(self, GIVE, target, 0, -1, started);
    return Py_NewRef(Py_None);
}

/* The type. */

static PyObject *window_close(Window *self, PyObject *Py_UNUSED(nothing)) {
    for (long i = 0; i < self->size; i++) Py_CLEAR(self->targets[i].array);
    self->reaches_all = false;
    Py_RETURN_NONE;
}

/* Whether a buffer has as many words of 64 bits. */
static bool has_words(const Py_buffer *memory, Py_ssize_t count) { return memory->len / 8 >= count && (uintptr_t)memory->buf % 8 == 0; }

static int refuse(const char *text) {
    PyErr_SetString(PyExc_ValueError, text);
    return -1;
}

/* Read (array, rank of the world, place): None for an array that cannot be reached. */
static int read_target(Window *self, Target *target, PyObject *given, Py_ssize_t apart) {
    PyObject *array;
    if (!PyArg_ParseTuple(given, "Oln", &array, &target->rank, &target->place)) return -1;
    self->reaches_all = self->reaches_all && array != Py_None;
    if (array == Py_None) return 0;
    if (!PyArray_CheckExact(array) || !PyArray_ISCARRAY((PyArrayObject *)array) || PyArray_DESCR((PyArrayObject *)array) != self->dtype)
        return refuse("the windows are arrays of one dtype");
    if (target->place < 0 || target->place >= self->places) return refuse("a place that is not there");
    target->array = (PyArrayObject *)Py_NewRef(array);
    target->memory = PyArray_BYTES(target->array);
    target->length = PyArray_SIZE(target->array);
    if (self->changes.obj) target->change = (_Atomic uint64_t *)self->changes.buf + target->place * apart;
    return 0;
}

static int window_init(Window *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"caller", "change",  "flush",   "lock",  "unlock",  "ops",   "held",   "shorts", "dtype",
                            "ufuncs", "targets", "changes", "apart", "tickets", "place", "places", NULL};
    PyObject *given[GIVEN], *shorts, *dtype, *ufuncs, *targets, *changes, *tickets;
    Py_ssize_t apart;
    State *state = state_of(TYPE_OF(self));
    if (!state || self->targets) return state ? refuse("a window is made once") : -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOO!O!O!O!O!O!OnOnn", names, state->caller, &given[0], &given[1], &given[2], &given[3],
                                     &given[4], &PyTuple_Type, &given[5], &PyDict_Type, &given[6], state->counters, &shorts, &PyArrayDescr_Type,
                                     &dtype, &PyTuple_Type, &ufuncs, &PyTuple_Type, &targets, &changes, &apart, &tickets, &self->place,
                                     &self->places))
        return -1;
    for (int i = 0; i < GIVEN; i++) self->parts[i] = Py_NewRef(given[i]);
    self->shorts = (Counters *)Py_NewRef(shorts);
    self->dtype = (PyArray_Descr *)Py_NewRef(dtype);
    PyObject *itemsize = PyObject_GetAttrString(dtype, "itemsize");
    self->itemsize = itemsize ? PyLong_AsSize_t(itemsize) : 0;
    Py_XDECREF(itemsize);
    int type = self->dtype->type_num;
    self->has_numbers = (PyTypeNum_ISNUMBER(type) || PyTypeNum_ISBOOL(type)) && self->itemsize <= LONGEST_SCALAR;
    self->parts[STOP] = PyUnicode_InternFromString("stop");
    if (PyErr_Occurred()) return -1;
    if (!self->itemsize || self->places < 1 || self->place < 0 || self->place >= self->places || apart < 1) return refuse("sizes that cannot be");
    self->owner = (uint64_t)self->place + 1;
    if (changes != Py_None && PyObject_GetBuffer(changes, &self->changes, PyBUF_WRITABLE)) return -1;
    if (tickets != Py_None && PyObject_GetBuffer(tickets, &self->tickets, PyBUF_WRITABLE)) return -1;
    bool has_changes = !self->changes.obj || has_words(&self->changes, self->places * apart);
    if (!has_changes || (self->tickets.obj && !has_words(&self->tickets, 2 * self->places * self->places)))
        return refuse("too little memory for the locks");
    Py_ssize_t count = PyTuple_Size(ufuncs);
    if (count > MOST_OPS || count != PyTuple_Size(given[OPS])) return refuse("an op is a name and a ufunc, and there are not so many");
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *ufunc = PyTuple_GetItem(ufuncs, i);
        if (ufunc != Py_None && !kernel_of(ufunc, type, &self->kernels[i])) return refuse("a reduction that C does not know");
    }
    self->size = (long)PyTuple_Size(targets);
    self->reaches_all = true;
    self->targets = PyMem_Calloc((size_t)self->size + 1, sizeof *self->targets);
    if (!self->targets) {
        self->size = 0;
        PyErr_NoMemory();
        return -1;
    }
    for (long i = 0; i < self->size; i++)
        if (read_target(self, &self->targets[i], PyTuple_GetItem(targets, i), apart)) return -1;
    return 0;
}

static int window_traverse(Window *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    for (int i = 0; i < PARTS; i++) Py_VISIT(self->parts[i]);
    return 0;
}

static int window_clear(Window *self) {
    Py_XDECREF(window_close(self, NULL)); /* without targets, each call is for Python */
    for (int i = 0; i < PARTS; i++)
        if (i == CALLER || (i >= CHANGE && i <= UNLOCK)) Py_CLEAR(self->parts[i]);
    return 0;
}

static void window_dealloc(Window *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    window_clear(self);
    for (int i = 0; i < PARTS; i++) Py_XDECREF(self->parts[i]);
    for (int i = 0; i < KNOWN; i++) Py_XDECREF(self->known[i].words);
    Py_XDECREF((PyObject *)self->shorts);
    Py_XDECREF((PyObject *)self->dtype);
    if (self->changes.obj) PyBuffer_Release(&self->changes);
    if (self->tickets.obj) PyBuffer_Release(&self->tickets);
    PyMem_Free(self->targets);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define FAST(name) (PyCFunction)(void (*)(void))name, METH_FASTCALL
static PyMethodDef window_methods[] = {
    {"change", FAST(window_change), "change(kind, values, target, at, op, out, expected, timeout_s): read or change elements."},
    {"flush", FAST(window_flush), "flush(target, timeout_s, name): order what this rank has done before what it does."},
    {"lock", FAST(window_lock), "lock(target, shared, timeout_s): take the lock of a rank's window."},
    {"unlock", FAST(window_unlock), "unlock(target, timeout_s): give it back."},
    {"close", (PyCFunction)window_close, METH_NOARGS, "close(): make no more calls, and let go of the memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot window_slots[] = {
    {Py_tp_doc, "The calls of a window in memory that the ranks of a host share."},
    {Py_tp_init, window_init},
    {Py_tp_traverse, window_traverse},
    {Py_tp_clear, window_clear},
    {Py_tp_dealloc, window_dealloc},
    {Py_tp_methods, window_methods},
    {0, NULL},
};

PyType_Spec window_spec = {
    .name = "oneaccord_native._core.Window",
    .basicsize = sizeof(Window),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = window_slots,
};
