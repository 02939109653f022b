/* The point-to-point half of the stand-in libhccl, and the collectives made of it: every ordered pair of ranks has one
 * mailbox, and a list of sends and receives is driven forward together, so that no order of them blocks. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "hccl.h"
#include "hccl_reduce.h"
#include "simulator.h"

typedef struct { int sending; char *data; size_t left; uint32_t peer; int done; } transfer_t;

static int is_first(const transfer_t *list, int index) { /* transfers of one pair in one direction stay in order */
    for (int i = 0; i < index; i++)
        if (!list[i].done && list[i].sending == list[index].sending && list[i].peer == list[index].peer) return 0;
    return 1;
}
static result_t move_once(comm_t *c, transfer_t *t, int *moved) {
    uint32_t from = t->sending ? c->rank : t->peer, to = t->sending ? t->peer : c->rank;
    mailbox_t *box = &c->mailboxes[from * c->ranks + to];
    char *mail = c->mail + ((size_t)from * c->ranks + to) * c->mailbox_bytes;
    if ((atomic_load(&box->full) != 0) == t->sending) return OK;
    size_t n = t->sending ? smaller(t->left, c->mailbox_bytes) : box->length;
    if (n > t->left) {
        npu_patch_set_error("simulator: HCCL rank %u received %zu bytes from rank %u, expected %zu", c->rank, n, t->peer, t->left);
        return ERROR_PARAMETER;
    }
    if (t->sending) {
        memcpy(mail, t->data, n);
        box->length = n;
    } else {
        memcpy(t->data, mail, n);
    }
    atomic_store(&box->full, (unsigned)t->sending);
    t->data += n;
    t->left -= n;
    *moved = 1;
    return OK;
}
static result_t drive(comm_t *c, transfer_t *list, int count) {
    int open = 0;
    for (int i = 0; i < count; i++) {
        if (list[i].peer >= c->ranks) return ERROR_PARAMETER;
        list[i].done = list[i].left == 0;
        open += !list[i].done;
    }
    wait_t w = {0};
    while (open) {
        int moved = 0;
        for (int i = 0; i < count; i++) {
            if (list[i].done || !is_first(list, i)) continue;
            result_t error = move_once(c, &list[i], &moved);
            if (error) return error;
            if (!list[i].left) {
                list[i].done = 1;
                open--;
            }
        }
        if (moved) {
            memset(&w, 0, sizeof w);
            continue;
        }
        result_t error = open ? hccl_wait_turn(&w, c) : OK;
        if (error) return error;
    }
    return OK;
}
result_t HcclSend(void *data, uint64_t count, int type, uint32_t to, comm_t *c, stream_t s) {
    (void)s;
    transfer_t t = {1, data, count * hccl_type_size(type), to, 0};
    return drive(c, &t, 1);
}
result_t HcclRecv(void *data, uint64_t count, int type, uint32_t from, comm_t *c, stream_t s) {
    (void)s;
    transfer_t t = {0, data, count * hccl_type_size(type), from, 0};
    return drive(c, &t, 1);
}
typedef struct { int type; void *data; uint64_t count; int data_type; uint32_t peer; } send_receive_t;
result_t HcclBatchSendRecv(send_receive_t *items, uint32_t count, comm_t *c, stream_t s) {
    (void)s;
    transfer_t *list = calloc(count, sizeof *list);
    for (uint32_t i = 0; i < count; i++)
        list[i] = (transfer_t){items[i].type == 0, items[i].data, items[i].count * hccl_type_size(items[i].data_type), items[i].peer, 0};
    result_t error = drive(c, list, (int)count);
    free(list);
    return error;
}

/* counts and offsets are in elements of `width` bytes */
static result_t exchange(comm_t *c, const char *in, const uint64_t *send_count, const uint64_t *send_at, size_t in_width, char *out,
                         const uint64_t *recv_count, const uint64_t *recv_at, size_t out_width) {
    transfer_t *list = calloc(2 * c->ranks, sizeof *list);
    int n = 0;
    for (uint32_t r = 0; r < c->ranks; r++) {
        const char *from = in + send_at[r] * in_width;
        char *to = out + recv_at[r] * out_width;
        if (r == c->rank) {
            memmove(to, from, recv_count[r] * out_width);
            continue;
        }
        list[n++] = (transfer_t){1, (char *)from, send_count[r] * in_width, r, 0};
        list[n++] = (transfer_t){0, to, recv_count[r] * out_width, r, 0};
    }
    result_t error = drive(c, list, n);
    free(list);
    return error ? error : hccl_barrier(c);
}
result_t HcclAlltoAllV(const void *in, const void *send_count, const void *send_at, int in_type, void *out, const void *recv_count,
                       const void *recv_at, int out_type, comm_t *c, stream_t s) {
    (void)s;
    return exchange(c, in, send_count, send_at, hccl_type_size(in_type), out, recv_count, recv_at, hccl_type_size(out_type));
}
result_t HcclAlltoAll(const void *in, uint64_t send_count, int in_type, void *out, uint64_t recv_count, int out_type, comm_t *c,
                      stream_t s) {
    (void)s;
    uint64_t sc[MAX_RANKS], sa[MAX_RANKS], rc[MAX_RANKS], ra[MAX_RANKS];
    for (uint32_t r = 0; r < c->ranks; r++) {
        sc[r] = send_count;
        sa[r] = send_count * r;
        rc[r] = recv_count;
        ra[r] = recv_count * r;
    }
    return exchange(c, in, sc, sa, hccl_type_size(in_type), out, rc, ra, hccl_type_size(out_type));
}
result_t HcclScatter(void *in, void *out, uint64_t count, int type, uint32_t root, comm_t *c, stream_t s) {
    (void)s;
    uint64_t sc[MAX_RANKS], sa[MAX_RANKS], rc[MAX_RANKS], ra[MAX_RANKS];
    int sending = c->rank == root;
    for (uint32_t r = 0; r < c->ranks; r++) {
        sc[r] = sending ? count : 0;
        sa[r] = sending ? count * r : 0;
        rc[r] = r == root ? count : 0;
        ra[r] = 0;
    }
    return exchange(c, in, sc, sa, hccl_type_size(type), out, rc, ra, hccl_type_size(type));
}
result_t HcclAllGatherV(void *in, uint64_t count, void *out, const void *recv_count, const void *recv_at, int type, comm_t *c,
                        stream_t s) {
    (void)s;
    uint64_t sc[MAX_RANKS], sa[MAX_RANKS];
    for (uint32_t r = 0; r < c->ranks; r++) {
        sc[r] = count;
        sa[r] = 0;
    }
    return exchange(c, in, sc, sa, hccl_type_size(type), out, recv_count, recv_at, hccl_type_size(type));
}
