// What environment variables ask of the stand-in.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "standin.h"

namespace standin {

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

int visible_devices() {
  int devices = atoi(setting("FAKE_GPUS", "1"));
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return devices;
  if (!*visible) return 0;
  int listed = 1 + std::count(visible, visible + strlen(visible), ',');
  return std::min(listed, devices);
}

size_t bytes_of_device() { return 85'014'609'920; }

size_t bytes_to_allocate() {
  static const size_t bytes = strtoull(setting("FAKE_GPU_BYTES", "84000000000"), nullptr, 10);
  return bytes;
}

int fill_byte() {
  static const int byte = atoi(setting("FAKE_GPU_FILL", "1"));
  return byte;
}

static std::atomic<size_t> largest_move_bytes{SIZE_MAX};

size_t largest_move() { return largest_move_bytes; }

double seconds_before_a_hang() {
  static const double seconds = atof(setting("FAKE_NCCL_SECONDS", "60"));
  return seconds;
}

}  // namespace standin

// From here on copies and messages of more bytes move nothing.
EXPORT void standin_set_largest_move(size_t bytes) { standin::largest_move_bytes = bytes; }
