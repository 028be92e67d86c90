# Installs the headers and a CMake package: find_package(verkv) gives verkv::verkv, with COMPONENTS cuda also verkv::cuda.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(verkv_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/verkv")

install(TARGETS verkv EXPORT verkvTargets FILE_SET HEADERS)
install(EXPORT verkvTargets NAMESPACE verkv:: DESTINATION "${verkv_package_dir}")

configure_package_config_file(cmake/verkvConfig.cmake.in "${PROJECT_BINARY_DIR}/verkvConfig.cmake"
                              INSTALL_DESTINATION "${verkv_package_dir}" NO_SET_AND_CHECK_MACRO
                              NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Below 1.0 the minor version is the one that may break a user.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/verkvConfigVersion.cmake" COMPATIBILITY SameMinorVersion
                                 ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/verkvConfig.cmake" "${PROJECT_BINARY_DIR}/verkvConfigVersion.cmake"
              cmake/FindRandom123.cmake cmake/verkvCuda.cmake DESTINATION "${verkv_package_dir}")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}")
