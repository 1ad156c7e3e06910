/* A libnccl.so.2 without NCCL: the real nccl4py calls it, and it passes each call on to fake_nccl.py (see through_nccl4py.py).
 *
 * Names, parameters, numbers and structures are those of nccl.h of NCCL 2.32. A test that wants an older NCCL hides functions by
 * renaming them, as in -DncclCommRevoke=hidden_ncclCommRevoke. */
#include <limits.h>

#include "upcall.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, IN_PROGRESS = 7 };

typedef void *Comm;
typedef void *Stream;
typedef void *Window;
typedef struct {
    char internal[128];
} UniqueId;

/* The library itself. Words that it returns belong to whoever stands behind. */
MAKER(ncclGetVersion, get_version, int, (int *out), 0)

int ncclGetUniqueId(UniqueId *out);
int ncclGetUniqueId(UniqueId *out)
{
    const intptr_t none[] = {0};
    intptr_t made = 0;
    int status = upcall ? upcall("get_unique_id", none, 0, &made) : SUCCESS;
    if (status == SUCCESS && made)
        *out = *(const UniqueId *)made;
    return status;
}

static const char *words_of(const char *method, intptr_t of)
{
    intptr_t made = 0;
    if (upcall)
        upcall(method, &of, 1, &made);
    return made ? (const char *)made : "";
}

const char *ncclGetErrorString(int status);
const char *ncclGetErrorString(int status)
{
    return words_of("get_error_string", W(status));
}

const char *ncclGetLastError(Comm comm);
const char *ncclGetLastError(Comm comm)
{
    return words_of("get_last_error", W(comm));
}

/* The configuration of a communicator. Members are only ever added at its end: whoever calls says how long it is. */
struct config {
    size_t size;
    unsigned int magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode, numRmaCtx;
    int maxP2pPeers, graphStreamOrdering, launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode, nvlsHostMode;
};

static const unsigned int MAGIC = 0xcafebeef;
static const int UNDEFINED = INT_MIN;

/* The numbers among them, by nccl4py's names, and the NCCL that has them first: an older one ignores them, without a word. A new one
 * is a line. (The versions are those of parseCommConfig in init.cc of 2.30.7, whose structure ends with graphStreamOrdering.) */
static const struct config_field {
    const char *name;
    size_t offset;
    int since;
} config_fields[] = {
    {"blocking", offsetof(struct config, blocking), 21400},
    {"cga_cluster_size", offsetof(struct config, cgaClusterSize), 21700},
    {"min_ctas", offsetof(struct config, minCTAs), 21700},
    {"max_ctas", offsetof(struct config, maxCTAs), 21700},
    {"split_share", offsetof(struct config, splitShare), 21800},
    {"traffic_class", offsetof(struct config, trafficClass), 22500},
    {"collnet_enable", offsetof(struct config, collnetEnable), 22700},
    {"cta_policy", offsetof(struct config, CTAPolicy), 22700},
    {"shrink_share", offsetof(struct config, shrinkShare), 22700},
    {"nvls_ctas", offsetof(struct config, nvlsCTAs), 22700},
    {"n_channels_per_net_peer", offsetof(struct config, nChannelsPerNetPeer), 22800},
    {"nvlink_centric_sched", offsetof(struct config, nvlinkCentricSched), 22800},
    {"graph_usage_mode", offsetof(struct config, graphUsageMode), 22900},
    {"num_rma_ctx", offsetof(struct config, numRmaCtx), 22900},
    {"max_p2p_peers", offsetof(struct config, maxP2pPeers), 23000},
    {"graph_stream_ordering", offsetof(struct config, graphStreamOrdering), 23005},
    {"launch_order_implicit", offsetof(struct config, launchOrderImplicit), 23100},
    {"num_rma_sig", offsetof(struct config, numRmaSig), 23100},
    {"rma_eager_init", offsetof(struct config, rmaEagerInit), 23100},
    {"host_cft_mode", offsetof(struct config, hostCftMode), 23100},
    {"nvls_host_mode", offsetof(struct config, nvlsHostMode), 23100},
};

const struct config_field *describe_config(int *count, size_t *size);
const struct config_field *describe_config(int *count, size_t *size)
{
    *count = COUNT(config_fields);
    *size = sizeof(struct config);
    return config_fields;
}

/* As parseCommConfig of NCCL's init.cc: what is beyond the end of the caller's structure is as if it were not set. */
static int read_config(const struct config *given, int *numbers)
{
    if (!given || given->size < offsetof(struct config, blocking) || given->magic != MAGIC)
        return INVALID_ARGUMENT;
    for (int i = 0; i < COUNT(config_fields); i++) {
        size_t offset = config_fields[i].offset;
        int is_there = offset + sizeof(int) <= given->size;
        numbers[i] = is_there ? *(const int *)((const char *)given + offset) : UNDEFINED;
    }
    int blocking = numbers[0], cluster = numbers[1], least = numbers[2], most = numbers[3];
    if (blocking != UNDEFINED && blocking != 0 && blocking != 1)
        return INVALID_ARGUMENT;
    if (cluster != UNDEFINED && cluster < 0)
        return INVALID_ARGUMENT;
    if ((least != UNDEFINED && least <= 0) || (most != UNDEFINED && most <= 0) || least > most)
        return INVALID_ARGUMENT;
    return SUCCESS;
}

