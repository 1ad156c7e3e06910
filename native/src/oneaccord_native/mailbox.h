/* Mailboxes in C: what the compiled executor calls to move short messages without Python.

   A plugin may have its mailboxes (`oneaccord.api.Mailbox`) in this form, too. For each it fills one `oneaccord_mailbox`, and the Python object has the
   attribute `c_mailbox`, a capsule named ONEACCORD_MAILBOX with a pointer to it. The executor keeps a reference to the object, not to the capsule: the
   struct must stay where it is as long as the object lives.

   The functions never block. At most one thread at a time sends, and at most one receives. They are called with or without the interpreter's lock; one that
   needs Python takes the lock with PyGILState_Ensure. Errors have no form here: a function answers ONEACCORD_UNUSUAL, and the executor hands the call
   back to Python, which calls the object's own methods and raises what they raise. So both forms must agree on what has been sent and received. */
#ifndef ONEACCORD_MAILBOX_H
#define ONEACCORD_MAILBOX_H

#include <stddef.h>

#define ONEACCORD_MAILBOX "oneaccord.mailbox.1"
#define ONEACCORD_HEADER_BYTES 64

typedef enum {
    ONEACCORD_UNUSUAL = -1, /* Python must look; nothing was done that its methods cannot do again */
    ONEACCORD_NOT_YET = 0,  /* ask again */
    ONEACCORD_YES = 1,
    ONEACCORD_PART = 2, /* a part of the message came: ask again, and begin to count the time anew */
} oneaccord_answer;

typedef struct {
    size_t nbytes; /* sizeof(oneaccord_mailbox): later versions append members */
    void *mailbox; /* the first argument of each function */
    size_t slot_bytes; /* the longest payload, the length of the object's slots */
    unsigned tries;    /* how often to ask before the processor is offered to others */
    double spin_s;     /* for how many seconds to ask from then on, before Python sleeps */

    /* Sending. */

    /* Whether the next message can be posted. ONEACCORD_UNUSUAL if asking again would not help, because Python must send the rest of the last one. */
    oneaccord_answer (*room)(void *mailbox);
    /* Where the payload of the next message may be written, which saves `post` a copy. */
    unsigned char *(*slot)(void *mailbox);
    /* Send a message, when there is room: a header of 64 bytes, and a payload anywhere, which the caller may overwrite at once. ONEACCORD_YES, or
       ONEACCORD_UNUSUAL with nothing sent. A message that has left in part counts as sent; the object's `unsent` returns what finishes it. */
    oneaccord_answer (*post)(void *mailbox, const unsigned char *header, const unsigned char *payload, size_t nbytes);

    /* Receiving. */

    /* The message that was taken last has been read; its memory may be used again. */
    void (*release)(void *mailbox);
    /* Whether the next message has come whole, with this header and so many bytes of payload. ONEACCORD_UNUSUAL for another header. */
    oneaccord_answer (*poll)(void *mailbox, const unsigned char *header, size_t nbytes);
    /* The payload of the message that has come; it stays until `release`. */
    const unsigned char *(*payload)(void *mailbox);
    /* Count the message that has come as received. Until then, Python's `fetch` may still fetch it. */
    void (*take)(void *mailbox);

    /* Long messages, which are copied from where they lie to where they go. A mailbox without them ends here, or has 0 and NULL. */

    size_t lent_bytes; /* messages of more bytes are lent, unless they are to be reduced; the receiver must ask with `borrow` for them */
    /* Send a message from memory that stays as it is until `lent` answers ONEACCORD_YES, when there is room. ONEACCORD_NOT_YET while another one is lent;
       ONEACCORD_UNUSUAL, with nothing sent, for memory that cannot be lent. The object's `unsent` returns what finishes it. */
    oneaccord_answer (*lend)(void *mailbox, const unsigned char *header, const unsigned char *payload, size_t nbytes);
    /* Whether the peer has all of the message that was lent last. ONEACCORD_PART if a part was moved meanwhile. */
    oneaccord_answer (*lent)(void *mailbox);
    /* Receive the next message into memory, and count it as received: ONEACCORD_YES when all of it is there, ONEACCORD_PART when a part is. ONEACCORD_UNUSUAL for
       another header, and for a message that came in another way. Python's `recv` may continue it, into the same memory. */
    oneaccord_answer (*borrow)(void *mailbox, const unsigned char *header, unsigned char *into, size_t nbytes);
} oneaccord_mailbox;

#endif
