# Defines verkv::cuda: verkv::verkv, and the CUDA toolkit's headers for verkv/cuda.cuh. Read by verkvConfig.cmake for
# find_package(verkv COMPONENTS cuda), and by verkv's own CMakeLists.txt where VERKV_CUDA is ON.
# Sets verkv_cuda_missing to why it cannot be, or to nothing. Compiles nothing and adds no flag: architectures, runtime
# (CUDA_RUNTIME_LIBRARY) and separable compilation are the user's.
set(verkv_cuda_missing "")

# CMake 3.25.2 is the first that can ask nvcc for C++20. Older ones take cxx_std_20 and say nothing: .cu files would be
# compiled as C++17. (Where CUDA is enabled after this, an #error in verkv's headers says so.)
if(CMAKE_CUDA_COMPILER_LOADED AND CMAKE_VERSION VERSION_LESS 3.25.2 AND NOT VERKV_CUDA_CXX20_BY_HAND)
    string(CONCAT verkv_cuda_missing
        "the component \"cuda\" needs CMake 3.25.2 or later, this is ${CMAKE_VERSION}: older ones do not pass -std=c++20 "
        "to nvcc. Either use a later one, or pass it yourself, as in add_compile_options(\"$<$<COMPILE_LANG_AND_ID:CUDA,"
        "NVIDIA>:-std=c++20>\"), and set VERKV_CUDA_CXX20_BY_HAND to ON")
    return()
endif()

# 12.0: the first nvcc with C++20.
find_package(CUDAToolkit 12.0 QUIET)
if(NOT CUDAToolkit_FOUND)
    set(verkv_cuda_missing "the component \"cuda\" needs the CUDA toolkit, 12.0 or later, and CMake finds none (CUDAToolkit_ROOT says where to look)")
    return()
endif()

if(NOT TARGET verkv::cuda)
    add_library(verkv::cuda INTERFACE IMPORTED ${verkv_cuda_scope})
    target_link_libraries(verkv::cuda INTERFACE verkv::verkv CUDA::toolkit)
    # CUDA 13 keeps Thrust and CUB in a folder of their own, which nvcc knows and other compilers do not.
    foreach(folder ${CUDAToolkit_INCLUDE_DIRS})
        if(EXISTS "${folder}/cccl/thrust/version.h")
            target_include_directories(verkv::cuda SYSTEM INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${folder}/cccl>")
        endif()
    endforeach()
    if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.25.2 AND CMAKE_CUDA_COMPILER_LOADED)
        target_compile_features(verkv::cuda INTERFACE cuda_std_20)
    endif()
endif()
