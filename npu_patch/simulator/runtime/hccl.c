/* A stand-in for libhccl.so: collectives between the processes of one machine, through one shared-memory segment per
 * communicator. Every call returns when its work is done, so two ranks that issue collectives of two groups in different
 * orders block each other, until the timeout.
 *
 * The segment's name starts with the process id of the rank that made it. Rank 0 removes the name as soon as every rank
 * has mapped it, so a crash later leaves nothing behind; a crash before that leaves a name which the next job sweeps.
 * A rank that waits checks that its peers are alive: a killed rank fails the others in seconds, a hanging one after
 * NPU_PATCH_HCCL_TIMEOUT seconds (default 120). */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "hccl.h"
#include "hccl_reduce.h"
#include "simulator.h"

#define PREFIX "/npu_patch_hccl."
#define PAGE ((size_t)4096)
#define SLOTS_BYTES ((size_t)8 << 20)   /* staging of all ranks together */
#define MAILBOX_BYTES ((size_t)1 << 20) /* all mailboxes into one rank together */

/* ---- waiting ---- */
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
static double timeout_seconds(void) {
    const char *value = getenv("NPU_PATCH_HCCL_TIMEOUT");
    double seconds = value ? atof(value) : 0;
    return seconds > 0 ? seconds : 120;
}
/* One turn of waiting. A dead peer is reported only on the check after the one that saw it, because what it did before it
 * died may be what we wait for. */
result_t hccl_wait_turn(wait_t *w, comm_t *c) {
    if (++w->turns < 200) {
        sched_yield();
        return OK;
    }
    usleep(w->turns < 2000 ? 20 : 200);
    if (w->turns % 64) return OK;
    double t = now();
    if (w->start == 0) w->start = w->checked = t;
    if (t - w->checked < 0.5) return OK;
    w->checked = t;
    if (w->dead) {
        fprintf(stderr, "[npu_patch simulator] HCCL rank %u: process %d of a peer has ended\n", c->rank, w->dead);
        npu_patch_set_error("simulator: HCCL rank %u: process %d of a peer has ended", c->rank, w->dead);
        return ERROR_SYSTEM;
    }
    for (uint32_t r = 0; r < c->ranks; r++) {
        int pid = atomic_load(&c->control->pids[r]);
        if (pid && kill(pid, 0) && errno == ESRCH) w->dead = pid;
    }
    if (t - w->start < timeout_seconds()) return OK;
    fprintf(stderr, "[npu_patch simulator] HCCL rank %u: a peer did not join within %g s\n", c->rank, timeout_seconds());
    npu_patch_set_error("simulator: HCCL rank %u: a peer did not join within %g s", c->rank, timeout_seconds());
    return ERROR_TIMEOUT;
}
result_t hccl_barrier(comm_t *c) {
    unsigned generation = atomic_load(&c->control->generation);
    if (atomic_fetch_add(&c->control->arrived, 1) + 1 == c->ranks) {
        atomic_store(&c->control->arrived, 0);
        atomic_fetch_add(&c->control->generation, 1);
        return OK;
    }
    wait_t w = {0};
    while (atomic_load(&c->control->generation) == generation) {
        result_t error = hccl_wait_turn(&w, c);
        if (error) return error;
    }
    return OK;
}
#define MEET(c) do { result_t error_ = hccl_barrier(c); if (error_) return error_; } while (0)

/* ---- communicators ---- */
typedef struct { char bytes[4108]; } root_info_t;

