/* Locks between processes: a word of shared memory with the number of its owner, 0 for none. oneaccord.calls.windows.locks waits for them. */
#include "native.h"

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() ((void)0)
#endif

uint64_t word_take(_Atomic uint64_t *word, uint64_t owner, unsigned long long tries) {
    uint64_t found;
    do {
        /* It is only read while another one has it, so that its line stays in the caches of those that wait. */
        found = atomic_load_explicit(word, memory_order_relaxed);
        if (!found && atomic_compare_exchange_strong(word, &found, owner)) break;
        PAUSE();
    } while (tries--);
    return found;
}

bool word_free(_Atomic uint64_t *word, uint64_t owner) { return atomic_compare_exchange_strong(word, &owner, 0); }

/* Return the word at an index of 8 bytes; NULL with an error if it is not in the memory, or not aligned. */
static _Atomic uint64_t *word_at(Py_buffer *memory, Py_ssize_t index) {
    if (memory->readonly || index < 0 || index >= memory->len / 8 || (uintptr_t)memory->buf % 8) {
        PyErr_SetString(PyExc_ValueError, "the word is not in the memory, or not aligned, or read-only");
        return NULL;
    }
    return (_Atomic uint64_t *)memory->buf + index;
}

static PyObject *take_word(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    Py_ssize_t index;
    unsigned long long owner, tries;
    if (!PyArg_ParseTuple(args, "w*nKK", &memory, &index, &owner, &tries)) return NULL;
    _Atomic uint64_t *word = word_at(&memory, index);
    uint64_t found = word ? word_take(word, owner, tries) : 0;
    PyBuffer_Release(&memory);
    return word ? PyLong_FromUnsignedLongLong(found) : NULL;
}

static PyObject *free_word(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    Py_ssize_t index;
    unsigned long long owner;
    if (!PyArg_ParseTuple(args, "w*nK", &memory, &index, &owner)) return NULL;
    _Atomic uint64_t *word = word_at(&memory, index);
    bool freed = word && word_free(word, owner);
    PyBuffer_Release(&memory);
    return word ? PyBool_FromLong(freed) : NULL;
}

PyMethodDef word_methods[] = {
    {"take_word", take_word, METH_VARARGS, "Take the lock of a word, looking at it so often: (memory, index, owner, tries) -> 0, or its owner."},
    {"free_word", free_word, METH_VARARGS, "Give the lock of a word back: (memory, index, owner) -> whether it was this owner's."},
    {NULL, NULL, 0, NULL},
};
