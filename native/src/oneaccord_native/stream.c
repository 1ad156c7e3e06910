/* One peer over a socket that does not block: header and payload in one system call, from and to memory that is made once. */
#include "native.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* The mailbox of oneaccord_tcp.mailbox. */
typedef struct {
    PyObject_HEAD
    Mailbox mailbox;
    int fd;
    unsigned char *outgoing, *incoming; /* HEADER_BYTES, then the slot */
    uint64_t sent, sending; /* of the message in `outgoing`: bytes that the kernel took, and all; equal if nothing is left */
    uint64_t got;           /* bytes of the next message that have come */
    Py_buffer views[2];
    int held;
} Stream;

static oneaccord_answer room(void *mailbox) {
    const Stream *stream = mailbox;
    return stream->sent == stream->sending ? ONEACCORD_YES : ONEACCORD_UNUSUAL;
}

static unsigned char *slot(void *mailbox) { return ((Stream *)mailbox)->outgoing + HEADER_BYTES; }

/* Send a message. What the kernel does not take is copied, and goes on from `outgoing`: the caller may overwrite the payload at once. */
static oneaccord_answer post(void *mailbox, const unsigned char *header, const unsigned char *payload, size_t nbytes) {
    Stream *stream = mailbox;
    struct iovec parts[2] = {{(void *)header, HEADER_BYTES}, {(void *)payload, nbytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = nbytes ? 2 : 1};
    ssize_t sent = sendmsg(stream->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return ONEACCORD_UNUSUAL;
        sent = 0;
    }
    size_t total = HEADER_BYTES + nbytes;
    stream->sent = stream->sending = total;
    if ((size_t)sent < total) {
        memcpy(stream->outgoing, header, HEADER_BYTES);
        if (nbytes && payload != slot(stream)) memcpy(slot(stream), payload, nbytes);
        stream->sent = (uint64_t)sent;
    }
    return ONEACCORD_YES;
}

static void release(void *Py_UNUSED(mailbox)) {} /* the peer is not told: the kernel holds what comes next */

/* Try once to get the rest of the next message; what has come stays in `incoming`, and `got` says how much that is. */
static oneaccord_answer poll(void *mailbox, const unsigned char *header, size_t nbytes) {
    Stream *stream = mailbox;
    size_t total = HEADER_BYTES + nbytes;
    oneaccord_answer answer = ONEACCORD_NOT_YET;
    if (stream->got < total) {
        /* Not beyond what is surely of this message: of another one no more than its header is taken. */
        ssize_t came = recv(stream->fd, stream->incoming + stream->got, total - stream->got, MSG_DONTWAIT);
        if (came > 0) {
            stream->got += (uint64_t)came;
            answer = ONEACCORD_PART;
        } else if (!came || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return ONEACCORD_UNUSUAL;
        }
    }
    if (stream->got >= HEADER_BYTES && memcmp(stream->incoming, header, HEADER_BYTES)) return ONEACCORD_UNUSUAL;
    return stream->got == total ? ONEACCORD_YES : answer;
}

static const unsigned char *payload(void *mailbox) { return ((Stream *)mailbox)->incoming + HEADER_BYTES; }

static void take(void *mailbox) { ((Stream *)mailbox)->got = 0; }

static int stream_init(Stream *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fd", "outgoing", "incoming", "tries", "spin_s", NULL};
    PyObject *outgoing, *incoming;
    unsigned tries;
    double spin_s;
    if (self->held) {
        PyErr_SetString(PyExc_RuntimeError, "a stream is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOOId", names, &self->fd, &outgoing, &incoming, &tries, &spin_s)) return -1;
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
    size_t slot_bytes = (size_t)self->views[0].len - HEADER_BYTES;
    self->mailbox = (Mailbox){sizeof(Mailbox), self, slot_bytes, tries, spin_s, room, slot, post, release, poll, payload, take, 0, NULL, NULL, NULL};
    return 0;
}

static void stream_dealloc(Stream *self) {
    PyTypeObject *type = TYPE_OF(self);
    while (self->held) PyBuffer_Release(&self->views[--self->held]);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Read (header, nbytes); return -1 with an error. */
static int message_of(Stream *self, PyObject *args, Py_buffer *header, size_t *nbytes) {
    Py_ssize_t given;
    if (!PyArg_ParseTuple(args, "y*n", header, &given)) return -1;
    *nbytes = (size_t)given;
    if (header->len == HEADER_BYTES && given >= 0 && *nbytes <= self->mailbox.slot_bytes) return 0;
    PyBuffer_Release(header);
    PyErr_Format(PyExc_ValueError, "a header has %d bytes, and a payload at most those of a slot", HEADER_BYTES);
    return -1;
}

static PyObject *py_post(Stream *self, PyObject *args) {
    Py_buffer header;
    size_t nbytes;
    if (message_of(self, args, &header, &nbytes) < 0) return NULL;
    bool posted = post(self, header.buf, slot(self), nbytes) == ONEACCORD_YES;
    int error = errno;
    PyBuffer_Release(&header);
    errno = error;
    return posted ? PyBool_FromLong(self->sent == self->sending) : PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *py_fetch(Stream *self, PyObject *args) {
    Py_buffer header;
    size_t nbytes;
    if (message_of(self, args, &header, &nbytes) < 0) return NULL;
    Patience patience = {NULL};
    bool came = mailbox_fetch(&self->mailbox, header.buf, nbytes, &patience);
    patience_end(&patience);
    PyBuffer_Release(&header);
    if (came) take(self);
    return PyBool_FromLong(came);
}

static PyObject *c_mailbox(PyObject *self, void *Py_UNUSED(closure)) { return mailbox_capsule(&((Stream *)self)->mailbox); }

static PyGetSetDef stream_attributes[] = {
    {"c_mailbox", c_mailbox, NULL, "The mailbox as C sees it.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef stream_methods[] = {
    {"post_short", (PyCFunction)py_post, METH_VARARGS, "Send the first bytes of the slot; return whether all went at once. Raises OSError if the connection broke."},
    {"fetch_short", (PyCFunction)py_fetch, METH_VARARGS, "Wait a moment for the next short message; False if it did not come as it should."},
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
    {Py_tp_getset, stream_attributes},
    {0, NULL},
};

PyType_Spec stream_spec = {
    .name = "oneaccord_native._core.Stream",
    .basicsize = sizeof(Stream),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = stream_slots,
};
