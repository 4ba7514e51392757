"""Models as computation graphs for other runtimes: ONNX, and OpenVINO's IR made of it."""