/* Removes names whose process is gone (a job that was killed while it started). */
static void sweep(void) {
    DIR *folder = opendir("/dev/shm");
    if (!folder) return;
    struct dirent *entry;
    while ((entry = readdir(folder))) {
        int pid;
        char name[300];
        if (strncmp(entry->d_name, &PREFIX[1], strlen(PREFIX) - 1)) continue;
        pid = atoi(entry->d_name + strlen(PREFIX) - 1);
        if (pid > 0 && kill(pid, 0) && errno == ESRCH) {
            snprintf(name, sizeof name, "/%s", entry->d_name);
            shm_unlink(name); /* fails for other users' segments, as it should */
        }
    }
    closedir(folder);
}
result_t HcclGetRootInfo(root_info_t *root) {
    static atomic_int serial;
    struct timespec t;
    sweep();
    clock_gettime(CLOCK_REALTIME, &t);
    memset(root, 0, sizeof *root);
    snprintf(root->bytes, 120, PREFIX "%d.%d.%ld%09ld", (int)getpid(), atomic_fetch_add(&serial, 1), (long)t.tv_sec, t.tv_nsec);
    return OK;
}
static result_t map_segment(comm_t *c) {
    size_t pairs = (size_t)c->ranks * c->ranks;
    size_t control = PAGE, boxes = (pairs * sizeof(mailbox_t) + PAGE - 1) / PAGE * PAGE;
    c->slot_bytes = SLOTS_BYTES / c->ranks / 64 * 64;
    c->mailbox_bytes = MAILBOX_BYTES / c->ranks / 64 * 64;
    c->size = control + boxes + c->ranks * c->slot_bytes + pairs * c->mailbox_bytes;
    int file = shm_open(c->name, O_CREAT | O_RDWR, 0600);
    if (file < 0) return ERROR_SYSTEM;
    /* Reserved now: a full /dev/shm is an error here and not a SIGBUS later. */
    int error = posix_fallocate(file, 0, (off_t)c->size);
    c->base = error ? MAP_FAILED : mmap(0, c->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->base == MAP_FAILED) {
        fprintf(stderr, "[npu_patch simulator] HCCL: no %zu bytes of shared memory: %s\n", c->size, strerror(error ? error : errno));
        npu_patch_set_error("simulator: HCCL needs %zu bytes of shared memory (/dev/shm) per communicator", c->size);
        return ERROR_SYSTEM;
    }
    c->control = (control_t *)c->base;
    c->mailboxes = (mailbox_t *)(c->base + control);
    c->slots = c->base + control + boxes;
    c->mail = c->slots + c->ranks * c->slot_bytes;
    atomic_store(&c->control->pids[c->rank], (int)getpid());
    return OK;
}
result_t HcclCommInitRootInfoConfig(uint32_t ranks, const root_info_t *root, uint32_t rank, void *config, comm_t **comm) {
    (void)config;
    if (ranks < 1 || ranks > MAX_RANKS || rank >= ranks) return ERROR_PARAMETER;
    comm_t *c = calloc(1, sizeof *c);
    c->ranks = ranks;
    c->rank = rank;
    snprintf(c->name, sizeof c->name, "%.127s", root->bytes);
    result_t error = map_segment(c);
    if (!error) error = hccl_barrier(c);
    if (rank == 0 || error) shm_unlink(c->name);
    if (error) return error;
    *comm = c;
    return OK;
}
result_t HcclCommInitRootInfo(uint32_t ranks, const root_info_t *root, uint32_t rank, comm_t **comm) {
    return HcclCommInitRootInfoConfig(ranks, root, rank, 0, comm);
}
result_t HcclCommDestroy(comm_t *c) {
    if (c) {
        munmap(c->base, c->size);
        free(c);
    }
    return OK;
}
result_t HcclGetCommAsyncError(comm_t *c, result_t *error) { (void)c; *error = OK; return OK; }
result_t HcclGetCommName(comm_t *c, char *name) { strcpy(name, c->name + 1); return OK; }
result_t HcclGetRankSize(comm_t *c, uint32_t *ranks) { *ranks = c->ranks; return OK; }
result_t HcclGetRankId(comm_t *c, uint32_t *rank) { *rank = c->rank; return OK; }
const char *HcclGetErrorString(result_t error) { return error ? "simulated HCCL error" : "no error"; }
uint32_t HcclGetCommConfigCapability(void) { return 1; }
result_t HcclSetConfig(int key, int value) { (void)key; (void)value; return OK; }
result_t HcclBarrier(comm_t *c, stream_t s) { (void)s; return hccl_barrier(c); }

