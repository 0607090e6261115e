// NCCL's collectives and messages, a piece of an arena at a time; calls of a group are done at its end.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "nccl_standin.h"

using standin::ARENA_BYTES;
using standin::Communicator;
using standin::meet;

namespace {

struct Message {
  bool is_sent;
  void* data;
  size_t bytes;
  int peer;
  Communicator* communicator;
};

struct Call {
  Communicator* communicator;
  std::function<bool()> run;
};

thread_local int group_depth = 0;
thread_local std::vector<Call> waiting_calls;
thread_local std::vector<Message> waiting_messages;

Communicator* of(ncclComm_t communicator) { return (Communicator*)communicator; }

// A collective that waits for good is still under way, so it does not fail.
ncclResult_t answer(bool is_done) {
  return is_done || standin::device_is_stopped() ? ncclSuccess : ncclInternalError;
}

ncclResult_t run_or_wait(
    const char* name, Communicator* communicator, std::function<bool()> run) {
  standin::count_launch(name);
  if (group_depth) {
    waiting_calls.push_back(Call{communicator, std::move(run)});
    return ncclSuccess;
  }
  return answer(run());
}

bool run_in_order(const std::vector<Call>& calls) {
  bool is_done = true;
  for (const Call& call : calls) is_done &= call.run();
  return is_done;
}

bool has_ranks_that_meet(const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    bool is_other_rank = call.communicator != calls[0].communicator;
    if (is_other_rank && call.communicator->key == calls[0].communicator->key) return true;
  }
  return false;
}

// Where one process has all ranks, each has a thread: its calls wait for those of the others.
bool run_at_once(const std::vector<Call>& calls) {
  std::map<Communicator*, std::vector<Call>> calls_of_ranks;
  for (const Call& call : calls) calls_of_ranks[call.communicator].push_back(call);
  std::atomic<bool> is_done{true};
  std::vector<std::thread> threads;
  for (const auto& rank : calls_of_ranks) {
    threads.emplace_back([&] {
      if (!run_in_order(rank.second)) is_done = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return is_done;
}

// Call `exchange(first, number)` for pieces of `count` elements of which a rank's arena can hold
// `per_piece`. What is larger than the stand-in is to move is met for once, and not exchanged.
bool in_pieces(
    Communicator* communicator, size_t count, size_t element_bytes, size_t per_piece,
    const std::function<bool(size_t, size_t)>& exchange) {
  bool is_moved = count * element_bytes <= standin::largest_move();
  if (!is_moved || count == 0) return meet(communicator);
  for (size_t first = 0; first < count; first += per_piece) {
    if (!exchange(first, std::min(per_piece, count - first))) return false;
  }
  return true;
}

// All ranks show their elements, and those that get the result add up what they see.
ncclResult_t reduce_in_pieces(
    const char* name, const void* from, void* to, size_t count, ncclDataType_t type,
    ncclRedOp_t operation, bool gets_result, Communicator* communicator) {
  size_t element = standin::width(type);
  auto exchange = [=](size_t first, size_t number) {
    memcpy(communicator->own_arena(), (const char*)from + first * element, number * element);
    if (!meet(communicator)) return false;
    if (gets_result) {
      standin::reduce((char*)to + first * element, *communicator, 0, number, type, operation);
    }
    return meet(communicator);
  };
  return run_or_wait(name, communicator, [=] {
    return in_pieces(communicator, count, element, ARENA_BYTES / element, exchange);
  });
}

// How often a rank has sent to, or received from, another one: messages come in order.
int next_turn(const std::string& key) {
  static std::mutex mutex;
  static auto* turns = new std::map<std::string, int>;
  std::lock_guard<std::mutex> guard(mutex);
  return (*turns)[key]++;
}

bool send(const Message& message, const std::string& path) {
  std::string unfinished = path + ".part";
  FILE* file = fopen(unfinished.c_str(), "w");
  if (!file) return false;
  if (message.bytes) fwrite(message.data, 1, message.bytes, file);
  fclose(file);
  return rename(unfinished.c_str(), path.c_str()) == 0;
}

bool receive(const Message& message, const std::string& path) {
  double deadline = standin::now_milliseconds() + 1e3 * standin::seconds_before_a_hang();
  struct stat status;
  while (stat(path.c_str(), &status) != 0) {
    if (message.communicator->is_aborted || standin::device_is_stopped()) return false;
    if (standin::now_milliseconds() > deadline) {
      fprintf(stderr, "the stand-in of NCCL: rank %d waits for good for a message of rank %d\n",
              message.communicator->rank, message.peer);
      standin::stop_device();
      return false;
    }
    usleep(100);
  }
  if ((size_t)status.st_size != message.bytes) {
    fprintf(stderr, "the stand-in of NCCL: %zu bytes were sent where %zu are received\n",
            (size_t)status.st_size, message.bytes);
    return false;
  }
  FILE* file = fopen(path.c_str(), "r");
  if (!file) return false;
  size_t got = message.bytes ? fread(message.data, 1, message.bytes, file) : 0;
  fclose(file);
  unlink(path.c_str());
  return got == message.bytes;
}

bool deliver(Message message) {
  if (message.bytes > standin::largest_move()) message.bytes = 0;
  const Communicator& communicator = *message.communicator;
  int from = message.is_sent ? communicator.rank : message.peer;
  int to = message.is_sent ? message.peer : communicator.rank;
  std::string pair = communicator.key + "-" + std::to_string(from) + "-" + std::to_string(to);
  int turn = next_turn(pair + (message.is_sent ? " sent" : " received"));
  std::string path = standin::path_of(pair + "-" + std::to_string(turn));
  return message.is_sent ? send(message, path) : receive(message, path);
}

ncclResult_t deliver_or_wait(const Message& message) {
  standin::count_launch(message.is_sent ? "ncclSend" : "ncclRecv");
  if (group_depth) {
    waiting_messages.push_back(message);
    return ncclSuccess;
  }
  return answer(deliver(message));
}

}  // namespace

EXPORT ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd() {
  group_depth--;
  if (group_depth) return ncclSuccess;
  std::vector<Call> calls;
  std::vector<Message> messages;
  calls.swap(waiting_calls);
  messages.swap(waiting_messages);
  bool is_done = has_ranks_that_meet(calls) ? run_at_once(calls) : run_in_order(calls);
  // What is sent waits for nobody, so it comes first.
  for (const Message& message : messages) {
    if (message.is_sent) is_done &= deliver(message);
  }
  for (const Message& message : messages) {
    if (!message.is_sent) is_done &= deliver(message);
  }
  return answer(is_done);
}

EXPORT ncclResult_t ncclAllReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
    ncclComm_t handle, cudaStream_t) {
  return reduce_in_pieces("ncclAllReduce", from, to, count, type, operation, true, of(handle));
}

EXPORT ncclResult_t ncclReduce(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
    ncclComm_t handle, cudaStream_t) {
  Communicator* communicator = of(handle);
  bool gets_result = communicator->rank == root;
  return reduce_in_pieces("ncclReduce", from, to, count, type, operation, gets_result, communicator);
}

EXPORT ncclResult_t ncclBroadcast(
    const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t handle,
    cudaStream_t) {
  Communicator* communicator = of(handle);
  size_t element = standin::width(type);
  auto exchange = [=](size_t first, size_t number) {
    size_t bytes = number * element;
    if (communicator->rank == root) {
      memcpy(communicator->own_arena(), (const char*)from + first * element, bytes);
    }
    if (!meet(communicator)) return false;
    memcpy((char*)to + first * element, communicator->arena(root), bytes);
    return meet(communicator);
  };
  return run_or_wait("ncclBroadcast", communicator, [=] {
    return in_pieces(communicator, count, element, ARENA_BYTES / element, exchange);
  });
}

EXPORT ncclResult_t ncclBcast(
    void* data, size_t count, ncclDataType_t type, int root, ncclComm_t handle, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, handle, stream);
}

