"""The agent on each machine: installs backends, supervises processes, holds files, serves the one ingress port."""
