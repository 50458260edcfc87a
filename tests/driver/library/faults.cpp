#include "faults.h"

#include <fnmatch.h>

#include <cctype>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <vector>

#include "call.h"

namespace driver {

namespace {

struct Fault {
  std::string what, fault;
  int only = 0;  // the one time that it happens; 0 for every time
  int times = 0;

  bool is_call() const { return what.size() > 2 && what[0] == 'c' && what[1] == 'u' && isupper(what[2]); }
  bool happens() { return ++times == only || only == 0; }
};

std::vector<Fault> parse(const char* text) {
  std::vector<Fault> found;
  std::stringstream list(text != nullptr ? text : "");
  for (std::string each; std::getline(list, each, ',');) {
    Fault fault;
    const size_t colon = each.find(':'), at = each.find('@');
    fault.what = each.substr(0, colon);
    fault.fault = colon == std::string::npos ? "" : each.substr(colon + 1, at - colon - 1);
    fault.only = at == std::string::npos ? 0 : atoi(each.c_str() + at + 1);
    found.push_back(fault);
  }
  return found;
}

std::vector<Fault> faults = parse(getenv("KSGEN_DRIVER_FAULTS"));

}  // namespace

CUresult fault_of_call(const char* name) {
  for (Fault& fault : faults) {
    if (fault.is_call() && fault.what == name && fault.happens()) return CUresult(atoi(fault.fault.c_str()));
  }
  return CUDA_SUCCESS;
}

KernelFault fault_of_kernel(const std::string& entry) {
  KernelFault found;
  for (Fault& fault : faults) {
    if (fault.is_call() || fnmatch(fault.what.c_str(), entry.c_str(), 0) != 0 || !fault.happens()) continue;
    found.hangs |= fault.fault == "hang";
    found.is_wrong |= fault.fault == "wrong";
    if (isdigit(fault.fault[0])) found.code = CUresult(atoi(fault.fault.c_str()));
  }
  return found;
}

}  // namespace driver

extern "C" void ksgen_driver_faults(const char* text) {
  std::lock_guard<std::mutex> lock(driver::guard);
  driver::faults = driver::parse(text);
}
