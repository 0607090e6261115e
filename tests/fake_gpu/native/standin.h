// What the files of the stand-in share: settings, the map of its memory, and the ledger of what was
// asked of the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

// cuda_runtime_api.h renames these by macro; the stand-in defines the names that libraries link to.
#undef cudaGetDeviceProperties
#undef cudaEventElapsedTime

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace standin {

// settings.cpp: what environment variables ask of the stand-in.
int visible_devices();            // FAKE_GPUS, as far as CUDA_VISIBLE_DEVICES shows them
size_t bytes_of_device();         // of an H100 with 80 GB
size_t bytes_to_allocate();       // FAKE_GPU_BYTES: above it, allocations are out of memory
int fill_byte();                  // FAKE_GPU_FILL: what new device memory holds; 0 leaves it untouched
size_t largest_move();            // copies of more bytes move nothing
double seconds_before_a_hang();   // FAKE_NCCL_SECONDS: how long a collective waits for its peers

// memory.cpp: which addresses are of the device and which are pinned.
enum class Kind { unknown, pinned, device };
Kind kind_of(const void* address);
int device_of(const void* address);
void* allocate(size_t bytes, Kind kind);  // null: out of memory
bool release(void* address);              // false: not allocated here
bool reserve_bytes(size_t bytes);         // false: there are no more
void return_bytes(size_t bytes);
void remember(void* address, size_t bytes, Kind kind);
void forget(void* address);
void fill(void* address, size_t bytes);

// devices.cpp
int current_device();
void mark_as_initialised(int device);

// streams.cpp: a collective whose peers did not come stops the device for good.
void* new_handle();
double now_milliseconds();
void stop_device();
void start_device_again();
bool device_is_stopped();

// ledger.cpp
void count_launch(const std::string& kernel);
void report_wait(const char* what);  // the host waits for the device here

}  // namespace standin
