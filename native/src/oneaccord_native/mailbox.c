/* What programs and messages do with mailboxes of any kind: wait for a moment, send, receive. */
#include "native.h"

#include <sched.h>
#include <time.h>

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Ranks that share one processor: the peer cannot send before this thread gives way. A thread that saw several times in a row that another one ran
   while it gave way, and only shortly, gives way before it looks again. The system moves one of the two sooner or later; giving way then takes no time. */
static _Thread_local unsigned shared; /* how many times in a row that was so */

#define SWITCHED_S 1e-6 /* giving way takes less if nobody else wants the processor */
#define SLICE_S 50e-6   /* and more if somebody computes */
#define ENOUGH 3

bool releases_next(const Looks *looks, const Patience *patience) { return !patience->released && (!looks->tries || shared >= ENOUGH); }

void patience_begin(Patience *patience) {
    if (!patience->released) patience->released = PyEval_SaveThread();
}

bool look_again(const Mailbox *box, Looks *looks, Patience *patience) {
    if (looks->tries && shared < ENOUGH) {
        --looks->tries;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        return true;
    }
    patience_begin(patience);
    double now = now_s();
    if (looks->until == 0.0)
        looks->until = now + box->spin_s;
    else if (now >= looks->until)
        return false;
    sched_yield();
    double took = now_s() - now;
    shared = took > SWITCHED_S && took < SLICE_S ? shared + 1 : 0;
    return true;
}

void patience_end(Patience *patience) {
    if (patience->released) PyEval_RestoreThread(patience->released);
    patience->released = NULL;
}

bool mailbox_room(const Mailbox *box, Patience *patience) {
    Looks looks = {box->tries, 0.0};
    oneaccord_answer answer;
    while ((answer = box->room(box->mailbox)) == ONEACCORD_NOT_YET && look_again(box, &looks, patience)) continue;
    return answer == ONEACCORD_YES;
}

const unsigned char *mailbox_fetch(const Mailbox *box, const unsigned char *header, size_t nbytes, Patience *patience) {
    Looks looks = {box->tries, 0.0};
    box->release(box->mailbox);
    for (;;) {
        switch (box->poll(box->mailbox, header, nbytes)) {
        case ONEACCORD_YES:
            return box->payload(box->mailbox);
        case ONEACCORD_PART:
            looks = (Looks){box->tries, 0.0};
            break;
        case ONEACCORD_NOT_YET:
            if (look_again(box, &looks, patience)) break;
            return NULL;
        default:
            return NULL;
        }
    }
}

/* A call that copies for longer looks around in Python. */
#define LONGEST_S 0.2
#define SHORT_BYTES ((size_t)512 << 10) /* copied without letting go of the interpreter's lock */

/* Do something again and again until it is done, for a moment after the last part. */
static bool in_parts(const Mailbox *box, oneaccord_answer (*ask)(const Mailbox *box, void *of), void *of, Patience *patience) {
    Looks looks = {box->tries, 0.0};
    double until = 0.0;
    for (;;) {
        switch (ask(box, of)) {
        case ONEACCORD_YES:
            return true;
        case ONEACCORD_PART:
            looks = (Looks){box->tries, 0.0};
            if (until == 0.0)
                until = now_s() + LONGEST_S;
            else if (now_s() > until)
                return false;
            break;
        case ONEACCORD_NOT_YET:
            if (look_again(box, &looks, patience)) break;
            return false;
        default:
            return false;
        }
    }
}

static oneaccord_answer ask_lent(const Mailbox *box, void *Py_UNUSED(of)) { return box->lent(box->mailbox); }

bool mailbox_lent(const Mailbox *box, Patience *patience) {
    return box->nbytes < sizeof(Mailbox) || !box->lent || in_parts(box, ask_lent, NULL, patience);
}

typedef struct {
    const unsigned char *header;
    unsigned char *into;
    size_t nbytes;
} Wanted;

static oneaccord_answer ask_borrow(const Mailbox *box, void *of) {
    const Wanted *wanted = of;
    return box->borrow(box->mailbox, wanted->header, wanted->into, wanted->nbytes);
}

bool mailbox_borrow(const Mailbox *box, const unsigned char *header, unsigned char *into, size_t nbytes, Patience *patience) {
    Wanted wanted = {header, into, nbytes};
    box->release(box->mailbox);
    if (nbytes > SHORT_BYTES) patience_begin(patience);
    return in_parts(box, ask_borrow, &wanted, patience);
}

bool mailbox_lends(const Mailbox *box, size_t nbytes) {
    return box->nbytes >= sizeof(Mailbox) && box->lend && box->lent_bytes && nbytes > box->lent_bytes;
}

const Mailbox *mailbox_of(PyObject *object) {
    PyObject *capsule = PyObject_GetAttrString(object, "c_mailbox");
    if (!capsule) return NULL;
    const Mailbox *box = PyCapsule_GetPointer(capsule, ONEACCORD_MAILBOX);
    Py_DECREF(capsule);
    if (!box) return NULL;
    if (box->nbytes >= offsetof(Mailbox, lent_bytes) && box->room && box->slot && box->post && box->release && box->poll && box->payload && box->take) return box;
    PyErr_SetString(PyExc_ValueError, "c_mailbox has members that are missing: see oneaccord_native/mailbox.h");
    return NULL;
}

/* mailbox_slot_bytes(box): the length of its slots; raises unless the mailbox has a C form. */
static PyObject *slot_bytes(PyObject *Py_UNUSED(module), PyObject *object) {
    const Mailbox *box = mailbox_of(object);
    return box ? PyLong_FromSize_t(box->slot_bytes) : NULL;
}

PyMethodDef mailbox_methods[] = {
    {"mailbox_slot_bytes", slot_bytes, METH_O, "Return the length of the slots of a mailbox with a C form; raise AttributeError or ValueError if it has none."},
    {NULL, NULL, 0, NULL},
};

PyObject *mailbox_capsule(Mailbox *box) { return PyCapsule_New(box, ONEACCORD_MAILBOX, NULL); }
