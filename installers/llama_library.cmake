# For CMAKE_PROJECT_llama.cpp_INCLUDE: llama-cpp-python makes llama.cpp build its programs' shared code, which it never
# loads. A normal variable overrides the cached one that requests this.
set(LLAMA_BUILD_COMMON OFF)