EXPORT ncclResult_t ncclAllGather(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle, cudaStream_t) {
  Communicator* communicator = of(handle);
  size_t element = standin::width(type);
  auto exchange = [=](size_t first, size_t number) {
    size_t bytes = number * element;
    memcpy(communicator->own_arena(), (const char*)from + first * element, bytes);
    if (!meet(communicator)) return false;
    for (int rank = 0; rank < communicator->size; rank++) {
      memcpy((char*)to + (rank * count + first) * element, communicator->arena(rank), bytes);
    }
    return meet(communicator);
  };
  return run_or_wait("ncclAllGather", communicator, [=] {
    return in_pieces(communicator, count, element, ARENA_BYTES / element, exchange);
  });
}

// `count` elements a rank. A piece has the same part of what each rank is to get.
EXPORT ncclResult_t ncclReduceScatter(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
    ncclComm_t handle, cudaStream_t) {
  Communicator* communicator = of(handle);
  size_t element = standin::width(type);
  size_t per_piece = ARENA_BYTES / element / communicator->size;
  auto exchange = [=](size_t first, size_t number) {
    size_t bytes = number * element;
    for (int rank = 0; rank < communicator->size; rank++) {
      const char* part = (const char*)from + (rank * count + first) * element;
      memcpy(communicator->own_arena() + rank * bytes, part, bytes);
    }
    if (!meet(communicator)) return false;
    size_t offset = communicator->rank * bytes;
    standin::reduce((char*)to + first * element, *communicator, offset, number, type, operation);
    return meet(communicator);
  };
  return run_or_wait("ncclReduceScatter", communicator, [=] {
    return in_pieces(communicator, count, element, per_piece, exchange);
  });
}

EXPORT ncclResult_t ncclSend(
    const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t) {
  return deliver_or_wait(
      Message{true, (void*)data, count * standin::width(type), peer, of(handle)});
}

EXPORT ncclResult_t ncclRecv(
    void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t) {
  return deliver_or_wait(Message{false, data, count * standin::width(type), peer, of(handle)});
}

EXPORT ncclResult_t ncclAlltoAll(
    const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle,
    cudaStream_t stream) {
  size_t bytes = count * standin::width(type);
  ncclGroupStart();
  for (int rank = 0; rank < of(handle)->size; rank++) {
    ncclSend((const char*)from + rank * bytes, count, type, rank, handle, stream);
    ncclRecv((char*)to + rank * bytes, count, type, rank, handle, stream);
  }
  return ncclGroupEnd();
}
