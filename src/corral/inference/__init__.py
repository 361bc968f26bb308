"""OpenAI's HTTP to and from LocalAI's gRPC, for backends that speak only the latter (docs/reference/wire/grpc.md).

`bridge.Bridge` is the handler: one per process. The worker's ingress mounts it, and the controller for workers that
offer nothing but a gRPC address. `load_options` says what LoadModel is told, and needs no gRPC; nor does this file, so
that a worker without such a backend does not pay for it.
"""
