// Comes after a header of the CUDA side: Eigen costs nvcc nine seconds a file, and warns.
#pragma once

#if defined(EIGEN_CORE_H) || defined(EIGEN_CORE_MODULE_H)
#error "a .cuh of verkv includes Eigen"
#endif
