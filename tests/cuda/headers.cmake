# Compiles FILES with nvcc and links them, for one architecture: a function without `inline` is there twice then.
cmake_minimum_required(VERSION 3.25)
file(STRINGS "${FLAGS}" flags)
set(objects "")
file(WRITE "${OUT}/headers_main.cpp" "int main() {}\n")
foreach(source ${FILES} "${OUT}/headers_main.cpp")
    execute_process(COMMAND "${NVCC}" ${flags} -arch=sm_90 -c "${source}" -o "${source}.o" RESULT_VARIABLE result
                    OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(NOT result EQUAL 0)
        message(FATAL_ERROR "${source}:\n${text}")
    endif()
    list(APPEND objects "${source}.o")
endforeach()
execute_process(COMMAND "${NVCC}" ${objects} -arch=sm_90 -o "${OUT}/headers" RESULT_VARIABLE result OUTPUT_VARIABLE text
                ERROR_VARIABLE text)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "${text}")
endif()
