"""vLLM as the engine of a server, on GPUs: `modelwright serve RUN --backend vllm`, added by an entry point."""
