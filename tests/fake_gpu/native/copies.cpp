// Copies are real and done at once. A copy between the device and pageable memory makes the host wait,
// on a GPU as here, so it is reported.
#include <cstring>

#include "standin.h"

using standin::Kind;

static void move(void* to, const void* from, size_t bytes) {
  if (bytes <= standin::largest_move()) memmove(to, from, bytes);
}

static void count_copy(void* to, const void* from) {
  bool to_device = standin::kind_of(to) == Kind::device;
  bool from_device = standin::kind_of(from) == Kind::device;
  if (to_device && from_device) {
    standin::count_launch("copy within the device");
  } else if (to_device) {
    standin::count_launch("copy to the device");
  } else if (from_device) {
    standin::count_launch("copy to the host");
  }
}

static void report_pageable(void* to, const void* from, cudaMemcpyKind direction) {
  bool from_pageable = standin::kind_of(from) == Kind::unknown;
  bool to_pageable = standin::kind_of(to) == Kind::unknown;
  if (direction == cudaMemcpyHostToDevice && from_pageable) {
    standin::report_wait("copy from pageable memory");
  }
  if (direction == cudaMemcpyDeviceToHost && to_pageable) {
    standin::report_wait("copy into pageable memory");
  }
}

EXPORT cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind direction, cudaStream_t) {
  count_copy(to, from);
  report_pageable(to, from, direction);
  move(to, from, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  count_copy(to, from);
  standin::report_wait("cudaMemcpy");
  move(to, from, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  count_copy(to, from);
  move(to, from, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void* address, int byte, size_t bytes, cudaStream_t) {
  standin::count_launch("memset");
  if (bytes <= standin::largest_move()) memset(address, byte, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void* address, int byte, size_t bytes) {
  return cudaMemsetAsync(address, byte, bytes, nullptr);
}
