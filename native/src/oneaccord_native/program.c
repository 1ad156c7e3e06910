/* The interpreter of programs (oneaccord.calls.engine.program) whose messages are all short, or lent and not reduced.

   It does what oneaccord.calls.engine.execute does, step by step, and hands anything unusual back to Python: a message that does not come for a while,
   another header, a broken connection. Python continues from that step, waits, and raises the error. So nothing here can fail, and an
   error has one form. */
#include "native.h"

enum { SEND, RECV, RECV_RIGHT, RECV_LEFT, REDUCE, COPY, WAIT, LONG_SEND, LONG_RECV };
enum { INPUT, OUTPUT, WORK };

typedef struct {
    int memory;
    size_t offset, nbytes; /* the whole memory where `whole` */
    bool whole;
} Operand;

typedef struct {
    int kind;
    PyObject *object; /* the mailbox, whose C form is `box` */
    const Mailbox *box;
    size_t way; /* of long sends, and what waits for them: which mailbox that is */
    size_t nbytes;
    unsigned number_at; /* where the number of the call stands in the header */
    unsigned operand[3];
    unsigned char header[HEADER_BYTES];
} Step;

struct Program {
    PyObject_HEAD
    Step *steps;
    Operand *operands;
    size_t count, operand_count, itemsize;
    unsigned *sent; /* for each way, how many long messages were sent in this call */
    PyObject *ufunc; /* whose loop the kernel is, or the kernel itself; NULL where nothing is reduced */
    Kernel kernel;
    const Low *low;
    size_t work_bytes;
    Py_buffer work; /* scratch memory that both forms use, so that Python can go on in the midst of a program; none where each run brings it */
};

static void program_dealloc(Program *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    for (size_t i = 0; i < self->count; i++) Py_XDECREF(self->steps[i].object);
    PyMem_Free(self->steps);
    PyMem_Free(self->sent);
    PyMem_Free(self->operands);
    Py_XDECREF(self->ufunc);
    if (self->work.obj) PyBuffer_Release(&self->work);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static int program_traverse(Program *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->ufunc);
    for (size_t i = 0; i < self->count; i++) Py_VISIT(self->steps[i].object);
    return 0;
}

static int refuse(const char *text) {
    PyErr_SetString(PyExc_ValueError, text);
    return -1;
}

/* Read (kind, box, head, tail, nbytes, first, second, third). */
static int read_step(Program *self, Step *step, PyObject *given) {
    PyObject *box, *head, *tail;
    Py_ssize_t nbytes;
    /* Without "#" in the format: whether that means Py_ssize_t depends on the headers of 3.11 or 3.13, and the module must run with both. */
    if (!PyArg_ParseTuple(given, "iOSSnIII", &step->kind, &box, &head, &tail, &nbytes, &step->operand[0], &step->operand[1], &step->operand[2]))
        return -1;
    Py_ssize_t head_bytes = PyBytes_Size(head), tail_bytes = PyBytes_Size(tail);
    if (step->kind < SEND || step->kind > LONG_RECV || nbytes < 0) return refuse("a step of another kind");
    for (int i = 0; i < 3; i++)
        if (step->operand[i] >= self->operand_count && (step->kind != WAIT || i)) return refuse("a step names an operand that is not there");
    step->nbytes = (size_t)nbytes;
    if (step->kind == REDUCE || step->kind == COPY) return 0;
    if (!(step->box = mailbox_of(box))) return -1;
    step->object = Py_NewRef(box);
    /* The first step with this mailbox names the way. */
    while (self->steps[step->way].box != step->box) step->way++;
    if (step->kind == WAIT) return 0;
    if (head_bytes + 8 + tail_bytes != HEADER_BYTES) return refuse("a header of another size");
    memcpy(step->header, PyBytes_AsString(head), (size_t)head_bytes);
    memcpy(step->header + head_bytes + 8, PyBytes_AsString(tail), (size_t)tail_bytes);
    step->number_at = (unsigned)head_bytes;
    bool lent = step->kind >= LONG_SEND && mailbox_lends(step->box, step->nbytes);
    if (step->nbytes > step->box->slot_bytes && !lent) return refuse("a message that is longer than a slot");
    return 0;
}

