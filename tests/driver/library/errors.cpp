// Errors by name and in the driver's own words.
#include "call.h"

namespace {

struct Known {
  CUresult code;
  const char *name, *words;
};

#define KNOWN(name, words) {CUDA_##name, "CUDA_" #name, words}
constexpr Known KNOWN_ERRORS[] = {
    KNOWN(SUCCESS, "no error"),
    KNOWN(ERROR_INVALID_VALUE, "invalid argument"),
    KNOWN(ERROR_OUT_OF_MEMORY, "out of memory"),
    KNOWN(ERROR_NOT_INITIALIZED, "initialization error"),
    KNOWN(ERROR_DEINITIALIZED, "driver shutting down"),
    KNOWN(ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    KNOWN(ERROR_INVALID_DEVICE, "invalid device ordinal"),
    KNOWN(ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    KNOWN(ERROR_INVALID_CONTEXT, "invalid device context"),
    KNOWN(ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    KNOWN(ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    KNOWN(ERROR_FILE_NOT_FOUND, "file not found"),
    KNOWN(ERROR_INVALID_HANDLE, "invalid resource handle"),
    KNOWN(ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    KNOWN(ERROR_NOT_FOUND, "named symbol not found"),
    KNOWN(ERROR_NOT_READY, "device not ready"),
    KNOWN(ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    KNOWN(ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    KNOWN(ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    KNOWN(ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    KNOWN(ERROR_ASSERT, "device-side assert triggered"),
    KNOWN(ERROR_HARDWARE_STACK_ERROR, "hardware stack error"),
    KNOWN(ERROR_ILLEGAL_INSTRUCTION, "an illegal instruction was encountered"),
    KNOWN(ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    KNOWN(ERROR_INVALID_ADDRESS_SPACE, "operation not supported on global/shared address space"),
    KNOWN(ERROR_INVALID_PC, "invalid program counter"),
    KNOWN(ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    KNOWN(ERROR_NOT_SUPPORTED, "operation not supported"),
    KNOWN(ERROR_MPS_MAX_CLIENTS_REACHED, "the hardware resources required to create MPS client have been exhausted"),
    KNOWN(ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    KNOWN(ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
    KNOWN(ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
    KNOWN(ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    KNOWN(ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    KNOWN(ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
    KNOWN(ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    KNOWN(ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
    KNOWN(ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    KNOWN(ERROR_INVALID_CLUSTER_SIZE, "the cluster size is invalid"),
    KNOWN(ERROR_UNKNOWN, "unknown error"),
};
#undef KNOWN

const Known* find(CUresult code) {
  for (const Known& known : KNOWN_ERRORS) {
    if (known.code == code) return &known;
  }
  return nullptr;
}

}  // namespace

CUresult cuGetErrorName(CUresult code, const char** name) {
  const Known* known = find(code);
  *name = known == nullptr ? nullptr : known->name;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** words) {
  const Known* known = find(code);
  *words = known == nullptr ? nullptr : known->words;
  return known == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
