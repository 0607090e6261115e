// NCCL's communicators: made by a random name that one rank draws, split by colour, ended, aborted.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nccl_standin.h"

namespace standin {

std::string path_of(const std::string& name) {
  const char* folder = getenv("FAKE_NCCL_FOLDER");
  return std::string(folder ? folder : "/dev/shm") + "/fake-nccl-" + name;
}

static Communicator* open_communicator(const std::string& key, int size, int rank) {
  int file = open(path_of(key).c_str(), O_CREAT | O_RDWR, 0600);
  size_t bytes = BYTES_BEFORE_ARENAS + size * ARENA_BYTES;
  if (file < 0 || ftruncate(file, bytes) != 0) return nullptr;
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (mapping == MAP_FAILED) return nullptr;
  char* arenas = (char*)mapping + BYTES_BEFORE_ARENAS;
  return new Communicator{size, rank, key, (Meeting*)mapping, arenas, bytes};
}

bool meet(Communicator* communicator) {
  if (communicator->size == 1) return true;
  if (device_is_stopped()) return false;
  Meeting* meeting = communicator->meeting;
  int generation = meeting->generation;
  bool is_last = meeting->arrived.fetch_add(1) + 1 == communicator->size;
  if (is_last) {
    meeting->arrived = 0;
    meeting->generation++;
    return true;
  }
  double deadline = now_milliseconds() + 1e3 * seconds_before_a_hang();
  while (meeting->generation == generation) {
    if (communicator->is_aborted) return false;
    if (now_milliseconds() > deadline) {
      fprintf(stderr, "the stand-in of NCCL: rank %d of %d waits for good in %s\n",
              communicator->rank, communicator->size, communicator->key.c_str());
      stop_device();
      return false;
    }
    usleep(100);
  }
  return true;
}

}  // namespace standin

using standin::Communicator;

static Communicator* of(ncclComm_t communicator) { return (Communicator*)communicator; }

static std::string key_of(const ncclUniqueId& id) {
  unsigned long long number;
  memcpy(&number, id.internal, sizeof number);
  char key[32];
  snprintf(key, sizeof key, "%016llx", number);
  return key;
}

EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = 22907;
  return ncclSuccess;
}

EXPORT const char* ncclGetErrorString(ncclResult_t) { return "an error of the stand-in of NCCL"; }

EXPORT const char* ncclGetLastError(ncclComm_t) { return ""; }

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  int file = open("/dev/urandom", O_RDONLY);
  bool is_read = read(file, id->internal, 8) == 8;
  close(file);
  return is_read ? ncclSuccess : ncclSystemError;
}

EXPORT ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* communicator, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  Communicator* opened = standin::open_communicator(key_of(id), size, rank);
  if (!opened) return ncclSystemError;
  *communicator = (ncclComm_t)opened;
  return standin::meet(opened) ? ncclSuccess : ncclInternalError;
}

// One process with all the devices: its ranks need not meet.
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* communicators, int size, const int*) {
  ncclUniqueId id;
  ncclResult_t drawn = ncclGetUniqueId(&id);
  if (drawn != ncclSuccess) return drawn;
  std::string key = key_of(id);
  for (int rank = 0; rank < size; rank++) {
    Communicator* opened = standin::open_communicator(key, size, rank);
    if (!opened) return ncclSystemError;
    communicators[rank] = (ncclComm_t)opened;
  }
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(communicator, size, id, rank, nullptr);
}

EXPORT ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* communicator, int size, int rank, int, ncclUniqueId* id, ncclConfig_t* config) {
  return ncclCommInitRankConfig(communicator, size, *id, rank, config);
}

EXPORT ncclResult_t ncclCommSplit(
    ncclComm_t parent, int color, int key, ncclComm_t* communicator, ncclConfig_t*) {
  struct Choice {
    int color;
    int key;
  };
  Communicator* whole = of(parent);
  if (!standin::meet(whole)) return ncclInternalError;
  *(Choice*)whole->own_arena() = Choice{color, key};
  if (!standin::meet(whole)) return ncclInternalError;
  int size = 0;
  int position = 0;
  for (int rank = 0; rank < whole->size; rank++) {
    Choice other = *(Choice*)whole->arena(rank);
    if (other.color != color) continue;
    size++;
    bool comes_before = other.key < key || (other.key == key && rank < whole->rank);
    if (comes_before) position++;
  }
  if (!standin::meet(whole)) return ncclInternalError;
  int number = whole->splits++;
  *communicator = nullptr;
  if (color < 0) return ncclSuccess;
  std::string name = whole->key + "." + std::to_string(number) + "." + std::to_string(color);
  *communicator = (ncclComm_t)standin::open_communicator(name, size, position);
  return *communicator ? ncclSuccess : ncclSystemError;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t communicator, int* size) {
  *size = of(communicator)->size;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = of(communicator)->rank;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

// The memory stays mapped: another thread may still be in a collective of it.
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  if (communicator && of(communicator)->rank == 0) {
    unlink(standin::path_of(of(communicator)->key).c_str());
  }
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  if (communicator) of(communicator)->is_aborted = true;
  standin::start_device_again();
  return ncclCommDestroy(communicator);
}

EXPORT ncclResult_t ncclMemAlloc(void** address, size_t bytes) {
  *address = standin::allocate(bytes, standin::Kind::device);
  return *address ? ncclSuccess : ncclSystemError;
}

EXPORT ncclResult_t ncclMemFree(void* address) {
  standin::release(address);
  return ncclSuccess;
}
