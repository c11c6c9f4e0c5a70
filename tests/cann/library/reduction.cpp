// See reduction.h.
#include "reduction.h"

#include <algorithm>
#include <cstring>

namespace fake {

namespace {

struct Bfloat {
  uint16_t bits;
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  Bfloat &operator=(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = value != value ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    return *this;
  }
};

template <class Number, class Wide = Number>
bool reduce_as(char *into, const char *from, uint64_t count, HcclReduceOp op) {
  auto *left = reinterpret_cast<Number *>(into);
  auto *right = reinterpret_cast<const Number *>(from);
  for (uint64_t index = 0; index < count; index++) {
    Wide a = left[index], b = right[index];
    switch (op) {
      case HCCL_REDUCE_SUM: a = a + b; break;
      case HCCL_REDUCE_PROD: a = a * b; break;
      case HCCL_REDUCE_MAX: a = std::max(a, b); break;
      case HCCL_REDUCE_MIN: a = std::min(a, b); break;
      default: return false;
    }
    left[index] = a;
  }
  return true;
}

}  // namespace

uint64_t size_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
    case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT128: return 16;
    default: return 1;
  }
}

bool reduce(char *into, const char *from, uint64_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce_as<int32_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT64: return reduce_as<int64_t>(into, from, count, op);
    case HCCL_DATA_TYPE_FP32: return reduce_as<float>(into, from, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce_as<_Float16, float>(into, from, count, op);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<Bfloat, float>(into, from, count, op);
    default: return false;  // as the header of HCCL says: no unsigned numbers, no doubles
  }
}

}  // namespace fake
