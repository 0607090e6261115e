// What the files of the stand-in of NCCL share. Ranks are processes; they meet in files of shared memory
// in FAKE_NCCL_FOLDER. A call is done when it returns, so the host waits for the other ranks in it,
// where on a GPU the stream would.
#pragma once

#include <nccl.h>

#include <atomic>
#include <string>

#include "standin.h"

namespace standin {

// At the start of a communicator's file; after it, each rank has ARENA_BYTES of its own.
struct Meeting {
  std::atomic<int> arrived;
  std::atomic<int> generation;
};

constexpr size_t ARENA_BYTES = 16u << 20;
constexpr size_t BYTES_BEFORE_ARENAS = 4096;

struct Communicator {
  int size;
  int rank;
  std::string key;  // the same on its ranks alone
  Meeting* meeting;
  char* arenas;
  size_t mapped_bytes;
  int splits = 0;
  bool is_aborted = false;

  char* arena(int of_rank) const { return arenas + of_rank * ARENA_BYTES; }
  char* own_arena() const { return arena(rank); }
};

std::string path_of(const std::string& name);

// Wait until all ranks are here. False: they did not come; the device is stopped then.
bool meet(Communicator* communicator);

size_t width(ncclDataType_t type);

// Reduce `count` elements at `offset` bytes of all ranks' arenas into `result`.
void reduce(
    void* result, const Communicator& communicator, size_t offset, size_t count, ncclDataType_t type,
    ncclRedOp_t operation);

}  // namespace standin
