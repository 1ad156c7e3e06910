/* What the files about messages with tags share: lane.c, post.c, posted.c. */
#ifndef ONEACCORD_POST_H
#define ONEACCORD_POST_H

#include "native.h"

#define EAGER 1
#define OBJECT 1
#define SYNC 2
#define ANY (-1)
#define MOST_DIMENSIONS 32
#define CODES 256
#define KNOWN 64

/* What stands in an opening in front of the data, after which comes the shape: oneaccord.calls.post.envelopes. */
typedef struct {
    uint32_t context;
    uint8_t kind, flags, code, ndim;
    int64_t tag;
    uint64_t number, nbytes;
    uint16_t fields, none;
    uint32_t padding;
} Head;
_Static_assert(sizeof(Head) == 40, "as envelopes._HEAD");

/* The records to and from one peer: oneaccord.calls.post.lines.Line. */
typedef struct {
    PyObject_HEAD
    PyObject *line, *object; /* its form in Python, and the mailbox, whose C form is `box` */
    long peer;
    const Mailbox *box;
    Counters *sent, *taken, *begun, *met;
    unsigned char out[HEADER_BYTES], into[HEADER_BYTES]; /* the headers of openings */
    unsigned number_at, nbytes_at, index_at;
    size_t opening_bytes, most;
    bool partial; /* the next message, or a part of it, is in the mailbox, and must be fetched there */
    bool stopped; /* C has not sent all of a message, with which Python goes on before any other */
    bool full;    /* all has been sent, but there was no room for another message */
} Lane;

/* Send a message over a line that is idle; `gone` bytes of it have left where Python goes on. */
How lane_send(Lane *lane, const Head *head, const npy_intp *lengths, const unsigned char *data, size_t *gone);
/* The header of a message that follows an opening. */
void rest_header(const Lane *lane, unsigned char *header, uint64_t number, uint64_t nbytes);

/* The messages of one group. The parts up to LETTERS are given when the group is made, the others when its rank's office is there. */
enum {
    CALLER, SEND, SEND_ON, RECV, RECV_ON, IPROBE, ISEND, IRECV, WORDS, STATUS, ANY_RANK, ANY_TAG, SENT, RECEIVE, RECEIVING, LOCK, DEQUE, PATH, SECONDS, GIVEN
};
enum { OFFICE = GIVEN, INSIDE, PARKED, KEPT, OWING, LANES, RECEIVES, LETTERS, MATCHING, COURIER, OPENED };
/* The names of attributes. */
enum { DRIVER = OPENED, STEP_BACK, RECALL, SPUN, OUTGOING, INCOMING, MODE, SOURCE, TAG, COUNT, NBYTES, DTYPE, SHAPE };
enum {
    PATH_NAME = SHAPE + 1, WORDS_NAME, WHAT, KEY, OUT, NUMBER, NUMBERS, WILD, REQUEST, KEPT_BY, LOCK_NAME, OPERATIONS, PATH_OF, ARRAY, ABOUT, IS_OBJECT,
    ARRIVE, APPEND, POPLEFT, PARTS
};

/* The words of a call, which the flight recorder keeps. */
typedef enum { SENDS, SENDS_OBJECT, RECVS, RECVS_OBJECT } Verb;
typedef struct {
    Verb verb;
    long long peer, tag;
    PyObject *words;
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *parts[PARTS];
    Counters *shorts; /* which note calls that have ended */
    uint32_t context;
    long me, size;
    long *ranks;  /* of the world */
    Lane **lanes; /* those that have been used */
    PyArray_Descr *dtypes[CODES];
    size_t itemsizes[CODES];
    Known known[KNOWN];
    long first; /* the rank that is looked at first, for none to be preferred */
} Post;

/* Whether an attribute is None. It runs no Python. */
bool is_none(PyObject *object, PyObject *name);
/* Whether the group may be used, and no thread is in the office. */
bool is_free(const Post *post);
/* Note a call that has ended, or was begun; return it in words, a borrowed object, or NULL without an error. */
PyObject *note(Post *post, Verb verb, long long peer, long long tag, double started);
/* Make an object without `__init__`. */
PyObject *made(const Post *post, int type);
/* Set an attribute to an object that is given away; return whether that failed. */
bool set(const Post *post, PyObject *object, int name, PyObject *value);
/* What stands for messages and receives that meet: the group, the rank of the world, the tag. */
PyObject *key_of(uint32_t context, long source, long long tag);
/* Read the head and the shape of an opening that has come; return where the data begins, or 0 if it is for Python. */
size_t opened(const Post *post, const Lane *lane, const unsigned char *opening, Head *head, npy_intp *lengths);
/* The memory of a message: `out`, or new memory; NULL, without an error, if Python must say what is wrong. */
PyObject *memory_for(const Post *post, PyObject *out, const Head *head, npy_intp *lengths);
/* As Status.fill; return whether that failed. */
int fill(Post *post, PyObject *status, long rank, const Head *head, const npy_intp *lengths);
/* Let a receive of an array wait for its message, and return its work; NULL with an error, or without one if it must not wait: Python must look. */
PyObject *posted(Post *post, long source, long long tag, PyObject *given, double started, PyObject *out);
PyObject *post_deliver(Post *self, PyObject *object);

#endif
