// Tensors, and the few operators that torch-npu uses itself: fill, copy between tensors, and pad (before it gathers).
// All others are torch's own, on the CPU (operators.py).
#include "device.h"

#include <cmath>
#include <cstring>
#include <vector>

struct aclTensor;  // which no header of torch-npu declares
struct aclScalar;
struct aclIntArray;

namespace {

struct Tensor {
  std::vector<int64_t> sizes, strides;
  aclDataType type;
  char *data;
  int64_t offset;

  int64_t count() const {
    int64_t all = 1;
    for (int64_t size : sizes) all *= size;
    return all;
  }
  // Where the element is that comes `index`th when all are counted row by row.
  int64_t place(int64_t index) const {
    int64_t found = offset;
    for (size_t axis = sizes.size(); axis-- > 0;) {
      found += index % sizes[axis] * strides[axis];
      index /= sizes[axis];
    }
    return found;
  }
};

struct Executor {
  Tensor to, from;
  double value;
  std::vector<int64_t> pads;  // before and after, the last axis first
};

size_t size_of(aclDataType type) {
  switch (type) {
    case ACL_DOUBLE: case ACL_INT64: case ACL_UINT64: case ACL_COMPLEX64: return 8;
    case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
    case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
    case ACL_COMPLEX128: return 16;
    default: return 1;
  }
}

float from_bfloat(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

double get(const Tensor &tensor, int64_t place) {
  const char *at = tensor.data + place * static_cast<int64_t>(size_of(tensor.type));
  switch (tensor.type) {
    case ACL_FLOAT: return *reinterpret_cast<const float *>(at);
    case ACL_DOUBLE: return *reinterpret_cast<const double *>(at);
    case ACL_FLOAT16: return static_cast<float>(*reinterpret_cast<const _Float16 *>(at));
    case ACL_BF16: return from_bfloat(*reinterpret_cast<const uint16_t *>(at));
    case ACL_INT64: return static_cast<double>(*reinterpret_cast<const int64_t *>(at));
    case ACL_INT32: return *reinterpret_cast<const int32_t *>(at);
    case ACL_INT16: return *reinterpret_cast<const int16_t *>(at);
    case ACL_INT8: return *reinterpret_cast<const int8_t *>(at);
    default: return *reinterpret_cast<const uint8_t *>(at);
  }
}

void put(const Tensor &tensor, int64_t place, double value) {
  char *at = tensor.data + place * static_cast<int64_t>(size_of(tensor.type));
  switch (tensor.type) {
    case ACL_FLOAT: *reinterpret_cast<float *>(at) = static_cast<float>(value); break;
    case ACL_DOUBLE: *reinterpret_cast<double *>(at) = value; break;
    case ACL_FLOAT16: *reinterpret_cast<_Float16 *>(at) = static_cast<_Float16>(static_cast<float>(value)); break;
    case ACL_BF16: *reinterpret_cast<uint16_t *>(at) = to_bfloat(static_cast<float>(value)); break;
    case ACL_INT64: *reinterpret_cast<int64_t *>(at) = static_cast<int64_t>(value); break;
    case ACL_INT32: *reinterpret_cast<int32_t *>(at) = static_cast<int32_t>(value); break;
    case ACL_INT16: *reinterpret_cast<int16_t *>(at) = static_cast<int16_t>(value); break;
    case ACL_INT8: *reinterpret_cast<int8_t *>(at) = static_cast<int8_t>(value); break;
    case ACL_BOOL: *reinterpret_cast<uint8_t *>(at) = value != 0; break;
    default: *reinterpret_cast<uint8_t *>(at) = static_cast<uint8_t>(value); break;
  }
}

void fill(const Executor &order) {
  for (int64_t index = 0, all = order.to.count(); index < all; index++) put(order.to, order.to.place(index), order.value);
}

void copy(const Executor &order) {
  const Tensor &to = order.to, &from = order.from;
  size_t bytes = size_of(to.type);
  int64_t all = to.count(), given = from.count();
  for (int64_t index = 0; index < all; index++) {
    int64_t source = from.place(given == 1 ? 0 : index), target = to.place(index);
    if (to.type == from.type) {
      std::memcpy(to.data + target * bytes, from.data + source * bytes, bytes);
    } else {
      put(to, target, get(from, source));
    }
  }
}

void pad(const Executor &order) {
  fill(order);
  const Tensor &from = order.from, &to = order.to;
  for (int64_t index = 0, all = from.count(); index < all; index++) {
    int64_t left = index, target = to.offset;
    bool inside = true;
    for (size_t axis = from.sizes.size(); axis-- > 0;) {
      size_t pair = 2 * (from.sizes.size() - 1 - axis);
      int64_t place = left % from.sizes[axis] + (pair < order.pads.size() ? order.pads[pair] : 0);
      left /= from.sizes[axis];
      inside = inside && place >= 0 && place < to.sizes[axis];
      target += place * to.strides[axis];
    }
    if (inside) put(to, target, get(from, from.place(index)));
  }
}

// Queue an operator, which may fail instead, as a test wants it.
int queue(Executor *order, void (*run)(const Executor &), aclrtStream stream) {
  Executor own = *order;
  delete order;
  if (int code = fake::next_call_fault()) return fake::fail(code, "EZ9999: the operator was refused.");
  return fake::enqueue(stream, [own, run](uint64_t) {
    aclError fault = fake::next_fault();
    if (fault == ACL_SUCCESS) run(own);
    return fault;
  });
}

int fill_order(const aclTensor *tensor, double value, uint64_t *workspace, void **executor) {
  *workspace = 0;
  *executor = new Executor{*reinterpret_cast<const Tensor *>(tensor), {}, value, {}};
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t axes, aclDataType type, const int64_t *strides, int64_t offset,
                           aclFormat, const int64_t *, uint64_t, void *data) {
  auto *made = new Tensor{{sizes, sizes + axes}, {}, type, static_cast<char *>(data), offset};
  if (strides != nullptr) made->strides.assign(strides, strides + axes);
  return reinterpret_cast<aclTensor *>(made);
}

int aclDestroyTensor(const aclTensor *tensor) {
  delete reinterpret_cast<const Tensor *>(tensor);
  return ACL_SUCCESS;
}

aclScalar *aclCreateScalar(void *value, aclDataType type) {
  Tensor one{{}, {}, type, static_cast<char *>(value), 0};
  return reinterpret_cast<aclScalar *>(new double(get(one, 0)));
}

int aclDestroyScalar(const aclScalar *scalar) {
  delete reinterpret_cast<const double *>(scalar);
  return ACL_SUCCESS;
}

aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t count) {
  return reinterpret_cast<aclIntArray *>(new std::vector<int64_t>(values, values + count));
}

int aclDestroyIntArray(const aclIntArray *array) {
  delete reinterpret_cast<const std::vector<int64_t> *>(array);
  return ACL_SUCCESS;
}

int aclnnInplaceOneGetWorkspaceSize(const aclTensor *tensor, uint64_t *workspace, void **executor) {
  return fill_order(tensor, 1, workspace, executor);
}
int aclnnInplaceZeroGetWorkspaceSize(const aclTensor *tensor, uint64_t *workspace, void **executor) {
  return fill_order(tensor, 0, workspace, executor);
}
int aclnnInplaceFillScalarGetWorkspaceSize(const aclTensor *tensor, const aclScalar *value, uint64_t *workspace,
                                           void **executor) {
  return fill_order(tensor, *reinterpret_cast<const double *>(value), workspace, executor);
}
int aclnnInplaceCopyGetWorkspaceSize(const aclTensor *to, const aclTensor *from, uint64_t *workspace, void **executor) {
  *workspace = 0;
  *executor = new Executor{*reinterpret_cast<const Tensor *>(to), *reinterpret_cast<const Tensor *>(from), 0, {}};
  return ACL_SUCCESS;
}
// A copy into another type: torch-npu 2.6.0 asks for it by this name.
int aclnnCastGetWorkspaceSize(const aclTensor *from, aclDataType, aclTensor *to, uint64_t *workspace, void **executor) {
  return aclnnInplaceCopyGetWorkspaceSize(to, from, workspace, executor);
}

int aclnnConstantPadNdGetWorkspaceSize(const aclTensor *from, const aclIntArray *pads, const aclScalar *value, aclTensor *to,
                                       uint64_t *workspace, void **executor) {
  *workspace = 0;
  *executor = new Executor{*reinterpret_cast<const Tensor *>(to), *reinterpret_cast<const Tensor *>(from),
                           *reinterpret_cast<const double *>(value),
                           *reinterpret_cast<const std::vector<int64_t> *>(pads)};
  return ACL_SUCCESS;
}

int aclnnInplaceOne(void *, uint64_t, void *executor, aclrtStream stream) {
  return queue(static_cast<Executor *>(executor), fill, stream);
}
int aclnnInplaceZero(void *, uint64_t, void *executor, aclrtStream stream) {
  return queue(static_cast<Executor *>(executor), fill, stream);
}
int aclnnInplaceFillScalar(void *, uint64_t, void *executor, aclrtStream stream) {
  return queue(static_cast<Executor *>(executor), fill, stream);
}
int aclnnConstantPadNd(void *, uint64_t, void *executor, aclrtStream stream) {
  return queue(static_cast<Executor *>(executor), pad, stream);
}
int aclnnInplaceCopy(void *, uint64_t, void *executor, aclrtStream stream) {
  return queue(static_cast<Executor *>(executor), copy, stream);
}

int aclnnCast(void *, uint64_t, void *executor, aclrtStream stream) {
  return queue(static_cast<Executor *>(executor), copy, stream);
}

}  // extern "C"
