"""Models as GGUF files for llama.cpp and Ollama. `export.py` writes one."""