/* ---- collectives: every rank stages a piece in its slot, all meet, every rank reads what it needs, all meet again ---- */
#define SLOT(c, r) ((c)->slots + (size_t)(r) * (c)->slot_bytes)

result_t HcclAllReduce(const void *in, void *out, uint64_t count, int type, int op, comm_t *c, stream_t s) {
    (void)s;
    size_t width = hccl_type_size(type);
    if (!width) return ERROR_UNSUPPORTED;
    size_t piece = c->slot_bytes / width;
    for (size_t at = 0; at < count; at += piece) {
        size_t n = smaller(count - at, piece);
        memcpy(SLOT(c, c->rank), (const char *)in + at * width, n * width);
        MEET(c);
        char *to = (char *)out + at * width;
        memcpy(to, SLOT(c, 0), n * width);
        for (uint32_t r = 1; r < c->ranks; r++)
            if (hccl_reduce(to, SLOT(c, r), n, type, op)) return ERROR_UNSUPPORTED;
        MEET(c);
    }
    return count ? OK : hccl_barrier(c);
}
result_t HcclReduce(const void *in, void *out, uint64_t count, int type, int op, uint32_t root, comm_t *c, stream_t s) {
    if (c->rank == root) return HcclAllReduce(in, out, count, type, op, c, s);
    void *unused = malloc(count * hccl_type_size(type) + 1);
    result_t error = HcclAllReduce(in, unused, count, type, op, c, s);
    free(unused);
    return error;
}
result_t HcclBroadcast(void *data, uint64_t count, int type, uint32_t root, comm_t *c, stream_t s) {
    (void)s;
    size_t total = count * hccl_type_size(type);
    for (size_t at = 0; at < total; at += c->slot_bytes) {
        size_t n = smaller(total - at, c->slot_bytes);
        if (c->rank == root) memcpy(SLOT(c, root), (char *)data + at, n);
        MEET(c);
        if (c->rank != root) memcpy((char *)data + at, SLOT(c, root), n);
        MEET(c);
    }
    return OK;
}
result_t HcclAllGather(const void *in, void *out, uint64_t count, int type, comm_t *c, stream_t s) {
    (void)s;
    size_t total = count * hccl_type_size(type);
    for (size_t at = 0; at < total; at += c->slot_bytes) {
        size_t n = smaller(total - at, c->slot_bytes);
        memcpy(SLOT(c, c->rank), (const char *)in + at, n);
        MEET(c);
        for (uint32_t r = 0; r < c->ranks; r++) memcpy((char *)out + r * total + at, SLOT(c, r), n);
        MEET(c);
    }
    return OK;
}
result_t HcclReduceScatter(const void *in, void *out, uint64_t count, int type, int op, comm_t *c, stream_t s) {
    (void)s;
    size_t width = hccl_type_size(type);
    if (!width) return ERROR_UNSUPPORTED;
    size_t piece = c->slot_bytes / c->ranks / width;
    for (size_t at = 0; at < count; at += piece) {
        size_t n = smaller(count - at, piece);
        for (uint32_t r = 0; r < c->ranks; r++)
            memcpy(SLOT(c, c->rank) + r * piece * width, (const char *)in + (r * count + at) * width, n * width);
        MEET(c);
        char *to = (char *)out + at * width;
        memcpy(to, SLOT(c, 0) + c->rank * piece * width, n * width);
        for (uint32_t r = 1; r < c->ranks; r++)
            if (hccl_reduce(to, SLOT(c, r) + c->rank * piece * width, n, type, op)) return ERROR_UNSUPPORTED;
        MEET(c);
    }
    return OK;
}
