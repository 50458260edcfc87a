#include "emulator.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

extern char** environ;

namespace driver {

namespace {

using Bytes = std::vector<unsigned char>;
constexpr long long DEVICE_ARGUMENT = 4, MOST_SECONDS = 60;
constexpr size_t MOST_REMEMBERED = 256, MOST_REMEMBERED_BYTES = 1 << 20;  // launches, and of each
constexpr int CAUGHT = 3;  // the exit code that comes with a report

// The layout is that of tests/emulator/emulator.py.
class Job {
 public:
  void number(long long value) { bytes(&value, sizeof(value)); }
  void bytes(const void* from, size_t count) {
    const auto begin = static_cast<const unsigned char*>(from);
    content_.insert(content_.end(), begin, begin + count);
    content_.resize((content_.size() + 7) / 8 * 8);
  }
  const Bytes& content() const { return content_; }

 private:
  Bytes content_;
};

Job describe(const Function& function, const CUlaunchConfig& config, const Manner& manner, const Bytes& arguments,
             const std::vector<std::shared_ptr<Allocation>>& memory) {
  Job job;
  for (const unsigned size : {config.gridDimX, config.gridDimY, config.gridDimZ}) job.number(size);
  for (const unsigned size : {config.blockDimX, config.blockDimY, config.blockDimZ}) job.number(size);
  const long long order = 0, seed = 0, accumulation = 0;
  for (const long long each : {(long long)config.sharedMemBytes, order, seed, (long long)manner.cluster,
                               (long long)manner.is_early, accumulation, (long long)manner.architecture, MOST_SECONDS,
                               (long long)function.kernel.number}) {
    job.number(each);
  }
  job.number(memory.size());
  for (size_t i = 0; i < memory.size(); ++i) {
    const bool is_writable = true;
    for (const long long fact : {(long long)i, (long long)is_writable, (long long)memory[i]->begin}) job.number(fact);
    job.number(memory[i]->content.size());
    job.bytes(memory[i]->content.data(), memory[i]->content.size());
  }
  job.number(function.kernel.parameters.size());
  for (const Parameter& parameter : function.kernel.parameters) {
    job.number(DEVICE_ARGUMENT);
    job.number(parameter.bytes);
    job.bytes(arguments.data() + parameter.offset, parameter.bytes);
  }
  return job;
}

// A file in memory, which a child finds under a path of its own.
class MemoryFile {
 public:
  MemoryFile() : file_(memfd_create("ksgen", 0)) {}
  ~MemoryFile() { close(file_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }
  bool write(const Bytes& content) const {
    for (size_t done = 0; done < content.size();) {
      const ssize_t count = pwrite(file_, content.data() + done, content.size() - done, done);
      if (count <= 0) return false;
      done += count;
    }
    return true;
  }
  Bytes read() const {
    struct stat status = {};
    fstat(file_, &status);
    Bytes content(status.st_size);
    size_t done = 0;
    for (ssize_t count = 1; count > 0; done += count)
      count = pread(file_, content.data() + done, content.size() - done, done);
    return content;
  }

 private:
  int file_;
};

// The exit code; -1 where it did not start, or was killed.
int run(const std::string& executable, const MemoryFile& job, const MemoryFile& result) {
  std::string words[] = {executable, job.path(), result.path()};
  char* command[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
  pid_t child;
  if (posix_spawn(&child, executable.c_str(), nullptr, nullptr, command, environ) != 0) return -1;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// What a GPU would make of what the emulator caught.
CUresult code_of(const std::string& report) {
  const auto is = [&report](const char* kind) {
    return report.find(std::string("\"kind\": \"") + kind + "\"") != std::string::npos;
  };
  if (is("out-of-bounds") || is("read-only")) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (is("misaligned")) return CUDA_ERROR_MISALIGNED_ADDRESS;
  if (is("timeout")) return CUDA_ERROR_LAUNCH_TIMEOUT;
  return CUDA_ERROR_LAUNCH_FAILED;
}

}  // namespace

CUresult emulate(const Function& function, const CUlaunchConfig& config, const Manner& manner, const Bytes& arguments,
                 const std::vector<std::shared_ptr<Allocation>>& memory) {
  // A launch that was emulated before, on the same memory, ends as it did then: timed kernels are launched hundreds of
  // times.
  static auto& emulated = *new std::map<std::pair<std::string, Bytes>, Bytes>;
  const auto put = [&memory](const Bytes& content) {
    size_t at = 0;
    for (const auto& each : memory) {
      memcpy(each->content.data(), content.data() + at, each->content.size());
      at += each->content.size();
    }
    return CUDA_SUCCESS;
  };
  const std::pair<std::string, Bytes> asked =
      {function.emulator, describe(function, config, manner, arguments, memory).content()};
  if (const auto found = emulated.find(asked); found != emulated.end()) return put(found->second);
  MemoryFile job, result;
  if (!job.write(asked.second)) return CUDA_ERROR_UNKNOWN;
  const int exit_code = run(function.emulator, job, result);
  const Bytes content = result.read();
  if (exit_code != 0) {
    const std::string report(content.begin(), content.end());
    fprintf(stderr, "stand-in driver: %s: exit code %d %s\n", function.kernel.name.c_str(), exit_code, report.c_str());
    return exit_code == CAUGHT ? code_of(report) : CUDA_ERROR_LAUNCH_FAILED;
  }
  if (asked.second.size() <= MOST_REMEMBERED_BYTES) {
    if (emulated.size() >= MOST_REMEMBERED) emulated.clear();
    emulated[asked] = content;
  }
  return put(content);
}

}  // namespace driver
