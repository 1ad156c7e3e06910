/* A mailbox of a plugin's own: each message is one packet of a Unix socket. It needs mailbox.h alone; Python calls what is not static through ctypes. */
#include "mailbox.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define SLOT_BYTES 4096

typedef struct {
    oneaccord_mailbox form;
    int fd;
    size_t came; /* the bytes of the packet in `incoming`; 0 for none */
    unsigned long taken; /* by C */
    unsigned long unasked; /* messages that came though `room` had last said that there is none */
    oneaccord_answer last;
    unsigned char outgoing[ONEACCORD_HEADER_BYTES + SLOT_BYTES], incoming[ONEACCORD_HEADER_BYTES + SLOT_BYTES];
} Packets;

static oneaccord_answer room(void *mailbox) {
    Packets *packets = mailbox;
    struct pollfd one = {packets->fd, POLLOUT, 0};
    packets->last = poll(&one, 1, 0) == 1 && one.revents == POLLOUT ? ONEACCORD_YES : ONEACCORD_NOT_YET;
    return packets->last;
}

static unsigned char *slot(void *mailbox) { return ((Packets *)mailbox)->outgoing + ONEACCORD_HEADER_BYTES; }

static oneaccord_answer post(void *mailbox, const unsigned char *header, const unsigned char *payload, size_t nbytes) {
    Packets *packets = mailbox;
    packets->unasked += packets->last == ONEACCORD_NOT_YET;
    memcpy(packets->outgoing, header, ONEACCORD_HEADER_BYTES);
    if (nbytes && payload != slot(packets)) memcpy(slot(packets), payload, nbytes);
    return send(packets->fd, packets->outgoing, ONEACCORD_HEADER_BYTES + nbytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? ONEACCORD_UNUSUAL : ONEACCORD_YES;
}

static void release(void *mailbox) { (void)mailbox; }

static oneaccord_answer arrived(void *mailbox, const unsigned char *header, size_t nbytes) {
    Packets *packets = mailbox;
    if (!packets->came) {
        ssize_t came = recv(packets->fd, packets->incoming, sizeof packets->incoming, MSG_DONTWAIT);
        if (came < 0 && (errno == EAGAIN || errno == EINTR)) return ONEACCORD_NOT_YET;
        if (came <= 0) return ONEACCORD_UNUSUAL;
        packets->came = (size_t)came;
    }
    return packets->came == ONEACCORD_HEADER_BYTES + nbytes && !memcmp(packets->incoming, header, ONEACCORD_HEADER_BYTES) ? ONEACCORD_YES : ONEACCORD_UNUSUAL;
}

static const unsigned char *payload(void *mailbox) { return ((Packets *)mailbox)->incoming + ONEACCORD_HEADER_BYTES; }

static void take(void *mailbox) {
    Packets *packets = mailbox;
    packets->came = 0;
    packets->taken++;
}

/* What Python calls. */

Packets *packets_open(int fd, double spin_s) {
    Packets *packets = calloc(1, sizeof *packets);
    if (packets) {
        /* As a plugin fills it that was made before there were long messages. */
        packets->form = (oneaccord_mailbox){
            .nbytes = offsetof(oneaccord_mailbox, lent_bytes), .mailbox = packets, .slot_bytes = SLOT_BYTES, .tries = 20, .spin_s = spin_s,
            .room = room, .slot = slot, .post = post, .release = release, .poll = arrived, .payload = payload, .take = take,
        };
        packets->fd = fd;
    }
    return packets;
}

void packets_close(Packets *packets) { free(packets); }

size_t packets_slot_bytes(void) { return SLOT_BYTES; }

unsigned char *packets_slot(Packets *packets, int incoming) { return incoming ? packets->incoming + ONEACCORD_HEADER_BYTES : slot(packets); }

int packets_post(Packets *packets, const unsigned char *header, size_t nbytes) {
    packets->last = ONEACCORD_YES; /* Python tries until it is sent */
    return post(packets, header, slot(packets), nbytes);
}

int packets_fetch(Packets *packets, const unsigned char *header, size_t nbytes) {
    int answer = arrived(packets, header, nbytes);
    if (answer == ONEACCORD_YES) packets->came = 0;
    return answer;
}

/* The header of the packet that came and is another one than was asked for; NULL if none came. */
const unsigned char *packets_other(const Packets *packets) { return packets->came ? packets->incoming : NULL; }

unsigned long packets_unasked(const Packets *packets) { return packets->unasked; }

unsigned long packets_taken(const Packets *packets) { return packets->taken; }
