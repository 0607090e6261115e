// The devices: what torch, NCCL and the project ask of an H100, answered with the published numbers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "standin.h"

namespace {

constexpr int MULTIPROCESSORS = 132;
constexpr int THREADS_OF_A_BLOCK = 1024;
constexpr int THREADS_OF_A_MULTIPROCESSOR = 2048;
constexpr int REGISTERS = 65536;
constexpr int SHARED_BYTES_OF_A_BLOCK = 49152;
constexpr int SHARED_BYTES_OF_A_BLOCK_AT_MOST = 232448;
constexpr int SHARED_BYTES_OF_A_MULTIPROCESSOR = 233472;
constexpr int L2_BYTES = 52428800;
constexpr int BUS_WIDTH = 5120;
constexpr int CUDA_VERSION_REPORTED = 13000;

thread_local int device_of_thread = 0;
bool is_initialised[64];

int compute_capability() {
  const char* value = getenv("FAKE_GPU_CAPABILITY");
  return value ? atoi(value) : 90;
}

}  // namespace

namespace standin {

int current_device() { return device_of_thread; }

void mark_as_initialised(int device) { is_initialised[device] = true; }

}  // namespace standin

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = standin::visible_devices();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= standin::visible_devices()) return cudaErrorInvalidDevice;
  device_of_thread = device;
  is_initialised[device] = true;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int index) {
  memset(device, 0, sizeof *device);
  strcpy(device->name, "NVIDIA H100 80GB HBM3");
  device->uuid.bytes[0] = 1 + index;
  device->pciBusID = index + 1;
  device->major = compute_capability() / 10;
  device->minor = compute_capability() % 10;
  device->totalGlobalMem = standin::bytes_of_device();
  device->totalConstMem = 65536;
  device->sharedMemPerBlock = SHARED_BYTES_OF_A_BLOCK;
  device->sharedMemPerBlockOptin = SHARED_BYTES_OF_A_BLOCK_AT_MOST;
  device->sharedMemPerMultiprocessor = SHARED_BYTES_OF_A_MULTIPROCESSOR;
  device->reservedSharedMemPerBlock = 1024;
  device->regsPerBlock = REGISTERS;
  device->regsPerMultiprocessor = REGISTERS;
  device->warpSize = 32;
  device->memPitch = 2147483647;
  device->maxThreadsPerBlock = THREADS_OF_A_BLOCK;
  device->maxThreadsPerMultiProcessor = THREADS_OF_A_MULTIPROCESSOR;
  device->maxBlocksPerMultiProcessor = 32;
  device->maxThreadsDim[0] = THREADS_OF_A_BLOCK;
  device->maxThreadsDim[1] = THREADS_OF_A_BLOCK;
  device->maxThreadsDim[2] = 64;
  device->maxGridSize[0] = 2147483647;
  device->maxGridSize[1] = 65535;
  device->maxGridSize[2] = 65535;
  device->textureAlignment = 512;
  device->multiProcessorCount = MULTIPROCESSORS;
  device->concurrentKernels = 1;
  device->asyncEngineCount = 3;
  device->unifiedAddressing = 1;
  device->memoryBusWidth = BUS_WIDTH;
  device->l2CacheSize = L2_BYTES;
  device->persistingL2CacheMaxSize = 32768000;
  device->streamPrioritiesSupported = 1;
  device->managedMemory = 1;
  device->concurrentManagedAccess = 1;
  device->cooperativeLaunch = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = THREADS_OF_A_BLOCK;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 2147483647;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = SHARED_BYTES_OF_A_BLOCK;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = SHARED_BYTES_OF_A_BLOCK_AT_MOST;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = SHARED_BYTES_OF_A_MULTIPROCESSOR;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = REGISTERS;
      break;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = 32;
      break;
    case cudaDevAttrClockRate:
      *value = 1980000;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 2619000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = BUS_WIDTH;
      break;
    case cudaDevAttrL2CacheSize:
      *value = L2_BYTES;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = MULTIPROCESSORS;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = THREADS_OF_A_MULTIPROCESSOR;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = compute_capability() / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = compute_capability() % 10;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can_access, int, int) {
  *can_access = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_REPORTED;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION_REPORTED;
  return cudaSuccess;
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    default:
      return "an error of the stand-in of CUDA";
  }
}

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

// The driver's view of the same: torch asks whether a device has a context before it uses it.
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  if (flags) *flags = 0;
  *is_active = is_initialised[device];
  return 0;
}