static int program_init(Program *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"steps", "operands", "ufunc", "number", "itemsize", "work_bytes", "work", NULL};
    PyObject *steps, *operands, *work, *ufunc;
    int number;
    Py_ssize_t itemsize, work_bytes;
    if (self->steps) return refuse("a program is made once");
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OinnO", names, &PyTuple_Type, &steps, &PyTuple_Type, &operands, &ufunc, &number,
                                     &itemsize, &work_bytes, &work))
        return -1;
    if (itemsize < 1 || work_bytes < 0) return refuse("sizes are not negative");
    State *state = state_of(TYPE_OF(self));
    if (!state) return -1;
    if (ufunc != Py_None) {
        if (PyObject_TypeCheck(ufunc, state->low))
            self->low = (const Low *)ufunc;
        else if (!kernel_of(ufunc, number, &self->kernel))
            return refuse("a reduction that C does not know");
        self->ufunc = Py_NewRef(ufunc);
    }
    self->itemsize = (size_t)itemsize;
    self->operand_count = (size_t)PyTuple_Size(operands);
    self->work_bytes = (size_t)work_bytes;
    size_t count = (size_t)PyTuple_Size(steps);
    self->operands = PyMem_Calloc(self->operand_count + 1, sizeof(Operand));
    self->steps = PyMem_Calloc(count + 1, sizeof(Step));
    self->sent = PyMem_Calloc(count + 1, sizeof(unsigned));
    if (!self->operands || !self->steps || !self->sent) {
        PyErr_NoMemory();
        return -1;
    }
    if (work != Py_None && PyObject_GetBuffer(work, &self->work, PyBUF_WRITABLE) < 0) return -1;
    if (work != Py_None && (size_t)self->work.len < self->work_bytes) return refuse("too little scratch memory");
    for (size_t i = 0; i < self->operand_count; i++) {
        Operand *operand = &self->operands[i];
        Py_ssize_t start, stop;
        if (!PyArg_ParseTuple(PyTuple_GetItem(operands, (Py_ssize_t)i), "inn", &operand->memory, &start, &stop)) return -1;
        operand->whole = stop < 0;
        if (operand->memory < INPUT || operand->memory > WORK || start < 0 || (!operand->whole && stop < start))
            return refuse("a part of memory that is none");
        operand->offset = (size_t)start * self->itemsize;
        operand->nbytes = operand->whole ? 0 : (size_t)(stop - start) * self->itemsize;
        if (operand->memory == WORK && (operand->whole || operand->offset + operand->nbytes > self->work_bytes))
            return refuse("a part beyond the scratch memory");
    }
    for (size_t i = 0; i < count; i++) {
        self->count = i + 1;
        if (read_step(self, &self->steps[i], PyTuple_GetItem(steps, (Py_ssize_t)i)) < 0) return -1;
        int kind = self->steps[i].kind;
        if (!self->ufunc && (kind == REDUCE || kind == RECV_LEFT || kind == RECV_RIGHT)) return refuse("nothing is said of how to reduce");
    }
    return 0;
}

/* Where the operands of a call lie. */
typedef struct {
    const Program *program;
    unsigned char *base[3];
    size_t size[3];
} Call;

static unsigned char *at(const Call *call, unsigned number, size_t *nbytes) {
    const Operand *operand = &call->program->operands[number];
    *nbytes = operand->whole ? call->size[operand->memory] : operand->nbytes;
    return call->base[operand->memory] + operand->offset;
}

/* Reduce; where that is for Python, nothing is done. */
static Outcome combine(const Program *program, void *target, const void *left, const void *right, size_t nbytes) {
    size_t count = nbytes / program->itemsize;
    if (program->low) {
        if (low_combine(program->low, NULL, left, right, count) < count) return STOPPED;
        low_combine(program->low, target, left, right, count);
    } else {
        reduce(&program->kernel, target, left, right, count, program->itemsize);
    }
    return MOVED;
}

/* Do what is to be done with what came, or without anything that comes. */
static Outcome apply(const Call *call, const Step *step, const unsigned char *came) {
    const Program *program = call->program;
    size_t nbytes, ignored;
    unsigned char *first = at(call, step->operand[0], &nbytes);
    switch (step->kind) {
    case RECV:
    case LONG_RECV:
        if (step->nbytes) memcpy(first, came, step->nbytes);
        break;
    case RECV_RIGHT:
        return combine(program, at(call, step->operand[1], &ignored), first, came, step->nbytes);
    case RECV_LEFT:
        return combine(program, at(call, step->operand[1], &ignored), came, first, step->nbytes);
    case REDUCE:
        return combine(program, at(call, step->operand[2], &ignored), first, at(call, step->operand[1], &ignored), nbytes);
    case COPY:
        memmove(at(call, step->operand[1], &ignored), first, nbytes);
        break;
    }
    return MOVED;
}

/* Send a message: a long one is lent where that can be, when the peer has the one before it. */
static Outcome send(const Call *call, Step *step, Patience *patience) {
    const Mailbox *box = step->box;
    size_t ignored;
    const unsigned char *payload = at(call, step->operand[0], &ignored);
    oneaccord_answer answer;
    if (!mailbox_room(box, patience)) return STOPPED;
    if (step->kind == LONG_SEND && mailbox_lends(box, step->nbytes)) {
        if (!mailbox_lent(box, patience)) return STOPPED;
        answer = box->lend(box->mailbox, step->header, payload, step->nbytes);
    } else {
        answer = box->post(box->mailbox, step->header, payload, step->nbytes);
    }
    if (answer != ONEACCORD_YES) return STOPPED;
    if (step->kind == LONG_SEND) call->program->sent[step->way]++;
    return MOVED;
}

