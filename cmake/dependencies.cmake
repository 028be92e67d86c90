# What the library needs: Eigen3::Eigen, Random123::Random123, Threads::Threads. The system's packages come first;
# VERKV_FETCH_DEPENDENCIES downloads what is missing.
include_guard(DIRECTORY)

# Headers at a pinned tag, as an imported target: nothing of the other project's build is run or installed.
function(verkv_fetch_headers target repository tag folder)
    string(MAKE_C_IDENTIFIER "verkv_${target}" name)
    string(TOLOWER "${name}" name)
    include(FetchContent)
    FetchContent_Declare(
        ${name}
        GIT_REPOSITORY ${repository}
        GIT_TAG ${tag}
        GIT_SHALLOW ON
        SOURCE_SUBDIR no-build)
    FetchContent_MakeAvailable(${name})
    add_library(${target} INTERFACE IMPORTED GLOBAL)
    target_include_directories(${target} SYSTEM INTERFACE "${${name}_SOURCE_DIR}${folder}")
endfunction()

find_package(Threads REQUIRED)

if(VERKV_FETCH_DEPENDENCIES)
    set(verkv_missing QUIET)
else()
    set(verkv_missing REQUIRED)
endif()
if(NOT TARGET Eigen3::Eigen)
    find_package(Eigen3 3.4 ${verkv_missing} CONFIG)
endif()
if(NOT TARGET Random123::Random123)
    find_package(Random123 ${verkv_missing})
endif()
if(NOT TARGET Eigen3::Eigen)
    verkv_fetch_headers(Eigen3::Eigen https://gitlab.com/libeigen/eigen.git 3.4.0 "")
endif()
if(NOT TARGET Random123::Random123)
    verkv_fetch_headers(Random123::Random123 https://github.com/DEShawResearch/random123.git v1.14.0 /include)
endif()
