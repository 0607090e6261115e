// The ledger: which kernels were launched in which step, and each point at which the host waited.
//
// Python says when a step begins (standin_begin_step) and takes the waits by a hook, since it knows
// the line that asked. What the stand-in itself does to compute a kernel's numbers is paused, and so
// is in no count.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

#include "standin.h"

namespace {

using WaitHook = void (*)(const char*);

std::mutex& ledger_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// Never destroyed: libraries still launch while the process ends.
std::map<int, std::map<std::string, long>>& launches_by_step() {
  static auto* launches = new std::map<int, std::map<std::string, long>>;
  return *launches;
}

int current_step = -1;  // -1: outside of any step
WaitHook wait_hook = nullptr;
thread_local int pauses = 0;

std::string readable(const std::string& name) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  if (status != 0) return name;
  std::string result = demangled;
  free(demangled);
  return result;
}

}  // namespace

namespace standin {

void count_launch(const std::string& kernel) {
  if (pauses) return;
  std::lock_guard<std::mutex> guard(ledger_mutex());
  launches_by_step()[current_step][kernel]++;
}

void report_wait(const char* what) {
  if (pauses || !wait_hook) return;
  pauses++;  // the hook may itself come to a wait
  wait_hook(what);
  pauses--;
}

}  // namespace standin

EXPORT void standin_set_wait_hook(WaitHook hook) { wait_hook = hook; }

EXPORT void standin_report_wait(const char* what) { standin::report_wait(what); }

EXPORT void standin_count_launch(const char* kernel) { standin::count_launch(kernel); }

EXPORT void standin_pause() { pauses++; }

EXPORT void standin_resume() { pauses--; }

EXPORT void standin_begin_step(int step) {
  std::lock_guard<std::mutex> guard(ledger_mutex());
  current_step = step;
}

EXPORT void standin_clear() {
  std::lock_guard<std::mutex> guard(ledger_mutex());
  launches_by_step().clear();
}

// Write one line a step and kernel to the file at `path`: step, count and name, tabs between them.
EXPORT void standin_write_launches(const char* path) {
  std::lock_guard<std::mutex> guard(ledger_mutex());
  FILE* file = fopen(path, "w");
  for (const auto& [step, launches] : launches_by_step()) {
    for (const auto& [kernel, count] : launches) {
      fprintf(file, "%d\t%ld\t%s\n", step, count, readable(kernel).c_str());
    }
  }
  fclose(file);
}