static Outcome carry_out(const Call *call, Step *step, uint64_t number, Patience *patience) {
    const Mailbox *box = step->box;
    size_t ignored;
    if (step->kind == WAIT) {
        /* All but the last long message have been sent, and that as well if it is not lent any more. */
        if (call->program->sent[step->way] > step->operand[0]) return MOVED;
        return mailbox_lent(box, patience) ? MOVED : STOPPED;
    }
    memcpy(step->header + step->number_at, &number, 8);
    if (step->kind == SEND || step->kind == LONG_SEND) return send(call, step, patience);
    if (step->kind == LONG_RECV && mailbox_lends(box, step->nbytes))
        return mailbox_borrow(box, step->header, at(call, step->operand[0], &ignored), step->nbytes, patience) ? MOVED : STOPPED;
    const unsigned char *came = mailbox_fetch(box, step->header, step->nbytes, patience);
    if (!came || apply(call, step, came) == STOPPED) return STOPPED;
    box->take(box->mailbox);
    return MOVED;
}

/* Wait a moment until each mailbox that a message went to has room again. A rank that only sends, such as the root of a broadcast, is often so far
   ahead of the others that there is none. */
static bool is_over(const Program *program, Patience *patience) {
    for (size_t i = 0; i < program->count; i++) {
        const Step *step = &program->steps[i];
        if (step->kind != SEND && step->kind != LONG_SEND) continue;
        if (step->kind == LONG_SEND && mailbox_lends(step->box, step->nbytes) && !mailbox_lent(step->box, patience)) return false;
        if (!mailbox_room(step->box, patience)) return false;
    }
    return true;
}

/* Carry out a program; return -1, or the step at which Python must go on. */
static Py_ssize_t carry(Program *self, Call *call, uint64_t number) {
    const unsigned char *in = call->base[INPUT], *out = call->base[OUTPUT];
    if (self->work_bytes && !call->base[WORK]) return 0;
    /* NumPy's loops are for operands that are one or apart, and that stand where their type wants it: no type wants more than 16 bytes. */
    size_t alignment = self->itemsize < 16 ? self->itemsize : 16;
    if (self->ufunc && ((uintptr_t)in % alignment || (uintptr_t)out % alignment)) return 0;
    if (in != out && in < out + call->size[OUTPUT] && out < in + call->size[INPUT]) return 0;
    for (size_t i = 0; i < self->operand_count; i++) {
        const Operand *operand = &self->operands[i];
        if (!operand->whole && operand->offset + operand->nbytes > call->size[operand->memory]) return 0;
    }
    Patience patience = {NULL};
    memset(self->sent, 0, (self->count + 1) * sizeof(unsigned));
    size_t i = 0;
    for (; i < self->count; i++) {
        Step *step = &self->steps[i];
        if (step->kind == REDUCE || step->kind == COPY) {
            if (step->kind == COPY && self->operands[step->operand[0]].nbytes > LONG_COPY) patience_begin(&patience);
            if (apply(call, step, NULL) == STOPPED) break;
            continue;
        }
        if (carry_out(call, step, number, &patience) == STOPPED) break;
    }
    bool over = i == self->count && is_over(self, &patience);
    patience_end(&patience);
    return over ? -1 : (Py_ssize_t)i;
}

Py_ssize_t program_carry(Program *program, void *source, size_t source_bytes, void *target, size_t target_bytes, uint64_t number) {
    Call call = {program, {source, target, program->work.buf}, {source_bytes, target_bytes, (size_t)program->work.len}};
    return carry(program, &call, number);
}

static PyObject *program_run(Program *self, PyObject *args) {
    PyObject *source, *target, *block = Py_None;
    unsigned long long number;
    if (!PyArg_ParseTuple(args, "OOK|O", &source, &target, &number, &block)) return NULL;
    Py_buffer in, out, work = {0};
    if (PyObject_GetBuffer(source, &in, PyBUF_SIMPLE) < 0) goto other;
    if (PyObject_GetBuffer(target, &out, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&in);
        goto other;
    }
    if (block != Py_None && PyObject_GetBuffer(block, &work, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&out);
        PyBuffer_Release(&in);
        goto other;
    }
    const Py_buffer *scratch = block == Py_None ? &self->work : &work;
    Call call = {self, {in.buf, out.buf, scratch->buf}, {(size_t)in.len, (size_t)out.len, (size_t)scratch->len}};
    Py_ssize_t stopped = carry(self, &call, number);
    if (work.obj) PyBuffer_Release(&work);
    PyBuffer_Release(&out);
    PyBuffer_Release(&in);
    return PyLong_FromSsize_t(stopped);
other:
    /* Not one piece of memory: Python knows how to read it. */
    if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError)) return NULL;
    PyErr_Clear();
    return PyLong_FromLong(0);
}

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)program_run, METH_VARARGS,
     "Carry out the program on an input and an output, as call `number`; return -1, or the step at which Python must go on."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_doc, "What one rank does in a call whose messages are all short."},
    {Py_tp_init, program_init},
    {Py_tp_traverse, program_traverse},
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_methods, program_methods},
    {0, NULL},
};

PyType_Spec program_spec = {
    .name = "oneaccord_native._core.Program",
    .basicsize = sizeof(Program),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = program_slots,
};
