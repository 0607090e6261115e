// NVML: the numbers that telemetry and torch's allocator read.
#include <cstdio>
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int SUCCESS = 0;
constexpr int INVALID_ARGUMENT = 2;
constexpr int NOT_SUPPORTED = 3;
constexpr unsigned long long BYTES = 85014609920ull;
constexpr unsigned long long BYTES_IN_USE = 1'000'000'000;

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct Utilization {
  unsigned gpu;
  unsigned memory;
};

unsigned devices() {
  const char* value = getenv("FAKE_GPUS");
  return value ? atoi(value) : 1;
}

}  // namespace

EXPORT int nvmlInit() { return SUCCESS; }
EXPORT int nvmlInit_v2() { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned) { return SUCCESS; }
EXPORT int nvmlShutdown() { return SUCCESS; }
EXPORT const char* nvmlErrorString(int) { return "an error of the stand-in of NVML"; }

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = devices();
  return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = (void*)(long)(index + 1);
  return index < devices() ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, void** handle) {
  return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) {
  *handle = (void*)1;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char*, void** handle) {
  *handle = (void*)1;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetUUID(void* handle, char* text, unsigned length) {
  snprintf(text, length, "GPU-%02x000000-0000-0000-0000-000000000000", (int)(long)handle);
  return SUCCESS;
}

EXPORT int nvmlDeviceGetName(void*, char* text, unsigned length) {
  snprintf(text, length, "NVIDIA H100 80GB HBM3");
  return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  *memory = Memory{BYTES, BYTES - BYTES_IN_USE, BYTES_IN_USE};
  return SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(void*, Utilization* utilization) {
  *utilization = Utilization{50, 20};
  return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  *celsius = 60;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetClockInfo(void*, int, unsigned* megahertz) {
  *megahertz = 1980;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 300'000;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  *millijoules = 12'345;
  return SUCCESS;
}

// No other process: torch asks when it is out of memory.
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return SUCCESS; }

// What an H100 in a single host without NVSwitch would also refuse.
EXPORT int nvmlDeviceGetNvLinkCapability() { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2() { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetP2PStatus() { return NOT_SUPPORTED; }
