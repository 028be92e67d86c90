# The target llama: from a folder with llama.cpp's source, an installed package, or a download of a pinned tag.
set(VERKV_LLAMA_CPP_SOURCE "" CACHE PATH "Folder with the source of llama.cpp")
set(verkv_llama_url https://github.com/ggml-org/llama.cpp.git)
set(verkv_llama_tag b7180)

set(BUILD_SHARED_LIBS OFF)
foreach(part TESTS EXAMPLES TOOLS SERVER COMMON APP)
    set(LLAMA_BUILD_${part} OFF CACHE BOOL "" FORCE)
endforeach()

if(VERKV_LLAMA_CPP_SOURCE)
    if(NOT EXISTS "${VERKV_LLAMA_CPP_SOURCE}/include/llama.h")
        message(FATAL_ERROR "VERKV_LLAMA_CPP_SOURCE is ${VERKV_LLAMA_CPP_SOURCE}, which has no include/llama.h: it "
                            "must be the top folder of llama.cpp's source")
    endif()
    add_subdirectory("${VERKV_LLAMA_CPP_SOURCE}" llama.cpp EXCLUDE_FROM_ALL SYSTEM)
    return()
endif()

find_package(llama QUIET)
if(llama_FOUND)
    return()
endif()

include(FetchContent)
if(NOT FETCHCONTENT_SOURCE_DIR_LLAMA AND NOT FETCHCONTENT_FULLY_DISCONNECTED)
    # Asked first, because a clone that fails ends in pages of a nested build.
    find_package(Git QUIET)
    if(GIT_FOUND)
        execute_process(
            COMMAND "${CMAKE_COMMAND}" -E env GIT_TERMINAL_PROMPT=0 "${GIT_EXECUTABLE}" ls-remote --exit-code --tags
                    ${verkv_llama_url} ${verkv_llama_tag}
            TIMEOUT 60
            RESULT_VARIABLE verkv_code
            OUTPUT_QUIET
            ERROR_VARIABLE verkv_reason
            ERROR_STRIP_TRAILING_WHITESPACE)
        string(REGEX REPLACE "^.*\n" "" verkv_reason "${verkv_reason}")
    else()
        set(verkv_code 1)
        set(verkv_reason "there is no git")
    endif()
    if(NOT verkv_code EQUAL 0)
        if(NOT verkv_reason)
            set(verkv_reason "git ls-remote: ${verkv_code}")
        endif()
        message(
            FATAL_ERROR
                "No llama.cpp. Tried: VERKV_LLAMA_CPP_SOURCE is empty; find_package(llama) found no installed package; "
                "tag ${verkv_llama_tag} of ${verkv_llama_url} cannot be had (${verkv_reason}).\n"
                "Any of these supplies it:\n"
                "  -D VERKV_LLAMA_CPP_SOURCE=FOLDER    its source; examples/llama_cpp/run.sh takes the one on PyPI\n"
                "  -D CMAKE_PREFIX_PATH=FOLDER         where it is installed\n"
                "  a network that reaches the repository, or git's url.*.insteadOf for a mirror of it")
    endif()
endif()
message(STATUS "Downloading llama.cpp ${verkv_llama_tag}")
FetchContent_Declare(
    llama
    GIT_REPOSITORY ${verkv_llama_url}
    GIT_TAG ${verkv_llama_tag}
    GIT_SHALLOW ON
    SYSTEM)
FetchContent_MakeAvailable(llama)
