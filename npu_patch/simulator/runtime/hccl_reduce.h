/* Element sizes and reductions of HCCL's data types. */
#ifndef NPU_PATCH_HCCL_REDUCE_H
#define NPU_PATCH_HCCL_REDUCE_H

#include <stddef.h>

/* Bytes of one element of an HcclDataType, 0 for an unknown one. */
size_t hccl_type_size(int type);

/* into[i] = into[i] OP with[i]; op is an HcclReduceOp (0 sum, 1 product, 2 max, 3 min). 16-bit floats are computed in
 * float32 and rounded after every rank. Returns non-zero for an unsupported type. */
int hccl_reduce(void *into, const void *with, size_t count, int type, int op);

#endif
