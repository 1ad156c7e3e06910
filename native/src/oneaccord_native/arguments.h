/* What calls that C may leave to Python ask of their arguments: post.c, window.c. */
#ifndef ONEACCORD_ARGUMENTS_H
#define ONEACCORD_ARGUMENTS_H

#include "native.h"

#include <math.h>

/* Whether a call may last so many seconds, or as long as is usual. */
static inline bool in_time(PyObject *seconds) {
    return seconds == Py_None || (PyFloat_CheckExact(seconds) && PyFloat_AsDouble(seconds) > 0.0 && isfinite(PyFloat_AsDouble(seconds)));
}

/* Whether a call has as many arguments as it needs; an error is set otherwise. */
static inline bool counted(Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted) return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, and %zd were given", wanted, count);
    return false;
}

/* Call the form in Python of a call that C has not made. */
static inline PyObject *slowly(PyObject *call, PyObject *const *given, Py_ssize_t count) {
    if (PyErr_Occurred()) return NULL;
    PyObject *arguments = PyTuple_New(count);
    for (Py_ssize_t i = 0; arguments && i < count; i++) PyTuple_SetItem(arguments, i, Py_NewRef(given[i]));
    PyObject *result = arguments ? PyObject_CallObject(call, arguments) : NULL;
    Py_XDECREF(arguments);
    return result;
}

#endif
