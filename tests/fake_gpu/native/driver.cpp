// The driver's interface: memory in segments that grow (expandable_segments), and entry points by name.
#include <dlfcn.h>
#include <sys/mman.h>

#include <map>
#include <mutex>

#include "standin.h"

namespace {

constexpr int SUCCESS = 0;
constexpr int OUT_OF_MEMORY = 2;
constexpr size_t SEGMENT_BYTES = 2 << 20;

std::map<unsigned long long, size_t>& bytes_of_handles() {
  static auto* bytes = new std::map<unsigned long long, size_t>;
  return *bytes;
}

std::mutex& handles_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

int answer_nothing() { return SUCCESS; }

}  // namespace

EXPORT int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = SEGMENT_BYTES;
  return SUCCESS;
}

EXPORT int cuMemAddressReserve(
    uintptr_t* address, size_t bytes, size_t, uintptr_t, unsigned long long) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapping == MAP_FAILED) return OUT_OF_MEMORY;
  *address = (uintptr_t)mapping;
  return SUCCESS;
}

EXPORT int cuMemAddressFree(uintptr_t address, size_t bytes) {
  munmap((void*)address, bytes);
  return SUCCESS;
}

EXPORT int cuMemCreate(unsigned long long* handle, size_t bytes, const void*, unsigned long long) {
  if (!standin::reserve_bytes(bytes)) return OUT_OF_MEMORY;
  *handle = (unsigned long long)standin::new_handle();
  std::lock_guard<std::mutex> guard(handles_mutex());
  bytes_of_handles()[*handle] = bytes;
  return SUCCESS;
}

EXPORT int cuMemRelease(unsigned long long handle) {
  std::lock_guard<std::mutex> guard(handles_mutex());
  auto found = bytes_of_handles().find(handle);
  if (found == bytes_of_handles().end()) return SUCCESS;
  standin::return_bytes(found->second);
  bytes_of_handles().erase(found);
  return SUCCESS;
}

EXPORT int cuMemMap(
    uintptr_t address, size_t bytes, size_t, unsigned long long, unsigned long long) {
  standin::fill((void*)address, bytes);
  standin::remember((void*)address, bytes, standin::Kind::device);
  return SUCCESS;
}

EXPORT int cuMemUnmap(uintptr_t address, size_t bytes) {
  standin::forget((void*)address);
  madvise((void*)address, bytes, MADV_DONTNEED);
  return SUCCESS;
}

EXPORT int cuMemSetAccess(uintptr_t, size_t, const void*, size_t) { return SUCCESS; }

EXPORT int cuDeviceGet(int* device, int index) {
  *device = index;
  return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return SUCCESS;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in of the driver";
  return SUCCESS;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  void* found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : (void*)answer_nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDriverEntryPoint(
    const char* name, void** function, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, 0, result);
}
