// libcublas and libcublasLt: what streams, modes and the time of products depend on. Every other product does nothing.
//
// Names, numbers and layouts are those of the cuBLAS 13 documentation. Both libraries are made of this file.
#include <cstdlib>
#include <cstring>
#include "core.h"

using namespace emulated;

#define API extern "C" int
namespace {
constexpr int SUCCESS = 0, FLOAT32 = 0;  // CUBLAS_STATUS_SUCCESS, CUDA_R_32F
int width(int type) { return type == FLOAT32 ? 4 : 2; }
}  // namespace

// -- cuBLAS -----------------------------------------------------------------------------------------------------------

struct Blas {
    void* stream;
    int math, pointer, rest[64];
};
API cublasCreate_v2(Blas** handle) { return *handle = static_cast<Blas*>(calloc(1, sizeof(Blas))), SUCCESS; }
API cublasDestroy_v2(Blas* handle) { return free(handle), SUCCESS; }
API cublasSetStream_v2(Blas* handle, void* stream) { return handle->stream = stream, SUCCESS; }
API cublasGetStream_v2(Blas* handle, void** stream) { return *stream = handle->stream, SUCCESS; }
API cublasSetMathMode(Blas* handle, int mode) { return handle->math = mode, SUCCESS; }
API cublasGetMathMode(Blas* handle, int* mode) { return *mode = handle->math, SUCCESS; }
API cublasSetPointerMode_v2(Blas* handle, int mode) { return handle->pointer = mode, SUCCESS; }
API cublasGetPointerMode_v2(Blas* handle, int* mode) { return *mode = handle->pointer, SUCCESS; }
API cublasGetVersion_v2(Blas*, int* version) { return *version = 130101, SUCCESS; }
API cublasGetProperty(int type, int* value) { return *value = type == 0 ? 13 : 1, SUCCESS; }

namespace {
int product(Blas* handle, int m, int n, int k, int batch, int type) {
    return enqueue_product(handle->stream, m, n, k, batch, width(type)), SUCCESS;
}
}  // namespace
API cublasSgemm_v2(Blas* handle, int, int, int m, int n, int k, ...) { return product(handle, m, n, k, 1, FLOAT32); }
API cublasGemmEx(Blas* handle, int, int, int m, int n, int k, const void*, const void*, int type, ...) {
    return product(handle, m, n, k, 1, type);
}
API cublasGemmStridedBatchedEx(Blas* handle, int, int, int m, int n, int k, const void*, const void*, int type, int,
                               long long, const void*, int, int, long long, const void*, void*, int, int, long long, int batch,
                               int, int) {
    return product(handle, m, n, k, batch, type);
}
API cublasSgemmStridedBatched(Blas* handle, int, int, int m, int n, int k, const float*, const float*, int, long long,
                              const float*, int, long long, const float*, float*, int, long long, int batch) {
    return product(handle, m, n, k, batch, FLOAT32);
}

// -- cuBLASLt ---------------------------------------------------------------------------------------------------------

struct Layout {
    uint64_t rows, columns;
    int type, batch, rest[16];
};
struct Description {
    int transposed_a, rest[63];
};
constexpr int BATCH_COUNT = 5, TRANSPOSE_A = 3;  // cublasLtMatrixLayoutAttribute_t, cublasLtMatmulDescAttributes_t
API cublasLtCreate(void** handle) { return *handle = calloc(1, 512), SUCCESS; }
API cublasLtDestroy(void* handle) { return free(handle), SUCCESS; }
extern "C" size_t cublasLtGetVersion() { return 130101; }
extern "C" size_t cublasLtGetCudartVersion() { return 13000; }
API cublasLtGetProperty(int type, int* value) { return *value = type == 0 ? 13 : 1, SUCCESS; }
API cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t) {
    *layout = static_cast<Layout*>(calloc(1, sizeof(Layout)));
    return **layout = {rows, columns, type, 1, {}}, SUCCESS;
}
API cublasLtMatrixLayoutDestroy(Layout* layout) { return free(layout), SUCCESS; }
API cublasLtMatrixLayoutSetAttribute(Layout* layout, int number, const void* value, size_t) {
    if (number == BATCH_COUNT) layout->batch = *static_cast<const int*>(value);
    return SUCCESS;
}
API cublasLtMatmulDescCreate(Description** description, int, int) {
    return *description = static_cast<Description*>(calloc(1, sizeof(Description))), SUCCESS;
}
API cublasLtMatmulDescDestroy(Description* description) { return free(description), SUCCESS; }
API cublasLtMatmulDescSetAttribute(Description* description, int number, const void* value, size_t) {
    if (number == TRANSPOSE_A) description->transposed_a = *static_cast<const int*>(value);
    return SUCCESS;
}
API cublasLtMatmulPreferenceCreate(void** preference) { return *preference = calloc(1, 512), SUCCESS; }
API cublasLtMatmulPreferenceDestroy(void* preference) { return free(preference), SUCCESS; }
struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};
API cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Heuristic* found, int* count) {
    *count = wanted > 0;
    if (*count) *found = {{}, 0, SUCCESS, 1, {}};
    return SUCCESS;
}
API cublasLtMatmul(void*, Description* description, const void*, const void*, Layout* a, const void*, Layout*, const void*,
                   const void*, Layout*, void*, Layout* out, const void*, void*, size_t, void* stream) {
    uint64_t inner = description->transposed_a ? a->rows : a->columns;
    return enqueue_product(stream, out->rows, out->columns, inner, out->batch, width(out->type)), SUCCESS;
}
