# find_package(quaver) with quaver_DIR from `python -m quaver.include --cmake`, or with the folder that
# `python -m quaver.include` prints in CMAKE_PREFIX_PATH.
#
# quaver::numerics  the headers quaver_numerics.h (C99) and quaver.hpp (C++17); nothing to link
if(NOT TARGET quaver::numerics)
  add_library(quaver::numerics INTERFACE IMPORTED)
  get_filename_component(_quaver_headers "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  set_target_properties(quaver::numerics PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_quaver_headers}")
  unset(_quaver_headers)
endif()
