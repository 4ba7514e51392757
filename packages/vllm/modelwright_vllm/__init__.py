"""vLLM as the engine of a server, on GPUs: `modelwright serve RUN --backend vllm`, joined by an entry point."""
