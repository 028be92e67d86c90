# clang-tidy finds nothing in the library's headers (.clang-tidy says which checks, and that a finding is an error).
cmake_minimum_required(VERSION 3.25)
get_filename_component(root "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
file(STRINGS "${FLAGS}" flags)
file(GLOB kernels "${root}/include/verkv/cuda/*.hpp")
execute_process(COMMAND "${CLANG_TIDY}" --quiet "--config-file=${root}/.clang-tidy" "${root}/include/verkv/verkv.hpp" ${kernels} --
                        -xc++ ${flags} RESULT_VARIABLE result ERROR_VARIABLE text OUTPUT_VARIABLE findings)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "${text}\n${findings}")
endif()
