/* The module: its types, and nothing else. */
#include "native.h"

static struct PyModuleDef definition;

State *state_of(PyTypeObject *type) { return PyType_GetModuleState(type); }

static int add(PyObject *module, PyType_Spec *spec, PyTypeObject **type) {
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

static int execute(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (add(module, &ring_spec, &state->ring) < 0 || add(module, &stream_spec, &state->stream) < 0) return -1;
    return add(module, &program_spec, &state->program);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    Py_VISIT(state->ring);
    Py_VISIT(state->stream);
    Py_VISIT(state->program);
    return 0;
}

static int clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->ring);
    Py_CLEAR(state->stream);
    Py_CLEAR(state->program);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "manyhands_native._core",
    .m_doc = "What Python does for a call, done by C.",
    .m_size = sizeof(State),
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
