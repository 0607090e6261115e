"""GPU paths without a GPU: the CUDA build of torch over a stand-in of CUDA, NCCL and NVML.

`native/` is the stand-in, in C++; `build.py` compiles it; `startup.py` is what each process loads;
`compute.py` and `attention.py` compute what kernels would. docs/explanations/gpu_tests.md says what it can show.
"""
