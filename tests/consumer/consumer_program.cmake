# The program that every consumer builds, and what must not have come with verkv::verkv.
enable_testing()
add_executable(consumer "${CMAKE_CURRENT_LIST_DIR}/first.cpp" "${CMAKE_CURRENT_LIST_DIR}/second.cpp")
target_link_libraries(consumer PRIVATE verkv::verkv)
add_test(NAME consumer COMMAND consumer)

foreach(property INTERFACE_COMPILE_OPTIONS INTERFACE_COMPILE_DEFINITIONS INTERFACE_LINK_OPTIONS)
    get_target_property(value verkv::verkv ${property})
    if(value)
        message(FATAL_ERROR "verkv::verkv has ${property} ${value}")
    endif()
endforeach()
