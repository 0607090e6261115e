// cuBLAS and cuDNN: handles that are not null, products that are counted, an algorithm for each product.
#include <cstring>

#include "standin.h"

constexpr int CUBLAS_VERSION_REPORTED = 130101;

static int product(const char* name) {
  standin::count_launch(name);
  return 0;
}

EXPORT int cublasCreate_v2(void** handle) {
  *handle = standin::new_handle();
  return 0;
}

EXPORT int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}

EXPORT int cublasGetVersion_v2(void*, int* version) {
  *version = CUBLAS_VERSION_REPORTED;
  return 0;
}

EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION_REPORTED; }

EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* results, int* number) {
  memset(results, 0, 128);
  *number = 1;
  return 0;
}

EXPORT int cublasGemmEx() { return product("cublasGemmEx"); }
EXPORT int cublasGemmBatchedEx() { return product("cublasGemmBatchedEx"); }
EXPORT int cublasGemmStridedBatchedEx() { return product("cublasGemmStridedBatchedEx"); }
EXPORT int cublasLtMatmul() { return product("cublasLtMatmul"); }
EXPORT int cublasSgemm_v2() { return product("cublasSgemm"); }
EXPORT int cublasSgemmStridedBatched() { return product("cublasSgemmStridedBatched"); }
EXPORT int cublasDgemm_v2() { return product("cublasDgemm"); }

EXPORT size_t cudnnGetVersion() { return 92000; }

EXPORT size_t cudnnGetCudartVersion() { return 13000; }

EXPORT int cudnnCreate(void** handle) {
  *handle = standin::new_handle();
  return 0;
}

EXPORT const char* cudnnGetErrorString(int) { return "an error of the stand-in of cuDNN"; }
