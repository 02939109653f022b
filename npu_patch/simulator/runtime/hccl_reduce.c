#include "hccl_reduce.h"

#include <stdint.h>
#include <string.h>

enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BFP16, TYPES = 18 };
static const size_t SIZES[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1};

size_t hccl_type_size(int type) { return type >= 0 && type < TYPES ? SIZES[type] : 0; }

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static float from_bfloat(uint16_t value) { return from_bits((uint32_t)value << 16); }
static uint16_t to_bfloat(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static float from_half(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, exponent = (value >> 10) & 31, fraction = value & 0x3ff;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction / 16777216.0f; /* subnormal: fraction * 2^-24 */
    return sign ? -small : small;
}
static uint16_t to_half(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to infinity */
    if (magnitude < 0x38800000) {                                   /* subnormal: let float addition round at 2^-24 */
        float rounded = from_bits(magnitude) + 0.5f;                /* ulp of 0.5 is 2^-24 */
        return (uint16_t)(sign | (to_bits(rounded) - to_bits(0.5f)));
    }
    uint32_t shifted = magnitude - 0x38000000;
    return (uint16_t)(sign | ((shifted + 0xfff + ((shifted >> 13) & 1)) >> 13));
}

#define APPLY(x, y) (op == 0 ? (x) + (y) : op == 1 ? (x) * (y) : op == 2 ? ((x) > (y) ? (x) : (y)) : ((x) < (y) ? (x) : (y)))
#define PLAIN(T)                                                                       \
    {                                                                                  \
        T *a = into;                                                                   \
        const T *b = with;                                                             \
        for (size_t i = 0; i < count; i++) a[i] = (T)APPLY(a[i], b[i]);                \
        return 0;                                                                      \
    }
#define SIXTEEN(FROM, TO)                                                              \
    {                                                                                  \
        uint16_t *a = into;                                                            \
        const uint16_t *b = with;                                                      \
        for (size_t i = 0; i < count; i++) {                                           \
            float x = FROM(a[i]), y = FROM(b[i]);                                      \
            a[i] = TO(APPLY(x, y));                                                    \
        }                                                                              \
        return 0;                                                                      \
    }

int hccl_reduce(void *into, const void *with, size_t count, int type, int op) {
    if (op < 0 || op > 3) return 1;
    switch (type) {
    case INT8: PLAIN(int8_t)
    case INT16: PLAIN(int16_t)
    case INT32: PLAIN(int32_t)
    case FP16: SIXTEEN(from_half, to_half)
    case FP32: PLAIN(float)
    case INT64: PLAIN(int64_t)
    case UINT64: PLAIN(uint64_t)
    case UINT8: PLAIN(uint8_t)
    case UINT16: PLAIN(uint16_t)
    case UINT32: PLAIN(uint32_t)
    case FP64: PLAIN(double)
    case BFP16: SIXTEEN(from_bfloat, to_bfloat)
    }
    return 1;
}
