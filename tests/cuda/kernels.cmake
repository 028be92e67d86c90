# Compiles SOURCE to OBJECT for all architectures (or those of ARCHITECTURES), with ptxas' account of each kernel in
# REPORT.
cmake_minimum_required(VERSION 3.25)
if(NOT ARCHITECTURES)
    set(ARCHITECTURES 80 90 100)
endif()
file(STRINGS "${FLAGS}" flags)
foreach(architecture ${ARCHITECTURES})
    list(APPEND flags -gencode=arch=compute_${architecture},code=sm_${architecture})
endforeach()
execute_process(COMMAND "${NVCC}" ${flags} -Xptxas=-v -MD -MT "${OBJECT}" -MF "${OBJECT}.d" -c "${SOURCE}" -o "${OBJECT}"
                RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
if(NOT result EQUAL 0)
    file(REMOVE "${REPORT}")
    message(FATAL_ERROR "${text}")
endif()
file(WRITE "${REPORT}" "${text}")
