"""Workers that only offer a gRPC address (LocalAI's): the controller is their agent and their ingress.

Towards the rest of the house such a node looks like any other: it takes orders for replicas (`orders.py`), lists what
runs (`table.py`, `watching.py`), tells its load (`load.py`) and answers requests (`door.py`). Behind that are the
contract's own words: `backend.install`, the file server, LoadModel, `model.stop`. Nothing here is imported before a
controller is told to serve such workers: gRPC alone costs a third of its memory.
"""
