/* The module: its types, and what measures the machine. */
#define IMPORTS_NUMPY
#include "native.h"

static struct PyModuleDef definition;

State *state_of(PyTypeObject *type) { return PyType_GetModuleState(type); }

/* The types, and where the module keeps those that others ask for. */
static const struct {
    PyType_Spec *spec;
    size_t place;
} types[] = {
    {&program_spec, offsetof(State, program)}, {&counters_spec, offsetof(State, counters)}, {&caller_spec, offsetof(State, caller)},
    {&call_spec, offsetof(State, call)},       {&send_spec, offsetof(State, send)},   {&recv_spec, offsetof(State, recv)},
    {&exchange_spec, offsetof(State, exchange)}, {&low_spec, offsetof(State, low)},
    {&lane_spec, offsetof(State, lane)},       {&post_spec, offsetof(State, post)},
    {&window_spec, offsetof(State, window)},
    {&posted_spec, offsetof(State, posted)},
};
#define TYPES (sizeof types / sizeof *types)

/* The mailboxes of our own, which the rest of the module knows as those of any plugin. */
static PyType_Spec *const mailboxes[] = {&ring_spec, &stream_spec};

static PyTypeObject **type_at(PyObject *module, size_t i) { return (PyTypeObject **)(void *)((char *)PyModule_GetState(module) + types[i].place); }

static int execute(PyObject *module) {
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    for (size_t i = 0; i < TYPES; i++) {
        PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        *type_at(module, i) = type;
        if (!type || PyModule_AddType(module, type) < 0) return -1;
    }
    for (size_t i = 0; i < sizeof mailboxes / sizeof *mailboxes; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, mailboxes[i], NULL);
        int failed = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
        Py_XDECREF(type);
        if (failed) return -1;
    }
    if (PyModule_AddFunctions(module, word_methods) < 0) return -1;
    return PyModule_AddFunctions(module, mailbox_methods);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    const State *state = PyModule_GetState(module);
    for (size_t i = 0; i < TYPES; i++) Py_VISIT(*type_at(module, i));
    Py_VISIT(state->receiving);
    Py_VISIT(state->sent);
    return 0;
}

static int clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    for (size_t i = 0; i < TYPES; i++) Py_CLEAR(*type_at(module, i));
    Py_CLEAR(state->receiving);
    Py_CLEAR(state->sent);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "oneaccord_native._core",
    .m_doc = "What Python does for a call, done by C.",
    .m_size = sizeof(State),
    .m_methods = limit_methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
