// Streams and events. Everything is done in the order in which it was asked for, so an event has
// happened when it is recorded - unless a collective found no peers: then the device is stopped, what
// is recorded from there on never happens, and who waits for it waits for good, as on a GPU.
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "standin.h"

namespace {

struct Event {
  double milliseconds;
  bool never_happens;
};

std::atomic<uintptr_t> last_handle{0x1000};
std::atomic<bool> is_stopped{false};

void wait_while_stopped() {
  while (is_stopped) usleep(10'000);
}

}  // namespace

namespace standin {

void* new_handle() { return (void*)(last_handle += 16); }

double now_milliseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

void stop_device() { is_stopped = true; }

void start_device_again() { is_stopped = false; }

bool device_is_stopped() { return is_stopped; }

}  // namespace standin

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = (cudaStream_t)standin::new_handle();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) {
  standin::report_wait("cudaStreamSynchronize");
  wait_while_stopped();
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  standin::report_wait("cudaDeviceSynchronize");
  wait_while_stopped();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t) {
  return is_stopped ? cudaErrorNotReady : cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
    const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* number) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (number) *number = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t callback, void* argument, unsigned) {
  callback(stream, cudaSuccess, argument);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
  function(argument);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event{standin::now_milliseconds(), false};
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *(Event*)event = Event{standin::now_milliseconds(), is_stopped};
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  bool is_pending = ((Event*)event)->never_happens && is_stopped;
  return is_pending ? cudaErrorNotReady : cudaSuccess;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  standin::report_wait("cudaEventSynchronize");
  if (((Event*)event)->never_happens) wait_while_stopped();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = ((Event*)end)->milliseconds - ((Event*)start)->milliseconds + 1e-3f;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime_v2(float* milliseconds, cudaEvent_t a, cudaEvent_t b) {
  return cudaEventElapsedTime(milliseconds, a, b);
}
