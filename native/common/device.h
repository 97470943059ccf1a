// KSL_HD marks small functions that every backend shares, also in kernels of a device.
#pragma once

#ifdef __CUDACC__
#define KSL_HD __host__ __device__
#else
#define KSL_HD
#endif
