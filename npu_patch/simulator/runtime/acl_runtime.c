/* A stand-in for the runtime half of libascendcl.so: devices, memory, streams and events in host memory.
 * Device memory is host memory; every copy is synchronous; streams and events are opaque handles that are never null
 * (torch_npu rejects a null stream). Only what torch_npu needs to run is here; build.py answers 0 for every other symbol. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl/acl.h"
#include "simulator.h"

/* ---- logging and errors ---- */
void npu_patch_log(const char *format, ...) {
    static int enabled = -1;
    if (enabled < 0) {
        const char *value = getenv("NPU_PATCH_SIM_LOG");
        enabled = value && *value == '1';
    }
    if (!enabled) return;
    va_list args;
    va_start(args, format);
    fputs("[npu_patch simulator] ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

static __thread char last_error[512];
void npu_patch_set_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
}
const char *aclGetRecentErrMsg(void) {
    static __thread char reported[sizeof last_error];
    memcpy(reported, last_error, sizeof reported);
    last_error[0] = 0;
    return reported;
}

/* ---- devices: the current device and context belong to the thread, as on hardware ---- */
static int device_count = 1;
static char soc_name[64] = "Ascend910B1";
static char contexts[NPU_PATCH_MAX_DEVICES];
static __thread int current_device = -1;
static __thread void *current_context;

int npu_patch_configure(int devices, const char *name) {
    if (devices < 1 || devices > NPU_PATCH_MAX_DEVICES || strlen(name) >= sizeof soc_name) return 1;
    device_count = devices;
    strcpy(soc_name, name);
    return 0;
}
static int device_or_zero(void) { return current_device < 0 ? 0 : current_device; }

aclError aclInit(const char *config) { (void)config; return ACL_SUCCESS; }
aclError aclFinalize(void) { return ACL_SUCCESS; }
aclError aclrtGetDeviceCount(uint32_t *count) { *count = (uint32_t)device_count; return ACL_SUCCESS; }
aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count) {
        npu_patch_set_error("simulator: there are %d devices, device %d does not exist", device_count, device);
        return 107001; /* ACL_ERROR_RT_INVALID_DEVICEID */
    }
    current_device = device;
    current_context = &contexts[device];
    return ACL_SUCCESS;
}
/* A thread that has set no device has no context: torch_npu then sets one. */
aclError aclrtGetDevice(int32_t *device) {
    if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current_device;
    return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t device) { (void)device; return ACL_SUCCESS; }
aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (!current_context) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = current_context;
    return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
    current_context = context;
    current_device = (int)((char *)context - contexts);
    return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    (void)device;
    if (flags) *flags = 0;
    if (active) *active = 1;
    return ACL_SUCCESS;
}
const char *aclrtGetSocName(void) { return soc_name; }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { (void)a; (void)b; *can = 1; return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t *pid) { *pid = 1; return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
    if (actual) *actual = timeout;
    return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) { (void)attribute; *value = 1; return ACL_SUCCESS; }
/* Core counts and memory of a 910B; nothing here computes with them. */
aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    (void)device;
    *value = info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 48 : info == ACL_DEVICE_INFO_AI_CORE_NUM ? 24 : 192 << 20;
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    (void)device; (void)attribute;
    *value = 24;
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) {
    (void)device;
    *value = type ? 48 : 24;
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *info) {
    (void)device;
    memset(info, 0, sizeof *info);
    return ACL_SUCCESS;
}

/* ---- memory: a header before each block remembers size and device, so that free memory is consistent ---- */
#define ALIGNMENT 512
static const size_t DEVICE_BYTES = (size_t)64 << 30;
static size_t used_bytes[NPU_PATCH_MAX_DEVICES];
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
typedef struct { size_t size; int device; } header_t;

static aclError allocate(void **pointer, size_t size) {
    char *block;
    int device = device_or_zero();
    size_t total = (size + ALIGNMENT + 32 + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    pthread_mutex_lock(&memory_lock);
    int full = size > DEVICE_BYTES - used_bytes[device];
    if (!full) used_bytes[device] += size;
    pthread_mutex_unlock(&memory_lock);
    if (full) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    if (posix_memalign((void **)&block, ALIGNMENT, total)) {
        pthread_mutex_lock(&memory_lock);
        used_bytes[device] -= size;
        pthread_mutex_unlock(&memory_lock);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    header_t *header = (header_t *)block;
    header->size = size;
    header->device = device;
    *pointer = block + ALIGNMENT;
    npu_patch_log("malloc %zu", size);
    return ACL_SUCCESS;
}
aclError aclrtMalloc(void **p, size_t size, aclrtMemMallocPolicy policy) { (void)policy; return allocate(p, size); }
aclError aclrtMallocAlign32(void **p, size_t size, aclrtMemMallocPolicy policy) { (void)policy; return allocate(p, size); }
aclError aclrtFree(void *pointer) {
    if (!pointer) return ACL_SUCCESS;
    header_t *header = (header_t *)((char *)pointer - ALIGNMENT);
    pthread_mutex_lock(&memory_lock);
    used_bytes[header->device] -= header->size;
    pthread_mutex_unlock(&memory_lock);
    free(header);
    return ACL_SUCCESS;
}
aclError aclrtMallocHost(void **p, size_t size) {
    return posix_memalign(p, 64, size ? size : 64) ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}
aclError aclrtFreeHost(void *p) { free(p); return ACL_SUCCESS; }
aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total) {
    (void)attribute;
    *total = DEVICE_BYTES;
    *available = DEVICE_BYTES - used_bytes[device_or_zero()];
    return ACL_SUCCESS;
}
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    (void)kind;
    if (size > room) return ACL_ERROR_INVALID_PARAM;
    memmove(to, from, size);
    return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, size, kind);
}
aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    if (size > room) return ACL_ERROR_INVALID_PARAM;
    memset(to, value, size);
    return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, aclrtStream stream) {
    (void)stream;
    return aclrtMemset(to, room, value, size);
}

/* ---- streams and events: all work is done when a call returns ---- */
typedef struct { uint64_t nanoseconds; } handle_t;
static void *new_handle(void) { return calloc(1, 256); }
static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
aclError aclrtCreateStream(aclrtStream *stream) { *stream = new_handle(); return ACL_SUCCESS; }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    (void)priority; (void)flag;
    *stream = new_handle();
    return ACL_SUCCESS;
}
aclError aclrtDestroyStream(aclrtStream stream) { free(stream); return ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream stream) { free(stream); return ACL_SUCCESS; }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    (void)stream;
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = (int32_t)((uintptr_t)stream >> 8);
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { (void)flag; *event = new_handle(); return ACL_SUCCESS; }
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) { (void)flag; *event = new_handle(); return ACL_SUCCESS; }
aclError aclrtDestroyEvent(aclrtEvent event) { free(event); return ACL_SUCCESS; }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    (void)stream;
    ((handle_t *)event)->nanoseconds = now_ns();
    return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    (void)event;
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    *milliseconds = (float)(((handle_t *)end)->nanoseconds - ((handle_t *)start)->nanoseconds) / 1e6f;
    return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
    *microseconds = ((handle_t *)event)->nanoseconds / 1000;
    return ACL_SUCCESS;
}
aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType block, aclrtStream stream) {
    (void)block; (void)stream;
    function(data);
    return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *data) {
    (void)stream;
    function(data);
    return ACL_SUCCESS;
}
aclError aclrtProcessReport(int32_t timeout) { /* called in a loop by torch_npu's callback thread: do not spin */
    struct timespec pause = {0, 1000000};
    (void)timeout;
    nanosleep(&pause, 0);
    return ACL_SUCCESS;
}
