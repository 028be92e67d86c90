# How the project builds its own programs. Nothing of this reaches a user of verkv::verkv.
include_guard(DIRECTORY)

set(VERKV_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow)

function(verkv_own_program target)
    set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
    if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
        return()
    endif()
    target_compile_options(${target} PRIVATE ${VERKV_WARNINGS})
    if(VERKV_NATIVE)
        # g++ 12 warns of uninitialised values inside its own AVX-512 intrinsics, in Eigen too.
        target_compile_options(${target} PRIVATE -march=native
                                                 "$<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized>")
    endif()
    if(VERKV_SANITIZE)
        target_compile_options(${target} PRIVATE -fsanitize=${VERKV_SANITIZE} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer)
        target_link_options(${target} PRIVATE -fsanitize=${VERKV_SANITIZE})
        # Sanitizers make g++ warn of uninitialised values that are not, inside the standard library too.
        target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    elseif(VERKV_WERROR)
        target_compile_options(${target} PRIVATE -Werror)
    endif()
endfunction()
