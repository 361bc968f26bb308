"""One module per group of OpenAI routes that the bridge serves over gRPC."""