/* Communicators: how they begin and end, and how they are. */
int ncclCommInitRankConfig(Comm *out, int nranks, UniqueId id, int rank, const struct config *config);
int ncclCommInitRankConfig(Comm *out, int nranks, UniqueId id, int rank, const struct config *config)
{
    int numbers[COUNT(config_fields)];
    int status = read_config(config, numbers);
    const intptr_t words[] = {W(nranks), W(&id), W(rank), W(numbers)};
    intptr_t made = 1;
    if (status == SUCCESS && upcall)
        status = upcall("comm_init_rank_config", words, COUNT(words), &made);
    *out = status == SUCCESS || status == IN_PROGRESS ? (Comm)made : NULL;
    return status;
}

MAKER(ncclCommGetAsyncError, comm_get_async_error, int, (Comm comm, int *out), W(comm))
FUNCTION(ncclCommFinalize, comm_finalize, (Comm comm), W(comm))
FUNCTION(ncclCommDestroy, comm_destroy, (Comm comm), W(comm))
FUNCTION(ncclCommAbort, comm_abort, (Comm comm), W(comm))
FUNCTION(ncclCommRevoke, comm_revoke, (Comm comm, int flags), W(comm), W(flags))
MAKER(ncclCommCount, comm_count, int, (Comm comm, int *out), W(comm))
MAKER(ncclCommCuDevice, comm_cu_device, int, (Comm comm, int *out), W(comm))
MAKER(ncclCommUserRank, comm_user_rank, int, (Comm comm, int *out), W(comm))

/* Calls that are launched together. */
FUNCTION(ncclGroupStart, group_start, (void), 0)
FUNCTION(ncclGroupEnd, group_end, (void), 0)

/* Calls of all ranks. */
#define FROM_TO const void *from, void *to, size_t count, int type
#define ON Comm comm, Stream stream
FUNCTION(ncclAllReduce, all_reduce, (FROM_TO, int op, ON), W(from), W(to), W(count), W(type), W(op), W(comm), W(stream))
FUNCTION(ncclReduce, reduce, (FROM_TO, int op, int root, ON), W(from), W(to), W(count), W(type), W(op), W(root), W(comm), W(stream))
FUNCTION(ncclReduceScatter, reduce_scatter, (FROM_TO, int op, ON), W(from), W(to), W(count), W(type), W(op), W(comm), W(stream))
FUNCTION(ncclBroadcast, broadcast, (FROM_TO, int root, ON), W(from), W(to), W(count), W(type), W(root), W(comm), W(stream))
FUNCTION(ncclAllGather, all_gather, (FROM_TO, ON), W(from), W(to), W(count), W(type), W(comm), W(stream))
FUNCTION(ncclAlltoAll, allto_all, (FROM_TO, ON), W(from), W(to), W(count), W(type), W(comm), W(stream))
FUNCTION(ncclGather, gather, (FROM_TO, int root, ON), W(from), W(to), W(count), W(type), W(root), W(comm), W(stream))
FUNCTION(ncclScatter, scatter, (FROM_TO, int root, ON), W(from), W(to), W(count), W(type), W(root), W(comm), W(stream))

/* Messages between two ranks. */
FUNCTION(ncclSend, send, (const void *from, size_t count, int type, int peer, ON), W(from), W(count), W(type), W(peer), W(comm), W(stream))
FUNCTION(ncclRecv, recv, (void *to, size_t count, int type, int peer, ON), W(to), W(count), W(type), W(peer), W(comm), W(stream))

/* Reductions of one's own. */
MAKER(ncclRedOpCreatePreMulSum, red_op_create_pre_mul_sum, int, (int *out, void *scalar, int type, int residence, Comm comm), W(scalar), W(type), W(residence), W(comm))
FUNCTION(ncclRedOpDestroy, red_op_destroy, (int op, Comm comm), W(op), W(comm))

/* Memory that NCCL knows. */
MAKER(ncclMemAlloc, mem_alloc, void *, (void **out, size_t size), W(size))
FUNCTION(ncclMemFree, mem_free, (void *memory), W(memory))
MAKER(ncclCommRegister, comm_register, void *, (Comm comm, void *memory, size_t size, void **out), W(comm), W(memory), W(size))
FUNCTION(ncclCommDeregister, comm_deregister, (Comm comm, void *handle), W(comm), W(handle))
MAKER(ncclCommWindowRegister, comm_window_register, Window, (Comm comm, void *memory, size_t size, Window *out, int flags), W(comm), W(memory), W(size), W(flags))
FUNCTION(ncclCommWindowDeregister, comm_window_deregister, (Comm comm, Window window), W(comm), W(window))
