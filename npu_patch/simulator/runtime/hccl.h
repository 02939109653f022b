/* What the two halves of the stand-in libhccl share: communicators, and waiting for peers. */
#ifndef NPU_PATCH_HCCL_H
#define NPU_PATCH_HCCL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef int result_t;
typedef void *stream_t;
enum { OK = 0, ERROR_PARAMETER = 1, ERROR_UNSUPPORTED = 5, ERROR_SYSTEM = 8, ERROR_TIMEOUT = 9 };

#define MAX_RANKS 64

typedef struct { atomic_uint full; uint32_t unused; uint64_t length; char padding[48]; } mailbox_t;
typedef struct { atomic_uint arrived, generation; char padding[56]; atomic_int pids[MAX_RANKS]; } control_t;
typedef struct {
    uint32_t ranks, rank;
    char name[128];
    size_t size, slot_bytes, mailbox_bytes;
    char *base, *slots, *mail;
    control_t *control;
    mailbox_t *mailboxes;
} comm_t;

/* Zero at the start of every wait. */
typedef struct { unsigned turns; double start, checked; int dead; } wait_t;

/* One turn of waiting for a peer; an error when a peer has ended or the timeout is over. */
result_t hccl_wait_turn(wait_t *w, comm_t *c);

/* Returns when every rank of the communicator has called it as often. */
result_t hccl_barrier(comm_t *c);

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

#endif
