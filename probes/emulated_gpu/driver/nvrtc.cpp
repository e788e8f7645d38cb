// libnvrtc: PyTorch compiles some kernels while it runs (ATen/native/cuda/jit_utils.cpp). No kernel runs here, so that
// the binary of each is a few bytes and its name any one.

#include <cstddef>
#include <cstring>

#define API extern "C" int

namespace {
constexpr size_t BINARY_BYTES = 16;
}  // namespace

API nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0; }

API nvrtcGetCUBINSize(void*, size_t* size) { return *size = BINARY_BYTES, 0; }
API nvrtcGetPTXSize(void*, size_t* size) { return *size = BINARY_BYTES, 0; }
API nvrtcGetCUBIN(void*, char* binary) { return std::memset(binary, 0, BINARY_BYTES), 0; }
API nvrtcGetPTX(void*, char* text) { return std::memset(text, 0, BINARY_BYTES), 0; }

API nvrtcGetProgramLogSize(void*, size_t* size) { return *size = 1, 0; }
API nvrtcGetProgramLog(void*, char* text) { return *text = 0; }
API nvrtcGetLoweredName(void*, const char*, const char** name) { return *name = "kernel", 0; }
