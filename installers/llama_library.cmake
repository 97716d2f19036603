# For CMAKE_PROJECT_llama.cpp_INCLUDE: llama-cpp-python has llama.cpp build what its programs share, too, which it never
# loads. A normal variable goes before the cached one by which it asks for that.
set(LLAMA_BUILD_COMMON OFF)
