// Device memory is host memory that nobody has to touch, and torch's own allocator hands it out.
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>

#include "standin.h"

namespace {

constexpr size_t MEGABYTE = 1 << 20;
constexpr size_t ALIGNMENT = 2 * MEGABYTE;
constexpr size_t LARGEST_FILL = 512 * MEGABYTE;
constexpr size_t BYTES_OF_CONTEXT = 600'000'000;  // about what CUDA itself takes of an H100

struct Block {
  size_t bytes;
  standin::Kind kind;
  int device;
  void* mapping;  // null: memory of somebody else
  size_t mapped_bytes;
};

std::mutex& memory_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::map<uintptr_t, Block>& blocks() {
  static auto* blocks = new std::map<uintptr_t, Block>;
  return *blocks;
}

size_t bytes_in_use[64];  // by device

Block* find(const void* address) {
  auto after = blocks().upper_bound((uintptr_t)address);
  if (after == blocks().begin()) return nullptr;
  auto block = std::prev(after);
  bool is_inside = (uintptr_t)address < block->first + block->second.bytes;
  return is_inside ? &block->second : nullptr;
}

}  // namespace

namespace standin {

Kind kind_of(const void* address) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  Block* block = find(address);
  return block ? block->kind : Kind::unknown;
}

int device_of(const void* address) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  Block* block = find(address);
  return block ? block->device : cudaInvalidDeviceId;
}

bool reserve_bytes(size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  size_t& used = bytes_in_use[current_device()];
  if (used + bytes > bytes_to_allocate()) return false;
  used += bytes;
  return true;
}

void return_bytes(size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  bytes_in_use[current_device()] -= bytes;
}

void fill(void* address, size_t bytes) {
  if (fill_byte() && bytes < LARGEST_FILL) memset(address, fill_byte(), bytes);
}

void remember(void* address, size_t bytes, Kind kind) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  blocks()[(uintptr_t)address] = Block{bytes, kind, current_device(), nullptr, 0};
}

void forget(void* address) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  blocks().erase((uintptr_t)address);
}

void* allocate(size_t bytes, Kind kind) {
  size_t whole_pages = (bytes + 4095) & ~size_t(4095);
  if (kind == Kind::device && !reserve_bytes(whole_pages)) return nullptr;
  size_t mapped = whole_pages + ALIGNMENT;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  void* address = (void*)(((uintptr_t)mapping + ALIGNMENT - 1) & ~(uintptr_t)(ALIGNMENT - 1));
  if (kind == Kind::device) fill(address, whole_pages);
  std::lock_guard<std::mutex> guard(memory_mutex());
  blocks()[(uintptr_t)address] = Block{whole_pages, kind, current_device(), mapping, mapped};
  return address;
}

bool release(void* address) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  auto found = blocks().find((uintptr_t)address);
  if (found == blocks().end()) return false;
  Block block = found->second;
  blocks().erase(found);
  if (block.kind == Kind::device) bytes_in_use[block.device] -= block.bytes;
  if (block.mapping) munmap(block.mapping, block.mapped_bytes);
  return true;
}

}  // namespace standin

static cudaError_t allocate_into(void** address, size_t bytes, standin::Kind kind) {
  *address = nullptr;
  if (bytes == 0) return cudaSuccess;
  *address = standin::allocate(bytes, kind);
  return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

static cudaError_t release_from(void* address) {
  if (!address) return cudaSuccess;
  return standin::release(address) ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) {
  standin::mark_as_initialised(standin::current_device());
  return allocate_into(address, bytes, standin::Kind::device);
}

EXPORT cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) {
  return allocate_into(address, bytes, standin::Kind::device);
}

EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  return allocate_into(address, bytes, standin::Kind::pinned);
}

EXPORT cudaError_t cudaFree(void* address) { return release_from(address); }

EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return release_from(address); }

EXPORT cudaError_t cudaFreeHost(void* address) { return release_from(address); }

EXPORT cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  standin::remember(address, bytes, standin::Kind::pinned);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* address) {
  standin::forget(address);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex());
  size_t used = bytes_in_use[standin::current_device()] + BYTES_OF_CONTEXT;
  *total_bytes = standin::bytes_of_device();
  *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  memset(attributes, 0, sizeof *attributes);
  attributes->device = standin::device_of(address);
  attributes->devicePointer = (void*)address;
  switch (standin::kind_of(address)) {
    case standin::Kind::unknown:
      attributes->type = cudaMemoryTypeUnregistered;
      break;
    case standin::Kind::pinned:
      attributes->type = cudaMemoryTypeHost;
      attributes->hostPointer = (void*)address;
      break;
    case standin::Kind::device:
      attributes->type = cudaMemoryTypeDevice;
      break;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char constants[65536];
  *address = constants;
  return cudaSuccess;
}

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }

// 0: pageable or unknown, 1: pinned, 2: of the device.
EXPORT int standin_kind(const void* address) { return (int)standin::kind_of(address); }
