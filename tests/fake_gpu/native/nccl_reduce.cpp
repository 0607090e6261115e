// NCCL's reductions, in the order of the ranks; 16-bit types are added in fp32, as NCCL does.
#include <cstring>
#include <mutex>
#include <vector>

#include "nccl_standin.h"

namespace {

// bf16 is the upper half of an fp32, rounded to the nearest even number.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  BFloat16(float value) {
    uint32_t whole;
    memcpy(&whole, &value, sizeof whole);
    uint32_t rounding = 0x7fff + ((whole >> 16) & 1);
    bits = (uint16_t)((whole + rounding) >> 16);
  }
  operator float() const {
    uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, sizeof value);
    return value;
  }
};

// The type in which elements of a type are added up.
template <class Element>
struct Wide {
  using type = Element;
};
template <>
struct Wide<BFloat16> {
  using type = float;
};
template <>
struct Wide<_Float16> {
  using type = float;
};

// ncclRedOpCreatePreMulSum makes operations beyond those of NCCL: a sum times a factor.
std::mutex factors_mutex;
std::vector<double>& factors() {
  static auto* factors = new std::vector<double>;
  return *factors;
}

template <class T>
T combine(T left, T right, ncclRedOp_t operation) {
  switch (operation) {
    case ncclMax:
      return left > right ? left : right;
    case ncclMin:
      return left < right ? left : right;
    case ncclProd:
      return left * right;
    default:
      return left + right;
  }
}

template <class Element>
void reduce_as(
    void* result, const standin::Communicator& communicator, size_t offset, size_t count,
    ncclRedOp_t operation, double factor) {
  using T = typename Wide<Element>::type;
  for (size_t index = 0; index < count; index++) {
    T value = (T)((Element*)(communicator.arena(0) + offset))[index];
    for (int rank = 1; rank < communicator.size; rank++) {
      T other = (T)((Element*)(communicator.arena(rank) + offset))[index];
      value = combine(value, other, operation);
    }
    if (operation == ncclAvg) value = value / (T)communicator.size;
    if (factor != 1.0) value = (T)(value * factor);
    ((Element*)result)[index] = (Element)value;
  }
}

}  // namespace

namespace standin {

size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

void reduce(
    void* result, const Communicator& communicator, size_t offset, size_t count, ncclDataType_t type,
    ncclRedOp_t operation) {
  double factor = 1.0;
  if (operation >= ncclNumOps) {
    std::lock_guard<std::mutex> guard(factors_mutex);
    factor = factors()[operation - ncclNumOps];
    operation = ncclSum;
  }
  switch (type) {
    case ncclFloat32:
      return reduce_as<float>(result, communicator, offset, count, operation, factor);
    case ncclFloat64:
      return reduce_as<double>(result, communicator, offset, count, operation, factor);
    case ncclFloat16:
      return reduce_as<_Float16>(result, communicator, offset, count, operation, factor);
    case ncclBfloat16:
      return reduce_as<BFloat16>(result, communicator, offset, count, operation, factor);
    case ncclInt8:
      return reduce_as<int8_t>(result, communicator, offset, count, operation, factor);
    case ncclUint8:
      return reduce_as<uint8_t>(result, communicator, offset, count, operation, factor);
    case ncclInt32:
      return reduce_as<int32_t>(result, communicator, offset, count, operation, factor);
    case ncclUint32:
      return reduce_as<uint32_t>(result, communicator, offset, count, operation, factor);
    case ncclInt64:
      return reduce_as<int64_t>(result, communicator, offset, count, operation, factor);
    case ncclUint64:
      return reduce_as<uint64_t>(result, communicator, offset, count, operation, factor);
    default:
      return;
  }
}

}  // namespace standin

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* operation, void* scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t) {
  double factor = 1.0;
  switch (type) {
    case ncclFloat32:
      factor = *(float*)scalar;
      break;
    case ncclFloat64:
      factor = *(double*)scalar;
      break;
    case ncclFloat16:
      factor = *(_Float16*)scalar;
      break;
    case ncclBfloat16:
      factor = (float)*(BFloat16*)scalar;
      break;
    default:
      return ncclInvalidArgument;
  }
  std::lock_guard<std::mutex> guard(factors_mutex);
  *operation = (ncclRedOp_t)(ncclNumOps + factors().size());
  factors().push_back(factor);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
