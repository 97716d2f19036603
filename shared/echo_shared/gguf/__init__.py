"""Models and adapters as GGUF files, the format of llama.cpp, for nodes that sample and hubs that export.

Only modules of this package import `gguf`, and `llama_cpp` for what llama.cpp itself does. `families` describes the
families of models. `shape` reads one model's sizes, and refuses models that llama.cpp computes differently from
transformers. `model_file` converts a model, `adapter_file` an adapter, `quantising` makes K-quants.
"""
