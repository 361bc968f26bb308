"""The agent on each machine: installs backends, supervises their processes, holds files, serves the one ingress port."""
