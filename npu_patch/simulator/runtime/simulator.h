/* What the parts of the stand-in Ascend runtime share, and what Python calls by ctypes. */
#ifndef NPU_PATCH_SIMULATOR_H
#define NPU_PATCH_SIMULATOR_H

#define NPU_PATCH_MAX_DEVICES 16

/* Logs one line to stderr when NPU_PATCH_SIM_LOG=1. */
void npu_patch_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Remembers why the next failing call fails; torch_npu adds aclGetRecentErrMsg() to the error it raises. Per thread. */
void npu_patch_set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- called from Python ---- */

/* How many devices there are and their SoC name. To be called before torch_npu asks. */
int npu_patch_configure(int devices, const char *soc_name);

/* While a thread's host-check depth is above zero its aclnn calls answer "done" and compute nothing, so that torch_npu's
 * own argument checks and output allocation run. At depth zero every aclnn call is an error: nothing without a simulated
 * kernel can pass silently. Per thread, because autograd runs backward kernels on its own threads. */
void npu_patch_host_check_begin(void);
void npu_patch_host_check_end(void);

#endif
