"""vLLM as the engine, on GPUs: `modelwright serve RUN --backend vllm`."""
