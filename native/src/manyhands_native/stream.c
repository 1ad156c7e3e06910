/* One peer over a socket that does not block: header and payload in one system call, from and to memory that is made once. */
#include "native.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* Send a message. What the kernel does not take is copied, and goes on from `outgoing`: the caller may write to the payload at once. */
Outcome stream_post(Stream *stream, const unsigned char *header, const unsigned char *payload, size_t nbytes) {
    struct iovec parts[2] = {{(void *)header, HEADER_BYTES}, {(void *)payload, nbytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = nbytes ? 2 : 1};
    ssize_t sent = sendmsg(stream->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return STOPPED;
        sent = 0;
    }
    size_t total = HEADER_BYTES + nbytes;
    stream->sent = stream->sending = total;
    if ((size_t)sent < total) {
        memcpy(stream->outgoing, header, HEADER_BYTES);
        if (nbytes && payload != stream->outgoing + HEADER_BYTES) memcpy(stream->outgoing + HEADER_BYTES, payload, nbytes);
        stream->sent = (uint64_t)sent;
    }
    return MOVED;
}

/* Try for a moment to get the whole next message; what has come stays in `incoming`, and `got` says how much that is. */
Outcome stream_fetch(Stream *stream, const unsigned char *header, size_t nbytes, Patience *patience) {
    size_t total = HEADER_BYTES + nbytes;
    unsigned tries = stream->spins;
    double until = 0.0;
    for (;;) {
        if (stream->got >= HEADER_BYTES && memcmp(stream->incoming, header, HEADER_BYTES)) return STOPPED;
        if (stream->got == total) {
            stream->got = 0;
            return MOVED;
        }
        /* Not beyond what is surely of this message: of another one no more than its header is taken. */
        ssize_t came = recv(stream->fd, stream->incoming + stream->got, total - stream->got, MSG_DONTWAIT);
        if (came > 0) {
            stream->got += (uint64_t)came;
            tries = stream->spins;
            until = 0.0;
        } else if (!came || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return STOPPED;
        } else if (!patience_allows(patience, &tries, &until)) {
            return STOPPED;
        }
    }
}

static int stream_init(Stream *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "outgoing", "incoming", "tries", "spin_s", NULL};
    PyObject *outgoing, *incoming;
    if (self->held) {
        PyErr_SetString(PyExc_RuntimeError, "a stream is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOOId", names, &self->fd, &outgoing, &incoming, &self->spins, &self->spin_s)) return -1;
    PyObject *given[] = {outgoing, incoming};
    for (int i = 0; i < 2; i++) {
        if (PyObject_GetBuffer(given[i], &self->views[i], PyBUF_WRITABLE) < 0) return -1;
        self->held = i + 1;
    }
    if (self->views[0].len < HEADER_BYTES || self->views[0].len != self->views[1].len) {
        PyErr_SetString(PyExc_ValueError, "both ways have memory of one size, for a header and a payload");
        return -1;
    }
    self->outgoing = self->views[0].buf;
    self->incoming = self->views[1].buf;
    self->slot_bytes = (uint64_t)self->views[0].len - HEADER_BYTES;
    return 0;
}

static void stream_dealloc(Stream *self) {
    PyTypeObject *type = TYPE_OF(self);
    while (self->held) PyBuffer_Release(&self->views[--self->held]);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *moved(Stream *self, PyObject *args, bool is_post) {
    Py_buffer header;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "y*n", &header, &nbytes)) return NULL;
    if (header.len != HEADER_BYTES || nbytes < 0 || (uint64_t)nbytes > self->slot_bytes) {
        PyBuffer_Release(&header);
        PyErr_Format(PyExc_ValueError, "a header has %d bytes, and a payload at most those of a slot", HEADER_BYTES);
        return NULL;
    }
    Outcome outcome;
    if (is_post) {
        outcome = stream_post(self, header.buf, self->outgoing + HEADER_BYTES, (size_t)nbytes);
    } else {
        Patience patience = {NULL, self->spin_s, self->spins};
        outcome = stream_fetch(self, header.buf, (size_t)nbytes, &patience);
        patience_end(&patience);
    }
    int error = errno;
    PyBuffer_Release(&header);
    if (is_post && outcome == STOPPED) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyBool_FromLong(is_post ? self->sent == self->sending : outcome == MOVED);
}

static PyObject *py_post(Stream *self, PyObject *args) { return moved(self, args, true); }

static PyObject *py_fetch(Stream *self, PyObject *args) { return moved(self, args, false); }

static PyMethodDef stream_methods[] = {
    {"post_short", (PyCFunction)py_post, METH_VARARGS, "Send the first bytes of the slot; tell whether all went at once. Raises OSError where the connection broke."},
    {"fetch_short", (PyCFunction)py_fetch, METH_VARARGS, "Wait a moment for the next short message; False where it did not come as it should."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef stream_members[] = {
    {"_fd", T_INT, offsetof(Stream, fd), 0, NULL},
    {"_sent", T_ULONGLONG, offsetof(Stream, sent), 0, NULL},
    {"_sending", T_ULONGLONG, offsetof(Stream, sending), 0, NULL},
    {"_got", T_ULONGLONG, offsetof(Stream, got), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, "Short messages from and to one peer, over a socket."},
    {Py_tp_init, stream_init},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_methods, stream_methods},
    {Py_tp_members, stream_members},
    {0, NULL},
};

PyType_Spec stream_spec = {
    .name = "manyhands_native._core.Stream",
    .basicsize = sizeof(Stream),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = stream_slots,
};
