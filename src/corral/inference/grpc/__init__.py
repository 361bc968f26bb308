"""The gRPC side of the bridge: calls to backend processes, and requests and replies as backend.proto has them."""
