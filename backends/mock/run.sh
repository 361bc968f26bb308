#!/bin/sh
# Without a manifest a backend is started as LocalAI's are: run.sh --addr HOST:PORT, and speaks gRPC.
# CORRAL_PYTHON is the worker's own interpreter, which has the sdk. -B: what is installed stays as it was installed.
exec "${CORRAL_PYTHON:-python3}" -B "$(dirname "$0")/mock.py" "$@"
