/* Reductions: the inner loops of NumPy's own ufuncs, called without Python. So their bits are NumPy's, and their speed, whatever the processor. */
#include "native.h"

#include <numpy/ufuncobject.h>

/* Find the loop of a ufunc, an object of type numpy.ufunc, that takes two operands of the type `number` and gives a third one. */
bool kernel_of(PyObject *ufunc, int number, Kernel *kernel) {
    const PyUFuncObject *given = (const PyUFuncObject *)ufunc;
    if (given->nin != 2 || given->nout != 1) return false;
    for (int i = 0; i < given->ntypes; i++) {
        const char *types = given->types + 3 * i;
        if (types[0] == number && types[1] == number && types[2] == number) {
            kernel->loop = (Loop)given->functions[i];
            kernel->data = given->data ? given->data[i] : NULL;
            return kernel->loop != NULL;
        }
    }
    return false;
}

void reduce(const Kernel *kernel, void *target, const void *left, const void *right, size_t count, size_t itemsize) {
    char *operands[] = {(char *)left, (char *)right, target};
    Py_ssize_t length = (Py_ssize_t)count, step = (Py_ssize_t)itemsize;
    Py_ssize_t steps[] = {step, step, step};
    if (count) kernel->loop(operands, &length, steps, kernel->data);
}
