# What the examples share beside verkv: readers and printers in examples/common, and the packages those use.
find_package(CLI11 REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release)
endif()

function(verkv_example target)
    get_filename_component(examples "${CMAKE_CURRENT_FUNCTION_LIST_DIR}" DIRECTORY)
    target_include_directories(${target} PRIVATE "${examples}")
    target_compile_definitions(${target} PRIVATE "VERKV_EXAMPLE_DATA_DIR=\"${examples}/data\"")
    target_link_libraries(${target} PRIVATE CLI11::CLI11 fmt::fmt nlohmann_json::nlohmann_json)
endfunction()
