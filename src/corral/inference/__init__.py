"""OpenAI's HTTP to and from LocalAI's gRPC, for backends that speak only the latter (docs/reference/wire/grpc.md).

`bridge.Bridge` is the HTTP handler: one per backend process. The worker's ingress mounts it; so does the controller,
for workers that offer only a gRPC address. `load_options` makes the options of LoadModel. Neither it nor this file
imports gRPC, so that a worker without such a backend does not load it.
"""
