# Syntax of headers with clang++. PRELUDE=ON: precompiles what the hostile macros must not touch.
# Else, for each of NAMES: the header alone, then under hostile macros and without exceptions.
cmake_minimum_required(VERSION 3.25)
file(STRINGS "${FLAGS}" flags)
list(APPEND flags "-I${CMAKE_CURRENT_LIST_DIR}/..")
set(prelude "${GENERATED}/prelude.pch")

function(compile)
    execute_process(COMMAND "${COMPILER}" ${flags} ${ARGN} RESULT_VARIABLE result ERROR_VARIABLE text)
    if(NOT result EQUAL 0)
        message(SEND_ERROR "${text}")
    endif()
endfunction()

if(PRELUDE)
    compile(-fno-exceptions -x c++-header "${CMAKE_CURRENT_LIST_DIR}/prelude.hpp" -o "${prelude}")
endif()
foreach(name ${NAMES})
    compile(${WARNINGS} -Werror -fsyntax-only "${GENERATED}/plain/${name}.cpp")
    compile(${WARNINGS} -Werror -fsyntax-only -fno-exceptions -include-pch "${prelude}" "${GENERATED}/hostile/${name}.cpp")
endforeach()
