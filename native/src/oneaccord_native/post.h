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
    CALLER, SEND, SEND_ON, RECV, RECV_ON, IPROBE, ISEND, IRECV, WORDS, STATUS, ANY_RANK, ANY_TAG, SENT, RECEIVE, RECEIVING, LOCK, QUEUE, PATH, SECONDS, GIVEN
};
enum { OFFICE = GIVEN, INSIDE, PARKED, KEPT, OWING, LANES, RECEIVES, LETTERS, MATCHING, COURIER, OPENED };
/* The names of attributes. */
enum { DRIVER = OPENED, STEP_BACK, RECALL, SPUN, OUTGOING, INCOMING, MODE, SOURCE, TAG, COUNT, NBYTES, DTYPE, SHAPE };
enum {
    WHAT = SHAPE + 1, KEY, OUT, NUMBER, NUMBERS, WILD, REQUEST, KEPT_BY, LIMITS, DONE, PATH_OF, ARRAY, ABOUT, IS_OBJECT, ARRIVE, CALL, CONCLUDE, /* methods */ FINISH, IS_DONE, PARTS
};

/* The words of a call, which the flight recorder keeps. */
typedef enum { SENDS, SENDS_OBJECT, RECVS, RECVS_OBJECT } Verb;
typedef struct {
    Verb verb;
    long long peer, tag;
    PyObject *words;
} Known;

typedef struct Request Request;
/* The receives that C has posted and that wait for their messages, of all groups of a rank, in order: as oneaccord.calls.post.matching, for receives of
   arrays from one rank and with one tag. */
typedef struct {
    PyObject_HEAD
    Request *first, *last;
    Request **places; /* the first receives of all keys, by their hashes */
    size_t count, keys, mask;
    double earliest; /* no receive's time is up before */
    uint64_t drives, looks; /* how often a thread of the program drove or is about to, and how many receives were looked at */
} Posted;

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
    unsigned code; /* of the last array that was sent */
    Known known[KNOWN];
    long first; /* the rank that is looked at first, for none to be preferred */
    Posted *posted;
} Post;

/* What C has of a receive, and its caller's handle of it: behind what oneaccord.calls.post.requests.Receiving has. */
#define FEW_DIMENSIONS 4
struct Request {
    PyObject *object;             /* the handle that this is a part of */
    Post *post;
    Posted *posted;               /* where it waits, which owns it meanwhile; NULL if C has nothing to do with it any more */
    Request *before, *behind;     /* the order in which all were posted */
    Request *next, *last, *other; /* the next one that waits for the same; of the first such, the last, and the first of another key in the same place */
    PyObject *words, *out, *array, *view, *lock, *callbacks, *places, *error, *trace; /* the view is its form in Python, if there is one */
    long rank, source;            /* of the group, and of the world */
    long long tag;
    double until, seconds;
    Head head; /* of the message that has come */
    npy_intp lengths[FEW_DIMENSIONS];
    bool ended, takes_stock;
};

/* Whether an attribute is None. It runs no Python. */
bool is_none(PyObject *object, PyObject *name);
/* Whether the group may be used, and no thread is in the office; if only a call is to `begin`, the courier may wait for messages. */
bool is_free(const Post *post, bool begins);
/* Whether no thread looks at what has come, so that it may be released. */
bool is_still(const Post *post);
/* The line to a rank; NULL if there is none yet. */
Lane *lane_to(Post *post, long rank);
/* Whether the line is idle, and waits for its next opening; -1 if it may be now, but other threads may have moved anything. */
int is_listening(const Post *post, const Lane *lane);
/* Let others know that this thread waits; let others drive again. */
void drive(Post *post, bool *drives);
void step_back(const Post *post);
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

/* Handles. */

/* Make the types of handles, from those of Python; return whether that failed. */
int handles_init(Post *post);
/* The handle of a send that has ended. */
PyObject *sent_made(Post *post, PyObject *words);
/* The handle of a receive, which does not wait yet; NULL with an error. */
Request *request_made(Post *post);
/* Its form in Python, a new reference; NULL with an error. */
PyObject *view_of(Request *request);
/* End it, with its message. Python runs if it has callbacks, or threads wait; return whether that failed. */
int conclude(Request *request);

/* Let a receive of an array wait for its message; return its handle, or NULL with an error, or without one if it must not wait: Python must look. */
PyObject *posted(Post *post, long rank, long long tag, PyObject *given, double started, PyObject *out);
/* Let messages meet receives until this one has ended, for a moment after the last one if it waits; return whether nothing came, and nothing was unusual. */
bool progress(Request *request, bool waits);
/* The same for any receives from one rank, without waiting. */
void progress_from(Post *post, Lane *lane);
PyObject *post_deliver(Post *self, PyObject *object);

#endif
